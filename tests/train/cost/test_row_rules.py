from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, set_value, value
from zerofx.ir.operators.operator import Given
from zerofx.ir.operators.rows import SUM, Rows, group_rows, tile_shape
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.analysis.tile_chains import rows_of_result

aten = torch.ops.aten
NUM_ROWS = 4
HERE = Origin("", Phase.FORWARD)
FIRST, SECOND, PAIRS, SPREAD = Rows(0, 1, 1), Rows(1, 1, 1), Rows(0, 1, 2), Rows(0, 2, 1)


def of(*shape: int) -> Tensor:
    return torch.randn(shape)


SPLIT: list[tuple[str, Any, list[Any], list[Rows | None]]] = [
    ("pointwise", aten.mul.Tensor, [of(4, 3), of(3)], [FIRST, None]),
    ("pointwise, spread rows", aten.add.Tensor, [of(2, 2, 3), of(2, 2, 3)], [SPREAD, SPREAD]),
    ("pointwise, lower rank", aten.add.Tensor, [of(5, 4, 3), of(4, 3)], [SECOND, FIRST]),
    ("pointwise, column", aten.div.Tensor, [of(4, 3), of(4, 1)], [FIRST, FIRST]),
    ("mask for all", aten.where.self, [of(1, 3) > 0, of(4, 3), of(4, 3)], [None, FIRST, FIRST]),
    ("cast", aten._to_copy.default, [of(4, 3)], [FIRST]),
    ("view", aten.view.default, [of(4, 6), [4, 2, 3]], [FIRST]),
    ("view that spreads", aten.view.default, [of(4, 6), [2, 2, 6]], [FIRST]),
    ("view that merges", aten.view.default, [of(2, 2, 6), [4, 6]], [SPREAD]),
    ("view of pairs", aten.view.default, [of(4, 2, 3), [8, 3]], [FIRST]),
    ("view behind others", aten.view.default, [of(3, 8, 5), [3, 4, 10]], [Rows(1, 1, 2)]),
    ("t", aten.t.default, [of(4, 3)], [FIRST]),
    ("transpose", aten.transpose.int, [of(4, 3, 5), 1, -1], [FIRST]),
    ("permute", aten.permute.default, [of(4, 3, 5), [2, 0, 1]], [FIRST]),
    ("permute, spread rows", aten.permute.default, [of(2, 2, 5), [2, 0, 1]], [SPREAD]),
    ("expand", aten.expand.default, [of(4, 1), [5, 4, 3]], [FIRST]),
    ("unsqueeze before", aten.unsqueeze.default, [of(4, 3), 0], [FIRST]),
    ("unsqueeze behind", aten.unsqueeze.default, [of(4, 3), -1], [FIRST]),
    ("squeeze", aten.squeeze.dim, [of(1, 4, 3), 0], [SECOND]),
    ("squeeze of two", aten.squeeze.dims, [of(1, 4, 3, 1), [0, 3]], [SECOND]),
    ("select", aten.select.int, [of(3, 4), 0, 1], [SECOND]),
    ("unbind", aten.unbind.int, [of(3, 4, 2)], [SECOND]),
    ("split", aten.split.Tensor, [of(4, 6), 3, 1], [FIRST]),
    ("slice", aten.slice.Tensor, [of(4, 6), 1, 2, 4], [FIRST]),
    ("slice_backward", aten.slice_backward.default, [of(4, 2), [4, 6], 1, 2, 4, 1], [FIRST]),
    ("select_backward", aten.select_backward.default, [of(4, 2), [3, 4, 2], 0, 1], [FIRST]),
    ("cat", aten.cat.default, [[of(4, 2), of(4, 3)], 1], [FIRST, FIRST]),
    ("stack", aten.stack.default, [[of(4, 2), of(4, 2)]], [FIRST, FIRST]),
    ("mm", aten.mm.default, [of(4, 3), of(3, 5)], [FIRST, None]),
    ("mm, columns", aten.mm.default, [of(5, 3), of(3, 4)], [None, SECOND]),
    ("mm, pairs", aten.mm.default, [of(8, 3), of(3, 5)], [PAIRS, None]),
    ("addmm", aten.addmm.default, [of(5), of(4, 3), of(3, 5)], [None, FIRST, None]),
    ("bmm", aten.bmm.default, [of(8, 3, 2), of(8, 2, 3)], [PAIRS, PAIRS]),
    ("bmm, queries", aten.bmm.default, [of(2, 4, 3), of(2, 3, 5)], [SECOND, None]),
    ("sum of columns", aten.sum.dim_IntList, [of(4, 3), [1]], [FIRST]),
    ("sum before", aten.sum.dim_IntList, [of(3, 4), [0]], [SECOND]),
    ("mean", aten.mean.dim, [of(4, 3), [-1], True], [FIRST]),
    ("softmax", aten._softmax.default, [of(4, 3), -1, False], [FIRST]),
    ("softmax backward", aten._softmax_backward_data.default, [of(4, 3), of(4, 3), 1, torch.float32], [FIRST, FIRST]),
    ("layer norm", aten.native_layer_norm.default, [of(2, 2, 3), [3], of(3), of(3), 1e-5], [SPREAD, None, None]),
    ("embedding", aten.embedding.default, [of(7, 3), torch.tensor([1, 5, 0, 1])], [None, FIRST]),
]
SUMMED: list[tuple[str, Any, list[Any], list[Rows | None]]] = [
    ("mm", aten.mm.default, [of(3, 4), of(4, 5)], [SECOND, FIRST]),
    ("mm, pairs", aten.mm.default, [of(3, 8), of(8, 5)], [Rows(1, 1, 2), PAIRS]),
    ("bmm", aten.bmm.default, [of(2, 3, 4), of(2, 4, 5)], [Rows(2, 1, 1), SECOND]),
    ("sum", aten.sum.dim_IntList, [of(2, 2, 3), [0, 1], True], [SPREAD]),
    ("table", aten.embedding_dense_backward.default, [of(4, 3), torch.arange(4), 7, -1, False], [FIRST, FIRST]),
]  # fmt: skip
WHOLE: list[tuple[str, Any, list[Any], list[Rows | None]]] = [
    ("softmax over the rows", aten._softmax.default, [of(4, 3), 0, False], [FIRST]),
    ("cumulative sum", aten.cumsum.default, [of(4, 3), 0], [FIRST]),
    ("a table for each row", aten.add.Tensor, [of(4, 3), of(4, 3)], [FIRST, None]),
    ("rows in unlike places", aten.add.Tensor, [of(4, 4), of(4, 4)], [FIRST, SECOND]),
    ("mean over the rows", aten.mean.dim, [of(4, 3), [0]], [FIRST]),
    ("torn apart", aten.permute.default, [of(2, 2, 5), [1, 0, 2]], [SPREAD]),
    ("contracted on one side", aten.mm.default, [of(3, 4), of(4, 5)], [SECOND, None]),
    ("drawn", aten.native_dropout.default, [of(4, 3), 0.5, True], [FIRST]),
    ("cat of rows", aten.cat.default, [[of(4, 2), of(4, 2)]], [FIRST, FIRST]),
    ("a bias of rows", aten.addmm.default, [of(4, 5), of(4, 3), of(3, 5)], [FIRST, FIRST, None]),
]


