"""What Inductor gets wrong is written otherwise, and only as long as it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.fakes import fake_like
from zerofx.codegen.inductor import decompositions
from zerofx.codegen.inductor.mends import MENDS
from zerofx.torch_private.operators import OpOverload
from zerofx.torch_private.versions import TORCH

aten: Any = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor uses what torch itself deprecates

_OF_LOWERINGS = {aten.full.default, aten.avg_pool2d_backward.default}  # which no pattern gets wrong
_NO_VALUES = frozenset({"layout", "device", "pin_memory", "memory_format", "implicit"})


def test_arguments_that_inductors_patterns_do_not_name_are_written_otherwise() -> None:
    assert {operator for operator, _ in _passed_by()} == MENDS.keys() - _OF_LOWERINGS


def _passed_by() -> Iterator[tuple[OpOverload, str]]:
    """Operators in patterns that Inductor goes through, each with an argument that a pattern of it does not name."""
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.pattern_matcher import _TargetArgsExpr

    post_grad.lazy_init()
    joint_graph.lazy_init()  # which torch.compile does, and adds to those of regions
    entries = (entry for passed in post_grad.pass_patterns for of in passed.patterns.values() for entry in of)
    for entry in entries:
        calls = [part for part in _parts(entry.pattern) if isinstance(part, _TargetArgsExpr)]
        operators = [(call, overload) for call in calls for overload in _overloads(call.fns)]
        # Layers in oneDNN's layout come of frozen weights: in a training there are none.
        if any(overload.namespace not in ("aten", "prims") for _, overload in operators):
            continue
        for call, overload in operators:
            for argument in overload._schema.arguments:
                is_named = argument.name in call.kwargs or argument.name in _NO_VALUES
                if argument.kwarg_only and not argument.is_out and not is_named and not overload._schema.is_mutable:
                    yield overload, argument.name


def _parts(pattern: Any) -> Iterator[Any]:
    yield pattern
    children = [child for value in vars(pattern).values() for child in _flat(value) if hasattr(child, "_match")]
    for child in children:
        yield from _parts(child)


def _flat(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [each for one in values for each in (one if isinstance(one, list | tuple) else [one])]


def _overloads(targets: Any) -> list[OpOverload]:
    packets = (torch._ops.OpOverloadPacket,)
    return [
        overload
        for target in targets
        for overload in (
            [getattr(target, name) for name in target.overloads()] if isinstance(target, packets) else [target]
        )
        if isinstance(overload, OpOverload)
    ]


def _scaled_product(given: list[Any]) -> tuple[Tensor, ...]:
    x, a, b = given
    return (
        aten.add.Tensor(x, aten.mm.default(a, b), alpha=0.5),
        aten.add.Tensor(aten.mm.default(b, a), x, alpha=0.5),
        aten.sub.Tensor(x, aten.mm.default(a, a), alpha=0.5),
    )


def _filled_sums(given: list[Any]) -> tuple[Tensor, ...]:
    (x,) = given
    options = {"device": torch.device("cpu"), "pin_memory": False}
    whole = aten.full.default([4, 6], 2.7, dtype=torch.int64, **options)
    ones = aten.full.default([4, 6], 1.5, dtype=torch.float32, **options)
    return aten.mul.Tensor(x, aten.cumsum.default(whole, 1)), aten.cumsum.default(ones, 1, dtype=torch.float64)


def _shuffled_rows(given: list[Any]) -> tuple[Tensor, ...]:
    x, y = given
    order = aten.randperm.default(8, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
    first = aten.slice.Tensor(order, 0, 0, 4)
    return aten.index_add.default(x, 0, first, y), first


@pytest.mark.parametrize(
    ("function", "shapes", "is_needed"),
    [
        (_scaled_product, [(4, 4)] * 3, True),
        (_filled_sums, [(4, 6)], TORCH < (2, 15)),
        (_shuffled_rows, [(8, 3), (4, 3)], True),
    ],
    ids=["add", "cumsum", "randperm"],
)
def test_mends_are_needed_and_right(
    function: Callable[[list[Any]], tuple[Tensor, ...]], shapes: list[tuple[int, ...]], is_needed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from torch._inductor.fx_passes import joint_graph

    from tests.nets.inductor import rewritten_by_inductor
    from zerofx.codegen.inductor.compile import trace_and_rewrite

    joint_graph.lazy_init()
    given = [torch.rand(shape) + 0.5 for shape in shapes]
    fakes = [fake_like(x.shape, x.stride(), x.dtype, "cpu") for x in given]
    torch.manual_seed(0)
    expected = function(list(given))

    def is_right() -> bool:
        graph = rewritten_by_inductor(trace_and_rewrite(function, fakes, frozenset()))
        torch.manual_seed(0)
        found = graph(*given)
        return all(x.dtype == y.dtype and torch.allclose(x, y) for x, y in zip(found, expected, strict=True))

    assert is_right()
    monkeypatch.setattr(decompositions, "MENDS", {})
    assert is_right() != is_needed


@pytest.mark.parametrize("size", [(5, 6), (7, 9)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [([2, 2], [2, 2], [0, 0]), ([3], [2], [1]), ([3, 2], [], [1, 0])]
)
@pytest.mark.parametrize("counts_padding", [True, False])
def test_pools_whose_windows_overhang_have_the_gradient_of_aten(
    size: tuple[int, int], kernel: list[int], stride: list[int], padding: list[int], counts_padding: bool
) -> None:
    x = torch.randn(2, 3, *size)
    options = (kernel, stride, padding, True, counts_padding)
    grad = torch.randn_like(aten.avg_pool2d.default(x, *options))
    mended = MENDS[aten.avg_pool2d_backward.default](grad, x, *options)
    assert torch.equal(mended, aten.avg_pool2d_backward.default(grad, x, *options, None))


def test_the_gradient_of_a_pool_that_overhangs_is_mended_as_long_as_inductor_needs_it() -> None:
    x, options = torch.randn(2, 3, 5, 6), ([2, 2], [2, 2], [0, 0], True, True)
    grad = torch.randn_like(aten.avg_pool2d.default(x, *options))
    expected = aten.avg_pool2d_backward.default(grad, x, *options, None)
    mended = torch.compile(lambda g, y: MENDS[aten.avg_pool2d_backward.default](g, y, *options))(grad, x)
    torch.testing.assert_close(mended, expected)
    assert not torch.allclose(
        torch.compile(lambda g, y: aten.avg_pool2d_backward.default(g, y, *options, None))(grad, x), expected
    )
