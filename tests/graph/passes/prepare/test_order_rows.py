"""Rows cross from one order into another where they have the fewest bytes, and the results are as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from tests.lib.models.cases import CASES, batches
from tests.lib.models.huggingface import deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_moe
from tests.lib.virtual_ranks import feeds_of, run
from zerofx.capture.trace import Batch, capture
from zerofx.ir.facts import tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.sharding.exchanges import moves_of
from zerofx.passes.prepare.order_rows import order_rows
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.verify import verify

DIM, TOKENS = 8, 6


class Weighted(nn.Module):
    """Rows in the order of their keys, multiplied there, weighted in 32 bits, and brought back."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(DIM, DIM).bfloat16())
        self.weights = nn.Parameter(torch.randn(TOKENS))
        self.weigh, self.back = weigh, back

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        order = keys.sort().indices
        rows = self.weigh(x[order] @ self.matrix, self.weights[order].unsqueeze(-1))
        return rows[self.back(order)].square().sum()


def _back(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def _captured(model: nn.Module, batch: Batch) -> StepGraph:
    step = capture(model, batch)
    simplify(step)
    return step


def _moved(step: StepGraph) -> list[tuple[torch.dtype, int]]:
    """Dtypes of rows that calls move, and the elements of each row."""
    moves = ((node, moves_of(node)) for node in step.calls())
    return [(tensor(node).dtype, tensor(node)[0].numel()) for node, each in moves if each is not None]


def _results(step: StepGraph, graph: fx.Graph, model: nn.Module, batch: Batch) -> list[Tensor]:
    (results,) = run(graph, [feeds_of(step, model, batch)], {})
    return [result for result in results if isinstance(result, Tensor)]


def _check_results(model: nn.Module, batch: Batch) -> tuple[StepGraph, list[tuple[torch.dtype, int]]]:
    """The step with rows in order, whose results are as before, and what was moved before."""
    step = _captured(model, batch)
    before, moved = step.clone(), _moved(step)
    order_rows(step)
    step.graph.lint()
    verify(step, "order_rows")
    expected = _results(before, before.graph, model, batch)
    for result, known in zip(_results(step, step.graph, model, batch), expected, strict=True):
        assert torch.equal(result, known)
    return step, moved


def _weighted(weigh: Callable[[Tensor, Tensor], Tensor], back: Callable[[Tensor], Tensor] = _back) -> nn.Module:
    torch.manual_seed(0)
    return Weighted(weigh, back)


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, DIM, generator=generator).bfloat16()
    return Batch.from_call((x, torch.tensor([3, 1, 2, 1, 0, 3])), {})


@pytest.mark.parametrize(
    "weigh",
    [lambda rows, weights: rows * weights, lambda rows, weights: rows.float() * weights.float()],
    ids=["promoted", "cast"],
)
def test_rows_cross_before_they_are_weighted_in_32_bits_and_gradients_after_it(
    weigh: Callable[[Tensor, Tensor], Tensor],
) -> None:
    step, before = _check_results(_weighted(weigh), _batch())
    assert before.count((torch.float32, DIM)) == 2
    # x, what is made of it, and both gradients, but that of x; weights stay where they are.
    assert _moved(step) == [(torch.bfloat16, DIM)] * 3


def test_rows_that_are_as_wide_as_what_is_made_of_them_stay_in_their_order() -> None:
    step = _captured(_weighted(lambda rows, weights: rows * weights.bfloat16()), _batch())
    before = step.text()
    order_rows(step)
    assert step.text() == before


def test_gradients_of_rows_that_may_be_taken_twice_are_not_divided() -> None:
    """Sums of rows are rounded, and then weighted: not the other way round."""
    step, _ = _check_results(_weighted(lambda rows, weights: rows * weights, lambda order: order // 2), _batch())
    assert _moved(step).count((torch.float32, DIM)) == 1


def test_what_others_read_too_is_made_once() -> None:
    class Twice(Weighted):
        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            order = keys.sort().indices
            rows = self.weigh(x[order] @ self.matrix, self.weights[order].unsqueeze(-1))
            return rows[self.back(order)].square().sum() + rows.amax()

    step, before = _check_results(Twice(lambda rows, weights: rows * weights, _back), _batch())
    assert _moved(step).count((torch.float32, DIM)) == before.count((torch.float32, DIM))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("model", [mixtral, qwen3_moe, olmoe, deepseek_v3, gpt_oss])
def test_rows_of_experts_cross_in_16_bits(model: Callable[..., nn.Module]) -> None:
    case = replace(CASES["mixtral"], model=lambda: model().bfloat16())
    torch.manual_seed(0)
    step, _ = _check_results(case.model(), Batch.from_call(*next(batches(case, 0, 1))))
    assert {dtype for dtype, elements in _moved(step) if elements > 1} == {torch.bfloat16}
