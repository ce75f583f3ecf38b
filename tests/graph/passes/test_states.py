"""How states in a slower tier meet their update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.lib.graphs import calls
from tests.lib.plans import delaying, placed
from zerofx.codegen.regions import Region, cut
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.edit import consumers, insert_call
from zerofx.ir.facts import Role, delayed_bucket, origin, placeholder, tier_of
from zerofx.ir.streams import hops_of, runs_on_host
from zerofx.passes.verify import verify

aten = torch.ops.aten
PLACES = [("host", "device"), ("host", "host"), ("nvme", "device"), ("nvme", "host")]


@pytest.mark.parametrize(("tier", "update"), PLACES)
def test_states_are_brought_to_their_update(golden: Callable[..., None], tier: str, update: str) -> None:
    golden(placed(tier, update).changes("update"))


def test_parameters_are_cast_on_the_host(golden: Callable[..., None]) -> None:
    golden(placed("host", "host", stage=2, precision="bf16").changes("update"))


def test_a_delayed_update_is_left_to_the_host(golden: Callable[..., None]) -> None:
    golden(delaying(3).changes("update"))


def test_a_delayed_update_casts_on_the_host(golden: Callable[..., None]) -> None:
    golden(delaying(2, precision="bf16").changes("update"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_delayed_updates_are_accepted(stage: int, num_ranks: int, precision: str | None) -> None:
    prepared = delaying(stage, num_ranks, precision)
    prepared.run_pipeline()
    late = [node for node in prepared.step.calls() if delayed_bucket(node) is not None]
    assert late and all(runs_on_host(node) for node in late)
    assert {delayed_bucket(node) for node in late} == {one.bucket for one in prepared.plan.states}


def test_an_update_that_is_not_awaited_is_refused() -> None:
    step = placed("host", "host").run().step
    left = calls(step, ops.run_on)[0]
    step.graph.erase_node(left)
    with pytest.raises(InvalidGraphError, match=r"waits: shard_\d_copy has 0 waits"):
        verify(step, "test")
    step = placed("host", "host", num_ranks=1).run().step  # whose parameters users see between steps
    settled = calls(step, ops.settle)[0]
    step.graph.erase_node(settled)
    with pytest.raises(InvalidGraphError, match=rf"is of bucket {settled.args[0]}, the update of which is not"):
        verify(step, "test")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_background_work_is_awaited_before_the_next_step_reads_it(num_ranks: int) -> None:
    prepared = placed("host", "host", num_ranks=num_ranks, precision="bf16")
    prepared.run_pipeline()
    step, order = prepared.step, prepared.step.positions()
    left, settled = calls(step, ops.run_on), {node.args[0]: node for node in calls(step, ops.settle)}
    assert {node.args[0] for node in left} == settled.keys() == {decision.bucket for decision in prepared.plan.states}
    for node in step.placeholders():
        if placeholder(node).role in (Role.SHARD, Role.FULL, Role.MASTER):
            for reader in consumers(node):
                assert order[reader] > order[settled[placeholder(node).bucket]], reader
    late = settled[left[0].args[0]]
    step.output.prepend(late)
    with pytest.raises(InvalidGraphError, match=r"host: .* has let run on in the step before, not awaited"):
        verify(step, "all", prepared.plan)
    step.graph.erase_node(late)
    with pytest.raises(InvalidGraphError, match=r"host: .* has let run on in the step before, not awaited"):
        verify(step, "all", prepared.plan)


def test_an_update_that_begins_before_the_last_one_is_done_is_refused() -> None:
    prepared = delaying(3).run()
    settled = calls(prepared.step, ops.settle)[0]
    late = [node for node in prepared.step.calls() if delayed_bucket(node) == settled.args[0]]
    late[-1].append(settled)
    with pytest.raises(InvalidGraphError, match=r"host: .* is of bucket \d, the last update of which"):
        verify(prepared.step, "test")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("tier", "update"), PLACES)
def test_what_the_passes_leave_is_accepted(tier: str, update: str, stage: int, num_ranks: int) -> None:
    prepared = placed(tier, update, stage, num_ranks)
    prepared.run_pipeline()
    kept = [*prepared.step.placeholders(Role.STATE), *prepared.step.placeholders(Role.MASTER)]
    assert kept and all(tier_of(node) == tier for node in kept)
    assert {runs_on_host(n) for n in prepared.step.calls() if n.target is aten.addcdiv_.default} == {update == "host"}


def test_a_region_is_all_on_the_host_or_all_on_the_device() -> None:
    step = placed("host", "host").run().step
    regions = [one for one in cut(step) if isinstance(one, Region)]
    sides = [{runs_on_host(node) for node in region.own if node.target is not ops.wait} for region in regions]
    assert any(True in side for side in sides)
    for region in regions:
        work = [node for node in region.nodes if "getitem" not in str(node.target)]
        assert len({runs_on_host(node) for node in work}) == 1


def test_hops_lead_from_tier_to_tier() -> None:
    found = {}
    for tier, update in PLACES:
        step = placed(tier, update).run().step
        for target in ops.TRANSFERS:
            ways = {tuple(hop.stream for hop in hops_of(node)) for node in calls(step, target)}
            found[tier, update, target] = ways
    up, down = ("nvme_read", "to_device"), ("to_host", "nvme_write")
    assert found["host", "device", ops.reload] == {("to_device",)}
    assert found["host", "device", ops.copy_into] == {("to_host",)}
    assert found["host", "host", ops.reload] == set()
    assert found["host", "host", ops.copy_into] == {("to_host",), ("to_device",)}
    assert (found["nvme", "device", ops.reload], found["nvme", "device", ops.copy_into]) == ({up}, {down})
    assert found["nvme", "host", ops.reload] == {("nvme_read",)}
    assert found["nvme", "host", ops.copy_into] == {("to_host",), ("nvme_write",), ("to_device",)}


@pytest.mark.parametrize("wrong", [("device", "device"), ("tape", "host"), ("host", "nvme")])
def test_what_cannot_be_is_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(PlanError, match="tier host or nvme and update on device or host"):
        placed(*wrong).run()


def test_a_device_kernel_that_reads_states_elsewhere_is_refused() -> None:
    prepared = placed("host", "device").run()
    state = next(prepared.step.placeholders(Role.STATE))
    with prepared.step.graph.inserting_before(prepared.step.output):
        insert_call(prepared.step.graph, aten.mul_.Tensor, (state, 0.5), origin(prepared.step.loss))
    with pytest.raises(InvalidGraphError, match=f"states: mul__tensor\\w* reads {state.name} on host"):
        verify(prepared.step, "mine")


def test_states_that_are_not_where_the_plan_says_are_refused() -> None:
    prepared = placed("host", "device").run()
    verify(prepared.step, "all", prepared.plan)
    for states in ((), tuple(replace(decision, tier="nvme") for decision in prepared.plan.states)):
        with pytest.raises(InvalidGraphError, match="plan: the graph keeps states of buckets"):
            verify(prepared.step, "all", prepared.plan.replace_absences(states=states))
    assert {placeholder(node).bucket for node in prepared.step.placeholders(Role.STATE)} == {0, 1, 2}


def test_slices_that_run_on_are_not_read_where_other_ranks_have_them() -> None:
    prepared = placed("host", "host")
    prepared.run_pipeline()
    gathers = calls(prepared.step, ops.all_gather)
    assert gathers and not any(gather.kwargs.get("in_place") for gather in gathers)
    gathers[0].kwargs = {**gathers[0].kwargs, "in_place": True}
    with pytest.raises(InvalidGraphError, match="in place: gather_0 reads slices that may be written"):
        verify(prepared.step, "all", prepared.plan)
