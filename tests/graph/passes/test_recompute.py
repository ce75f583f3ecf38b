from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import Block, number_values
from zerofx.capture.trace import Batch, capture
from zerofx.errors import PlanError
from zerofx.ir.facts import Phase, copied_from, origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import recompute
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.saved_values import saved_values


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.sigmoid(layer(x)), 0.5)
        return x.sum()


class Squashing(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(torch.tanh(layer(x)))
        return x.sum()


def captured(model: nn.Module) -> StepGraph:
    step = capture(model, Batch.from_call((torch.zeros(2, 4),), {}))
    simplify(step)
    return step


def test_dropped_values_are_computed_again_before_their_first_reader(golden: object) -> None:
    step = captured(Squashing())
    dropped = frozenset(node.name for node in saved_values(step) if "tanh" in node.name)
    recompute(step, dropped, frozenset())
    assert callable(golden)
    golden(number_values(step.text()))


def test_nothing_dropped_leaves_the_graph_as_it_is() -> None:
    step = captured(Squashing())
    before = step.text()
    recompute(step, frozenset(), frozenset())
    assert step.text() == before


def test_a_dropped_value_is_read_by_no_backward_node() -> None:
    step = captured(Squashing())
    dropped = {node.name for node in saved_values(step)}
    recompute(step, frozenset(dropped), frozenset())
    for node in step.calls():
        if origin(node).phase is Phase.BACKWARD:
            assert not dropped & {source.name for source in node.all_input_nodes}
    assert any(copied_from(node) in dropped for node in step.calls())


def test_each_value_is_computed_again_once() -> None:
    step = captured(Squashing())
    recompute(step, frozenset(node.name for node in saved_values(step)), frozenset())
    again = [name for node in step.calls() if (name := copied_from(node))]
    assert len(again) == len(set(again))


def test_a_random_operator_is_never_computed_again() -> None:
    step = captured(Dropping())
    everything = frozenset(node.name for node in saved_values(step))
    with pytest.raises(PlanError, match="random operators"):
        recompute(step, everything, frozenset())


def test_a_clone_is_equal_and_apart() -> None:
    step = captured(Squashing())
    text, copy = step.text(), step.clone()
    assert copy.text() == text
    recompute(copy, frozenset(node.name for node in saved_values(copy)), frozenset())
    assert step.text() == text and copy.text() != text
    assert replace(step).text() == text