def called(target: Any, args: list[Any], rows: list[Rows | None]) -> tuple[fx.Node, Given]:
    graph = fx.Graph()
    count = itertools.count()

    def placed(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return set_value(graph.placeholder(f"x{next(count)}"), arg)
        if isinstance(arg, list) and any(isinstance(item, Tensor) for item in arg):
            return [placed(item) for item in arg]
        return arg

    node = insert_call(graph, target, tuple(placed(arg) for arg in args), HERE)
    return node, dict(zip(node.all_input_nodes, rows, strict=True))


def cut(whole: Tensor, rows: Rows | None, start: int, end: int) -> Tensor:
    if rows is None:
        return whole
    merged = whole.reshape(tile_shape(whole.shape, rows, NUM_ROWS))
    return merged.narrow(rows.first, start * rows.each, (end - start) * rows.each)


def on_rows(node: fx.Node, given: Given, found: Any, start: int, end: int) -> Any:
    """What ``node`` gives for some rows."""
    args = list(fx.map_arg(node.args, lambda source: cut(value(source), given[source], start, end)))
    if facts_of(node.target).takes_shape:
        args[1] = tile_shape(value(node).shape, found, end - start)
    assert callable(node.target)
    return node.target(*args)


def outputs_of(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


@pytest.mark.parametrize(("target", "args", "rows"), [case[1:] for case in SPLIT], ids=[case[0] for case in SPLIT])
def test_an_operator_on_some_rows_gives_those_rows(target: Any, args: list[Any], rows: list[Rows | None]) -> None:
    node, given = called(target, args, rows)
    found = rows_of_result(node, given)
    assert found is not None
    kinds = found if isinstance(found, tuple) else (found,)
    for start, end in ((0, 1), (1, 4)):
        for one, whole, kind in zip(
            outputs_of(on_rows(node, given, found, start, end)), outputs_of(value(node)), kinds, strict=True
        ):
            assert isinstance(kind, Rows)
            torch.testing.assert_close(one, cut(whole, kind, start, end))


@pytest.mark.parametrize(("target", "args", "rows"), [case[1:] for case in SUMMED], ids=[case[0] for case in SUMMED])
def test_what_sums_over_rows_is_the_sum_of_its_tiles(target: Any, args: list[Any], rows: list[Rows | None]) -> None:
    node, given = called(target, args, rows)
    assert rows_of_result(node, given) is SUM
    parts = [on_rows(node, given, SUM, start, end) for start, end in ((0, 1), (1, 4))]
    torch.testing.assert_close(parts[0] + parts[1], value(node))


@pytest.mark.parametrize(("target", "args", "rows"), [case[1:] for case in WHOLE], ids=[case[0] for case in WHOLE])
def test_what_needs_all_rows_at_once_is_known(target: Any, args: list[Any], rows: list[Rows | None]) -> None:
    node, given = called(target, args, rows)
    assert rows_of_result(node, given) is None


def test_a_norms_gradients_are_split_and_summed() -> None:
    x, weight = of(4, 3), of(3)
    _, mean, rstd = aten.native_layer_norm.default(x, [3], weight, weight, 1e-5)
    args = [of(4, 3), x, [3], mean, rstd, weight, weight, [True, True, True]]
    node, given = called(aten.native_layer_norm_backward.default, args, [*[FIRST] * 4, None, None])
    assert rows_of_result(node, given) == (FIRST, SUM, SUM)


@pytest.mark.parametrize(
    ("shape", "rows"), [((4, 3), FIRST), ((2, 2, 3), SPREAD), ((8, 3), PAIRS), ((3, 4), Rows(0, 2, 3)), ((3,), None)]
)
def test_rows_are_looked_for_in_the_first_dimensions(shape: tuple[int, ...], rows: Rows | None) -> None:
    assert group_rows(shape, 0, NUM_ROWS) == rows
