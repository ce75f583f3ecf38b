"""Plans with an arena: what lies in it, and what a budget is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from tests.lib.runs.training import plan_of
from zerofx.codegen.arena import ALLOCATING, plan_arena
from zerofx.errors import MemoryBudgetError
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.scheduler.cost.categories import peak_memory
from zerofx.scheduler.plan.plan import Plan


def _last_line(graph: fx.Graph, buffer: fx.Node) -> int:
    """The line of the last call that reads a buffer's memory under any name, or awaits one that does."""
    lines = {node: number for number, node in enumerate(graph.nodes)}
    reading = [node for node in graph.nodes if any(storage_source(n)[0] is buffer for n in node.all_input_nodes)]
    awaiting = [
        user for node in (buffer, *reading) if node.target in (*ops.TRANSFERS, *ops.COLLECTIVES)
        for user in node.users if user.target is ops.wait
    ]  # fmt: skip
    return max(lines[node] for node in (buffer, *reading, *awaiting))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("options", "fewest"),
    [
        ({"stage": 3, "world_size": 2}, 10),
        ({"stage": 2, "world_size": 2, "accumulate": 2}, 10),
        ({"stage": 0, "world_size": 2, "max_grad_norm": 1.0}, 5),
        ({"stage": 3, "world_size": 2, "offload": "host", "memory_budget": 0.6}, 10),
    ],
    ids=["gathered", "micro-batches", "clipped", "offloaded"],
)
def test_buffers_lie_apart_as_long_as_anything_reads_them(options: dict[str, Any], fewest: int) -> None:
    asked = {"backend": "eager", "machine": "cpu", **options}
    if "memory_budget" in asked:
        free = plan_of("gpt", **{**asked, "memory_budget": None, "offload": "auto"})
        asked["memory_budget"] = int(asked["memory_budget"] * free.plan.peak_bytes["device"])
    lowered = plan_of("gpt", **asked).lowered
    arena = plan_arena(lowered.graph, lowered.instructions, lowered.simulation.live, {})
    lines = {node: number for number, node in enumerate(lowered.graph.graph.nodes)}
    buffers = [n for n in lowered.graph.calls() if n.target in ALLOCATING and (n, 0) in lowered.simulation.live.sizes]
    assert len(buffers) == len(arena.takes)
    placed = [
        (lines[node], _last_line(lowered.graph.graph, node), *take)
        for node, take in zip(buffers, arena.takes, strict=True)
        if take is not None
    ]
    assert len(placed) >= fewest
    apart = 0
    for number, (begin, end, low, size) in enumerate(placed):
        for other_begin, other_end, lower, other_size in placed[:number]:
            if begin <= other_end and other_begin <= end:
                apart += 1
                assert low + size <= lower or lower + other_size <= low
    assert apart  # some are live together
    assert max(low + size for _, _, low, size in placed) <= arena.use.pool_bytes


def test_background_work_into_the_next_step_lies_outside() -> None:
    lowered = plan_of("gpt", stage=3, world_size=2).lowered
    live = lowered.simulation.live
    buffers = [n for n in lowered.graph.calls() if n.target in ALLOCATING and (n, 0) in live.sizes]
    before = plan_arena(lowered.graph, lowered.instructions, live, {})
    number = next(i for i, take in enumerate(before.takes) if take is not None)
    left = (buffers[number], 0)
    after = plan_arena(lowered.graph, lowered.instructions, replace(live, running_on=(left,)), {})
    assert after.takes[number] is None
    assert [take is None for take in after.takes].count(True) == [take is None for take in before.takes].count(True) + 1


def test_the_peak_is_the_pool_and_what_is_outside() -> None:
    planned = plan_of("gpt", stage=3, world_size=2, backend="inductor", machine="h100-sxm", arena=True)
    plan, live = planned.plan, planned.lowered.simulation.live
    assert plan.arena is not None
    assert plan.peak_bytes["device"] == live.persistent_bytes + plan.arena.pool_bytes + plan.arena.outside_bytes
    assert plan.arena.pool_bytes >= plan.arena.least_bytes > 0
    assert plan.peak_bytes["device"] >= live.peak_live_bytes
    assert sum(peak_memory(planned.lowered.graph, live).values()) == plan.peak_bytes["device"]
    assert Plan.from_json(plan.to_json()).arena == plan.arena
    assert "are the arena" in str(plan)
    assert plan_of("gpt", stage=3, world_size=2, backend="inductor", machine="h100-sxm").plan.arena is None


@pytest.mark.days(3)
def test_a_budget_is_compared_with_the_pool() -> None:
    asked = {"stage": 3, "backend": "inductor", "machine": "h100-sxm"}
    free = plan_of("gpt", **asked)
    budget = int(0.85 * free.plan.peak_bytes["device"])
    plan = plan_of("gpt", **asked, memory_budget=budget, arena=True).plan
    assert plan.peak_bytes["device"] <= budget == plan.memory_budget
    with pytest.raises(MemoryBudgetError) as missed:
        plan_of("gpt", **asked, memory_budget=1)
    # What is live fits by a byte, and so its pool and what is outside do not.
    with pytest.raises(MemoryBudgetError, match="cannot be met with an arena"):
        plan_of("gpt", **asked, memory_budget=missed.value.args[1] + 1, arena=True)
