"""Gathers are issued ahead of their use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lib.graphs import Normed, Prepared, Tied, TwoBlocks, calls, prepare, token_ids
from zerofx.ir import ops
from zerofx.passes.base import op_counts
from zerofx.passes.prefetch import Prefetch


def _before_prefetch(prepared: Prepared) -> list[str]:
    prepared.run("buffers")
    return [node.name for node in prepared.step.graph.nodes]


def test_gathers_move_ahead(golden: Callable[..., None]) -> None:
    golden(prepare().changes("prefetch"))


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_prefetch_moves_only_gathers(depth: int) -> None:
    prepared = prepare(prefetch=depth)
    before, counts = _before_prefetch(prepared), op_counts(prepared.step)
    Prefetch().run(prepared.step, prepared.plan)
    after = [node.name for node in prepared.step.graph.nodes]
    gathers = {node.name for node in calls(prepared.step, ops.all_gather)}
    assert before != after
    assert [name for name in before if name not in gathers] == [name for name in after if name not in gathers]
    assert op_counts(prepared.step) == counts


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_a_gather_is_never_later_than_before_and_in_the_plans_order(depth: int) -> None:
    prepared = prepare(Tied(), token_ids(), prefetch=depth)
    before = {name: position for position, name in enumerate(_before_prefetch(prepared))}
    Prefetch().run(prepared.step, prepared.plan)
    after = {node.name: position for position, node in enumerate(prepared.step.graph.nodes)}
    names = [f"gather_{number}" for number in range(len(prepared.plan.gathers))]
    assert all(after[name] <= before[name] for name in names)
    assert [node.name for node in calls(prepared.step, ops.all_gather)] == names


def test_depth_0_changes_nothing() -> None:
    assert prepare(prefetch=0).changes("prefetch") == ""


@pytest.mark.parametrize("depth", [1, 2])
def test_at_most_depth_gathers_are_ahead_of_their_wait(depth: int) -> None:
    prepared = prepare(Normed(), prefetch=depth).run()
    waiting = most = 0
    for node in prepared.step.calls():
        waiting += node.target is ops.all_gather
        most = max(most, waiting)
        waiting -= node.target is ops.wait and node.all_input_nodes[0].target is ops.all_gather
    assert most <= depth + 1


def test_below_stage_3_there_is_nothing_to_move() -> None:
    assert prepare(TwoBlocks(), stage=2).changes("prefetch") == ""
