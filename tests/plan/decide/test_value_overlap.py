"""What overlaps with collectives on values: gradients of weights, in the layer that they are of."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import fx

from tests.lib.models.huggingface import llama
from tests.plan.decide.test_shardings import captured
from zerofx import Machine
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Placeholder, Role, origin, set_placeholder, set_value
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.overlap import overlap
from zerofx.passes.prepare.partition import partition
from zerofx.scheduler.analysis.sharding_ways import sharding_ways
from zerofx.scheduler.cost.machine import Link
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.cost.simulate import simulate
from zerofx.scheduler.decide.shardings import decide_shardings
from zerofx.scheduler.decide.value_overlap import decide_overlaps
from zerofx.scheduler.plan.mesh import Mesh

MESH = Mesh(model=2)
# Launches do not count, and a byte takes a tenth of what an operator does with it: what can be hidden is.
MACHINE = replace(
    Machine.named("h100-sxm"),
    device=replace(Machine.named("h100-sxm").device, launch_latency=1e-9),
    intra_node=Link(bandwidth=3e10, latency=1e-9),
)


@functools.cache
def _shared() -> StepGraph:
    tokens = torch.randint(32, (2, 16))
    step = captured(llama(num_hidden_layers=4), input_ids=tokens, labels=tokens)
    partition(step, decide_shardings(sharding_ways(step, 2), MESH, MACHINE, Prices()), 2)
    return step


def shared() -> StepGraph:
    """A Llama as two ranks share it, in the order in which it was captured."""
    return _shared().clone()


@pytest.mark.days(3)
def test_computation_waits_less_for_collectives_on_values() -> None:
    step = shared()
    before = simulate(step, MACHINE, MESH, on_cpu=False)
    overlap(step, decide_overlaps(step, MACHINE))
    after = simulate(step, MACHINE, MESH, on_cpu=False)
    assert after.exposed_seconds < 0.8 * before.exposed_seconds
    assert after.step_seconds < before.step_seconds


def test_nothing_is_held_beyond_its_layer() -> None:
    step = shared()
    before = [(step.unit_of(node), origin(node).phase) for node in step.calls()]
    overlaps = decide_overlaps(step, MACHINE)
    overlap(step, overlaps)
    assert overlaps
    assert [(step.unit_of(node), origin(node).phase) for node in step.calls()] == before


def test_layers_that_are_alike_are_put_in_one_order() -> None:
    step = shared()
    overlap(step, decide_overlaps(step, MACHINE))
    by_layer: dict[str, list[str]] = {}
    for node in step.calls():
        if step.unit_of(node) and origin(node).phase == "backward":
            by_layer.setdefault(step.unit_of(node), []).append(str(node.target))
    counts = Counter(map(tuple, by_layer.values()))
    assert len(by_layer) == 4
    assert max(counts.values()) >= 2  # the first and the last have neighbours of their own


def test_without_collectives_nothing_moves() -> None:
    tokens = torch.randint(32, (2, 16))
    step = captured(llama(), input_ids=tokens, labels=tokens)
    partition(step, (), 2)
    assert not decide_overlaps(step, MACHINE)


@st.composite
def backwards(draw: st.DrawFn) -> StepGraph:
    """A layer's backward of sums and collectives on them, each of whatever came before it."""
    graph = fx.Graph()
    given = set_placeholder(
        set_value(graph.placeholder("x"), torch.empty(64, device="meta")), Placeholder(Role.INPUT, "x")
    )
    where, values = Origin("layer", Phase.BACKWARD), [given]
    for is_sent in draw(st.lists(st.booleans(), min_size=2, max_size=24)):
        read = draw(st.sampled_from(values))
        if is_sent:
            sent = insert_call(graph, ops.all_reduce_values, (read, "sum", 2), where, {"over": "model"})
            values.append(insert_call(graph, ops.wait, (sent,), where))
        else:
            other = draw(st.sampled_from(values))
            values.append(insert_call(graph, torch.ops.aten.add.Tensor, (read, other), where))
    graph.output((values[-1],))
    return StepGraph(graph, torch.device("cpu"), (), frozenset({"layer"}))


@hypothesis.given(backwards())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_everything_stands_after_what_it_reads(step: StepGraph) -> None:
    names = sorted(node.name for node in step.graph.nodes)
    overlap(step, decide_overlaps(step, MACHINE))
    step.graph.lint()
    assert sorted(node.name for node in step.graph.nodes) == names
