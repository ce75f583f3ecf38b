"""What stands elsewhere so that collectives overlap with it: the same values, in another order."""

from __future__ import annotations

import random

import pytest
import torch

from tests.graph.passes.prepare.test_partition import captured, drawn
from tests.lib.virtual_ranks import feeds_of, part_of, run
from zerofx.errors import PlanError
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.overlap import overlap
from zerofx.passes.prepare.partition import partition
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.value_overlap import decide_overlaps
from zerofx.scheduler.plan.placements import REPLICATED, placement_of


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_another_order_gives_the_same_bits(name: str) -> None:
    model, batch, step = captured(name)
    decisions, feeds = drawn(step, 2, random.Random(name)), feeds_of(step, model, batch)
    placements = {decision.node: placement_of(decision.outputs[0] or "R") for decision in decisions}
    partition(step, decisions, 2)
    of_ranks = [
        {n: part_of(t, placements.get(n, REPLICATED), rank, 2).contiguous() for n, t in feeds.items()}
        | {"model_rank": torch.tensor([rank])}
        for rank in range(2)
    ]
    expected = run(step.graph, of_ranks)
    before = [node.name for node in step.calls()]
    overlap(step, decide_overlaps(step, Machine.named("h100-sxm")))
    step.graph.lint()
    assert [node.name for node in step.calls()] != before
    for results, wanted in zip(run(step.graph, of_ranks), expected, strict=True):
        assert all(torch.equal(result, value) for result, value in zip(results, wanted, strict=True))


def partitioned() -> StepGraph:
    _, _, step = captured("gpt")
    partition(step, drawn(step, 2, random.Random(0)), 2)
    return step


def test_nodes_stand_in_front_of_the_one_that_is_named() -> None:
    step = partitioned()
    first, second, third = list(step.calls())[-3:]
    free = [node for node in (first, second) if third not in node.users]
    overlap(step, ((*(node.name for node in free), step.output.name),) if free else ())
    assert list(step.calls())[-len(free) :] == free
    assert step.overlaps


def test_a_node_before_what_it_reads_is_refused() -> None:
    step = partitioned()
    reader = next(node for node in step.calls() if any(read.op == "call_function" for read in node.all_input_nodes))
    first = next(iter(step.calls()))
    with pytest.raises(PlanError, match=f"the plan has {reader.name} run before"):
        overlap(step, ((reader.name, first.name),))


def test_a_decision_about_a_node_that_there_is_not_is_refused() -> None:
    with pytest.raises(PlanError, match="names node nowhere, which this graph has not"):
        overlap(partitioned(), (("nowhere",),))
