"""What only autograd needed is gone, and the arithmetic is as it was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.lib.graphs import DIM, ROWS, TwoBlocks, calls, difference, features
from zerofx.capture.trace import Batch, capture
from zerofx.ir.graph import StepGraph
from zerofx.passes.base import op_counts
from zerofx.passes.prepare.simplify import simplify

aten = torch.ops.aten


def _captured(model: nn.Module, *batch: Tensor) -> StepGraph:
    return capture(model, Batch.from_call(batch, {}))


def test_detours_of_the_tiny_model_are_removed(golden: Callable[..., None]) -> None:
    step = _captured(TwoBlocks(), *features())
    before = step.text()
    simplify(step)
    golden(difference(before, step.text()))


def test_only_views_and_identities_are_removed() -> None:
    step = _captured(TwoBlocks(), *features())
    before = op_counts(step)
    simplify(step)
    removed = before - op_counts(step)
    assert removed
    assert set(removed) <= {"aten.t.default", "aten.detach.default", "aten.alias.default", "aten.view.default"}


def test_a_second_run_changes_nothing() -> None:
    step = _captured(TwoBlocks(), *features())
    simplify(step)
    once = step.text()
    simplify(step)
    assert step.text() == once


class _Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS * DIM))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1).view(1, -1).view(ROWS * DIM) * self.weight).sum()


def test_a_chain_of_reshapes_becomes_one() -> None:
    step = _captured(_Reshaping(), *features())
    simplify(step)
    (view,) = calls(step, aten.view.default)
    assert view.all_input_nodes[0].op == "placeholder"
    assert view.args[1] == [ROWS * DIM]


class _Copying(nn.Module):
    """Copies what is new, what it reads again, what is there already, and what is in another dtype or order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, DIM))

    def forward(self, x: Tensor) -> Tensor:
        new, again, there, wide, turned = (x * number for number in range(5))
        new.copy_(x * self.weight)
        read = self.weight.exp()
        again.copy_(read)
        there.copy_(self.weight)
        wide.copy_(self.weight.double() * 2)
        turned.copy_(self.weight.t().contiguous().t())
        return (new + again + read + there + wide + turned).sum()


def _copied(step: StepGraph) -> Counter[object]:
    return Counter(node.all_input_nodes[1].target for node in calls(step, aten.copy.default))


def test_a_copy_of_what_is_made_for_it_alone_is_that() -> None:
    step = _captured(_Copying(), *features())
    before = _copied(step)
    simplify(step)
    after = _copied(step)
    assert (before.total(), before - after) == (5, {aten.mul.Tensor: 1})
