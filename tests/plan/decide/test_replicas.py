"""Meshes with replicas, planned: what goes over which links, and who updates what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zerofx
from tests.lib.chains import Equal
from tests.lib.graphs import TwoBlocks
from zerofx import Machine, Plan, PlannedStep
from zerofx.errors import UsageError
from zerofx.ir import ops
from zerofx.ir.streams import axes_of
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.plan.mesh import Mesh

H100 = Machine.named("h100-sxm")
WIDTH = 256


def planned(machine: Machine = H100, rows: int = 64, **options: Any) -> PlannedStep:
    with torch.device("meta"):
        model, x = Equal(6, WIDTH), torch.empty(rows, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"backend": "eager", "recompute": "none", "mesh": {"replicate": 4, "shard": 8}, **options}
    return zerofx.plan(model, optimizer, (x,), machine=machine, **given)


@pytest.mark.parametrize("states_over", ["mesh", "shard"])
@pytest.mark.parametrize("stage", range(4))
def test_nodes_send_what_theory_says(stage: int, states_over: str) -> None:
    step = planned(stage=stage, states_over=states_over)
    full = sum(bucket.full_bytes for bucket in step.layout.buckets)
    gathered = sum(step.layout.buckets[gather.bucket].full_bytes for gather in step.plan.gathers) or full
    # In rings: the 8 ranks of a node are a shard group, and each has replicas on 4 nodes.
    within, across = 7 * (full + gathered), 8 * 2 * 3 * full // 8 // 4
    assert step.plan.node_wire_bytes == {"within": within, "across": across}
    # Each rank sends (n - 1) / n of what a hop is over: the slices' sums, and what is gathered of them.
    assert step.plan.wire_bytes == 7 * (full + gathered) // 8 + 2 * 3 * full // 8 // 4


def test_replicas_have_parts_of_the_states_or_whole_slices_of_them() -> None:
    parts, slices = (planned(stage=3, states_over=over) for over in ("mesh", "shard"))
    full = sum(bucket.full_bytes for bucket in parts.layout.buckets)
    # Parameters and gradients in slices; two states of Adam's.
    assert parts.plan.model_state_bytes == 2 * full // 8 + 2 * full // 32
    assert slices.plan.model_state_bytes == 2 * full // 8 + 2 * full // 8
    assert parts.plan.peak_bytes["device"] < slices.plan.peak_bytes["device"]


def test_parts_stay_unless_new_values_are_waited_for() -> None:
    free = planned(stage=3)
    assert free.plan.has_parts and "states in parts of slices" in free.plan.states_reason
    slow = replace(H100, inter_node=replace(H100.inter_node, bandwidth=1e8))
    # With much to compute gradients cross while it runs; updates, and what follows them, come after clipping.
    for rows, in_parts in ((64, True), (1 << 16, False)):
        parts, slices, chosen = (
            planned(slow, rows, stage=3, max_grad_norm=1.0, states_over=over).plan for over in ("mesh", "shard", "auto")
        )
        assert chosen.step_seconds == min(parts.step_seconds, slices.step_seconds)
        assert (chosen.has_parts, parts.has_parts, slices.has_parts) == (in_parts, True, False)
        assert chosen.states_reason in str(chosen) and Plan.from_json(chosen.to_json()) == chosen


def test_a_link_is_as_fast_as_where_its_ranks_are() -> None:
    mesh = Mesh(replicate=4, shard=8)
    seconds = {axes: seconds_along("all_gather", 1 << 30, mesh, axes, H100) for axes in (("shard",), ("replicate",))}
    assert seconds["shard",] < 0.2 * seconds["replicate",]
    on_node = Mesh(replicate=4, shard=2)
    assert seconds_along("all_gather", 1 << 30, on_node, ("replicate",), H100) < 0.2 * seconds["replicate",]


def test_hops_have_queues_of_their_own() -> None:
    whole = planned(stage=3)
    step, names = whole.lowered, [row.stream for row in whole.schedule().rows]
    assert {"compute", "collective", "collective replicate"} == set(names)
    assert "collective replicate" in str(whole.schedule().to_json())
    crossing = [n for n in step.graph.calls() if n.target in ops.OVER_AXES and axes_of(n, step.plan.mesh) != ("shard",)]
    inside = [n for n in step.graph.calls() if n.target in ops.OVER_AXES and n not in crossing]
    for group in (crossing, inside):
        timings = [step.simulation.timings[node] for node in group]
        ends = [timing.start_seconds + timing.seconds for timing in timings]
        assert all(later.start_seconds >= end - 1e-12 for end, later in zip(ends, timings[1:], strict=False))


def test_a_mesh_is_the_world_that_is_planned_for() -> None:
    with pytest.raises(UsageError, match="expected a mesh of 16 rank"):
        planned(world_size=16)
    with torch.device("meta"):
        model, x = TwoBlocks(), torch.empty(4, 8)
    with pytest.raises(UsageError, match="expected no mesh for smallest_world"):
        zerofx.smallest_world(model, torch.optim.SGD(model.parameters()), (x,), mesh={"shard": 2})
