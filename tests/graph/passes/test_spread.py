"""Values kept as one part on each rank: gathered again, they are what they were, and only those that all ranks have."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from tests.graph.passes.prepare.test_partition import captured
from tests.lib.virtual_ranks import feeds_of, run
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.facts import Phase, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.spread import can_be_spread, spread
from zerofx.passes.prepare.partition import partition
from zerofx.scheduler.analysis.saved_values import saved_values
from zerofx.scheduler.plan.decisions import Absence, ShardingDecision


def _decisions(step: StepGraph, num_ranks: int) -> list[Absence]:
    """About all that can be kept so."""
    values = [node for node in saved_values(step) if can_be_spread(node, num_ranks)]
    return [
        Absence(kind="spreads", value=node.name, num_bytes=storage_bytes(tensor(node)), reason="a test")
        for node in values
    ]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
def test_what_is_gathered_is_what_was_kept(name: str, num_ranks: int) -> None:
    model, batch, step = captured(name)
    feeds = [
        {**feeds_of(step, model, batch), "model_rank": torch.tensor([rank]), "model_rank_on_host": torch.tensor(rank)}
        for rank in range(num_ranks)
    ]
    partition(step, (), num_ranks)  # all that is computed every rank has
    step = step.clone()
    expected = run(step.graph, feeds)
    decisions = _decisions(step, num_ranks)
    before = sum(decision.num_bytes for decision in decisions)
    spread(step, decisions, num_ranks)
    step.graph.lint()
    gathers = [node for node in step.calls() if node.target is ops.gather_values]
    assert len(gathers) == len(decisions) > 5
    assert {origin(node).phase for node in gathers} == {Phase.BACKWARD}
    # Between forward and backward there is a part of each.
    parts = [gather.all_input_nodes[0] for gather in gathers]
    assert sum(storage_bytes(tensor(part)) for part in parts) * num_ranks == before
    assert {decision.value for decision in decisions}.isdisjoint(node.name for node in saved_values(step))
    for whole, given in zip(expected, run(step.graph, feeds), strict=True):
        for one, other in zip(whole, given, strict=True):
            assert torch.equal(one, other)


def test_what_ranks_have_parts_of_is_not_spread() -> None:
    _, _, step = captured("gpt")
    (value, *_) = [node.name for node in step.calls() if node.target is torch.ops.aten.gelu.default]
    whole = step.clone()
    partition(whole, (), 2)
    assert can_be_spread(whole.nodes_by_name()[value], 2)
    partition(step, (ShardingDecision(value, ("S0",), ("S0",)),), 2)
    assert not can_be_spread(step.nodes_by_name()[value], 2)
    away = Absence(kind="spreads", value=value, num_bytes=8, reason="a test")
    for shared, num_ranks in ((step, 2), (whole, 1)):
        with pytest.raises(PlanError, match=f"expected to keep one part of {value} on each of {num_ranks} ranks"):
            spread(shared, [away], num_ranks)


def test_results_and_values_without_equal_parts_are_not_spread() -> None:
    _, _, step = captured("gpt")
    partition(step, (), 2)

    def can_be(node: fx.Node) -> bool:
        return can_be_spread(node, 5)

    assert not any(map(can_be, saved_values(step)))
    assert not can_be_spread(step.loss, 2)
