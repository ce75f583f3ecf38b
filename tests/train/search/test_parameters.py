"""Parameters off the device, chosen by the budget: what is moved, what it costs, the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.budgets import captured_gpt, gpt, same_bits, small_machine, trained
from zerofx.choices import OffloadOption
from zerofx.driver.plan_only import PlannedStep
from zerofx.scheduler.cost.machine import Link, Machine, Nvme
from zerofx.scheduler.cost.timeline import seconds_by_place
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.parameters import copies_menu, parameter_menus
from zerofx.scheduler.decide.residency import PolicyOptions, residencies
from zerofx.scheduler.plan.plan import Plan

H100 = Machine.named("h100-sxm")


def menus(
    machine: Machine,
    num_ranks: int = 1,
    state_bytes: int = 12,
    capacity: int = 2**40,
    *,
    states: Level | None = None,
    activation_bytes: int = 0,
) -> dict[str, tuple[Level, Level]]:
    """``states``: where those of all buckets go that leave the device."""
    step, layout = captured_gpt(num_ranks=num_ranks)
    held = {bucket.index: state_bytes * bucket.shard_numel for bucket in layout.buckets}
    found = parameter_menus(
        residencies(step, layout, PolicyOptions()),
        layout,
        held,
        seconds_by_place(step, machine),
        machine,
        Ledger(("host",), {"host": capacity, "nvme": 0}),
        {} if states is None else dict.fromkeys(layout.buckets, states),
        activation_bytes,
    )
    return {bucket.name: levels for bucket, levels in found.items()}


def test_parameters_on_the_device_cost_nothing_and_off_it_they_hold_nothing() -> None:
    found = menus(H100)
    assert set(found) >= {"layers.0", "layers.1"}
    for stay, leave in found.values():
        assert stay == Level(stay.num_bytes, 0.0) and stay.num_bytes > 0
        assert leave.tier == "host" and leave.num_bytes == 0 and leave.seconds > 0


def test_beside_the_copies_of_states_nothing_of_theirs_is_hidden() -> None:
    alone, beside = menus(H100, state_bytes=0), menus(H100)
    assert all(beside[name][1].seconds >= alone[name][1].seconds for name in alone)
    assert beside["layers.1"][1].seconds > alone["layers.1"][1].seconds


def test_where_computation_is_slow_copies_hide_behind_it() -> None:
    slow = replace(H100.device, peak=replace(H100.device.peak, bfloat16=1e9))
    assert menus(replace(H100, device=slow), state_bytes=0)["layers.1"][1].seconds == 0


def test_with_more_ranks_each_has_less_to_move() -> None:
    few, many = menus(H100), menus(H100, 64)
    assert sum(stay.num_bytes for stay, _ in many.values()) < sum(stay.num_bytes for stay, _ in few.values()) / 32
    assert sum(leave.seconds for _, leave in many.values()) < sum(leave.seconds for _, leave in few.values())


def test_where_activations_leave_too_those_of_a_layer_come_up_first() -> None:
    alone = menus(H100, 64)
    behind = menus(H100, 64, activation_bytes=len(alone) * 10**9)
    waited = copy_seconds(10**9, "host", "device", H100)
    assert all(behind[name][1].seconds == pytest.approx(leave.seconds + waited) for name, (_, leave) in alone.items())


@pytest.mark.days(3)
def test_slices_that_gathers_wait_for_leave_after_what_frees_more() -> None:
    """On many ranks they are next to nothing, and would come up behind the activations of a layer."""
    with torch.device("meta"):
        model = GPT(512, 2048, 6, 16, 2048)
        ids = torch.zeros(2, 2048, dtype=torch.long)
    most, tight = (
        zerofx.plan(
            model, torch.optim.AdamW(model.parameters()), (ids, ids), machine=H100, precision="bf16", backend="eager",
            world_size=1024, memory_budget=budget, recompute="none",
        ).plan
        for budget in ("3GiB", "2GiB")
    )  # fmt: skip
    assert most.peak_bytes["device"] > 2 << 30 >= tight.peak_bytes["device"]
    assert tight.offloads and not tight.parameters


def test_what_a_tier_has_no_room_for_stays() -> None:
    assert not menus(H100, capacity=8)
    one = menus(H100)["layers.0"][0].num_bytes
    assert len(menus(H100, capacity=one)) < len(menus(H100))


def test_next_to_states_that_are_updated_on_the_host_they_take_no_room_and_their_update_costs_nothing() -> None:
    updated_there = Level(0, 0.0, "host", "host", stored_bytes=12, parameter_bytes=4)
    with_masters = replace(updated_there, parameter_bytes=0)
    shared = menus(H100, capacity=8, states=updated_there)
    apart = menus(H100)
    assert set(shared) == set(apart) and all(leave.tier == "host" for _, leave in shared.values())
    assert all(shared[name][1].seconds < apart[name][1].seconds for name in apart)
    assert not menus(H100, capacity=8, states=with_masters)


def test_copies_ahead_hold_a_bucket_and_copies_at_once_are_waited_for() -> None:
    _, layout = captured_gpt()
    ahead, at_once = copies_menu(layout, {}, "host", H100)
    assert ahead.num_bytes == max(bucket.full_bytes for bucket in layout.buckets) and ahead.seconds == 0
    assert at_once.num_bytes == 0 and at_once.seconds > 0


def planned(memory_budget: str | None, num_ranks: int = 1) -> PlannedStep:
    with torch.device("meta"):
        model = GPT(512, 1024, 4, 8, 128)
        ids = torch.zeros(1, 128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofx.plan(
        model, optimizer, (ids, ids), machine=part_of_node(H100, num_ranks), precision="bf16",
        memory_budget=memory_budget, backend="eager", world_size=num_ranks,
    )  # fmt: skip


def part_of_node(machine: Machine, num_ranks: int) -> Machine:
    """What ``num_ranks`` ranks have of a node that is full."""
    part, host, nvme = num_ranks / machine.ranks_per_node, machine.host, machine.nvme
    assert nvme is not None
    shared = replace(
        host, memory_bytes=int(part * host.memory_bytes), memory_bandwidth=part * host.memory_bandwidth,
        flops=part * host.flops,
    )  # fmt: skip
    read, write = (Link(part * link.bandwidth, link.latency) for link in (nvme.read, nvme.write))
    drives = Nvme(int(part * nvme.num_bytes), read, write)
    return replace(machine, ranks_per_node=num_ranks, host=shared, nvme=drives)


def moved(plan: Plan) -> tuple[int, int]:
    return len(plan.states), len(plan.parameters)


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("num_ranks", "least"), [(1, 0.45), (2, 0.36)])
def test_states_leave_before_parameters_and_a_smaller_budget_moves_more(num_ranks: int, least: float) -> None:
    most = planned(None, num_ranks).plan
    some, more = (planned(f"{int(s * most.peak_bytes['device'])}B", num_ranks).plan for s in (0.65, least))
    assert moved(most) == (0, 0)
    assert 0 < moved(some)[0] <= moved(more)[0] and moved(some)[1] == 0 < moved(more)[1]
    assert all("between uses" in decision.reason for decision in more.parameters)
    assert most.step_seconds <= some.step_seconds <= more.step_seconds
    name = more.buckets[more.parameters[-1].bucket].name
    text = more.why(name)
    assert f"parameters on {more.parameters[-1].tier} between uses: frees" in text
    assert "copied to the device before" in text and "never gathered" not in text
    assert "on the device -> on host" in some.diff(more).partition("\nparameters")[2]
    assert "parameters" in str(more) and "between uses" in str(more)


def with_drive(rate: float) -> Machine:
    """A machine with a host link and a drive of so many bytes a second."""
    return replace(small_machine(rate), nvme=Nvme(2**40, Link(rate, 1e-9), Link(rate, 1e-9)))


@pytest.mark.sweep(1)
@pytest.mark.usefixtures("drive")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_training_within_a_budget_below_the_parameters_has_the_same_bits(tier: OffloadOption) -> None:
    model, batch = gpt()
    machine = with_drive(1e9)
    plain, expected = trained(model, batch, machine=machine)
    most, counts = plain.plan.peak_bytes["device"], []
    for share in (0.6, 0.4):
        budget = int(share * most)
        step, found = trained(model, batch, machine=machine, offload=tier, memory_budget=budget)
        assert same_bits(found, expected)
        measured, plan = step.measure(*batch, num_steps=1), step.plan
        assert measured.link_bytes == plan.link_bytes
        assert {**measured.peak_bytes, "device": 0} == {**plan.peak_bytes, "device": 0}
        assert plan.peak_bytes["device"] <= budget
        counts.append(len(plan.parameters))
        step.close()
    assert counts[0] <= counts[1] and counts[1] > 0
