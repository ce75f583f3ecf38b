"""How parameters in a slower tier come to their residencies and to their update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.lib.graphs import Prepared, TwoBlocks, adagrad, calls, prepare
from tests.lib.runs.offloads import parameters_away
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Role, origin, tier_of
from zerofx.ir.streams import slice_gathered
from zerofx.passes.verify import verify
from zerofx.scheduler.cost.categories import Category, category_of
from zerofx.scheduler.cost.liveness import liveness

aten = torch.ops.aten
STATES = [None, ("host", "device"), ("host", "host"), ("nvme", "device"), ("nvme", "host")]


def away(
    tier: str,
    states: tuple[str, str] | None = None,
    num_ranks: int = 2,
    precision: str | None = None,
    model: nn.Module | None = None,
) -> Prepared:
    model = TwoBlocks() if model is None else model
    prepared = prepare(model, optimizer=adagrad(model), num_ranks=num_ranks, precision=precision)
    prepared.plan = parameters_away(prepared, tier, states)
    return prepared


def read_ahead(prepared: Prepared) -> Prepared:
    """With the copies of the third residency in three steps: read before the first, copied up before the second."""
    first, second, third, *rest = prepared.plan.gathers
    third = replace(third, read=first.first, reload=second.first, issue=third.first)
    prepared.plan = replace(prepared.plan, gathers=(first, second, third, *rest))
    return prepared


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_slice_is_brought_up_for_each_residency(golden: Callable[..., None], num_ranks: int) -> None:
    golden(away("host", num_ranks=num_ranks).changes("gather"))


@pytest.mark.parametrize("states", [None, ("host", "host")])
def test_a_slice_is_brought_to_its_update(golden: Callable[..., None], states: tuple[str, str] | None) -> None:
    golden(away("nvme", states).changes("update"))


def test_new_values_are_cast_and_copied_down(golden: Callable[..., None]) -> None:
    golden(away("host", ("host", "device"), precision="bf16").changes("update"))


def test_a_slice_on_nvme_comes_in_three_steps(golden: Callable[..., None]) -> None:
    golden(read_ahead(away("nvme")).changes("prefetch"))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_the_passes_leave_is_accepted(tier: str, states: tuple[str, str] | None, num_ranks: int) -> None:
    prepared = away(tier, states, num_ranks)
    prepared.run_pipeline()
    shards = list(prepared.step.placeholders(Role.SHARD))
    assert shards and all(tier_of(node) == tier for node in shards)
    assert not list(prepared.step.placeholders(Role.FULL))
    assert not list(prepared.step.placeholders(Role.MASTER))  # the slice itself is updated, wherever that is
    assert len(calls(prepared.step, ops.all_gather)) == (len(prepared.plan.gathers) if num_ranks > 1 else 0)


def test_between_uses_the_device_holds_nothing_of_it() -> None:
    kept, gone = prepare(num_ranks=1).run(), away("host", ("host", "device"), num_ranks=1).run()
    live = liveness(gone.step, on_cpu=False)
    assert live.persistent_bytes < liveness(kept.step, on_cpu=False).persistent_bytes
    total = sum(bucket.full_bytes for bucket in gone.layout.buckets)
    assert live.slower["host"].persistent_bytes == 2 * total  # parameters, and one state each


def test_frozen_parameters_come_up_and_are_never_written() -> None:
    model = TwoBlocks()
    model.layers[0].requires_grad_(False)
    prepared = away("host", num_ranks=1, model=model)
    prepared.run_pipeline()
    (index,) = (bucket.index for bucket in prepared.layout.buckets if not bucket.trainable)
    shard = prepared.node(f"shard_{index}")
    assert {user.target for user in shard.users} == {ops.reload, ops.wait}


def test_what_comes_up_counts_as_gathered() -> None:
    step = away("nvme").run().step
    brought = [node for node in calls(step, ops.reload) if origin(node).phase != "update"]
    assert brought and all(slice_gathered(node) is not None for node in brought)
    assert {category_of(node) for node in (*brought, *calls(step, ops.all_gather))} == {Category.GATHERED}


@pytest.mark.parametrize("at_once", [False, True])
def test_awaited_at_once_nothing_is_under_way_beside_other_computation(at_once: bool) -> None:
    prepared = away("host", ("host", "device"), num_ranks=1)
    states = tuple(replace(decision, at_once=at_once) for decision in prepared.plan.states)
    prepared.plan = prepared.plan.replace_absences(states=states)
    prepared.run_pipeline()
    step = prepared.step
    order = step.positions()
    computing = [order[n] for n in step.calls() if n.target not in ops.EVENTS and origin(n).phase == "backward"]
    beside = 0
    for node in (*calls(step, ops.copy_into), *calls(step, ops.reload)):
        if origin(node).phase == "update":
            (done,) = node.users
            beside += any(order[node] < place < order[done] for place in computing)
    assert (beside == 0) is at_once


def test_a_residency_without_a_use_is_refused() -> None:
    prepared = away("host", num_ranks=1)
    prepared.plan = replace(prepared.plan, gathers=(*prepared.plan.gathers, prepared.plan.gathers[0]))
    with pytest.raises(PlanError, match="a residency without a use"):
        prepared.run("gather")


def test_a_slice_that_is_written_before_its_copy_is_done_is_refused() -> None:
    prepared = away("host", num_ranks=1).run()
    step = prepared.step
    shard = next(step.placeholders(Role.SHARD))
    last = [user for user in shard.users if user.target is ops.wait and origin(user).phase != "update"][-1]
    with step.graph.inserting_before(last):
        copy = insert_call(step.graph, ops.copy_into, (shard, last.all_input_nodes[0].args[0]), origin(last))
        insert_call(step.graph, ops.wait, (copy, shard), origin(last))
    with pytest.raises(InvalidGraphError, match=f"update: copy_into\\w* writes {shard.name} before"):
        verify(step, "mine")


def test_parameters_that_are_not_where_the_plan_says_are_refused() -> None:
    prepared = away("host").run()
    verify(prepared.step, "all", prepared.plan)
    for parameters in ((), tuple(replace(decision, tier="nvme") for decision in prepared.plan.parameters)):
        with pytest.raises(InvalidGraphError, match="plan: the graph keeps parameters of buckets"):
            verify(prepared.step, "all", prepared.plan.replace_absences(parameters=parameters))
