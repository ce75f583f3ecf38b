"""Optimizer states off the device, chosen by the budget: what is moved, on which side it is updated, the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.budgets import captured_gpt, gpt, same_bits, small_machine, trained
from zerofx.driver.plan_only import PlannedStep
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.timeline import seconds_by_place
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.states import state_menus

H100 = Machine.named("h100-sxm")


def menus(machine: Machine, num_ranks: int = 1) -> list[tuple[Level, Level]]:
    step, layout = captured_gpt(num_ranks=num_ranks)
    held = {bucket.index: 12 * bucket.shard_numel for bucket in layout.buckets}
    return list(
        state_menus(layout, held, 3, seconds_by_place(step, machine), machine, Ledger.of(machine, ("host",))).values()
    )


def test_states_on_the_device_cost_nothing_and_off_it_they_hold_nothing() -> None:
    for stay, leave in menus(H100):
        assert stay.tier == "device" and stay.seconds == 0 and stay.num_bytes > 0
        assert leave.tier == "host" and leave.num_bytes == 0


def test_the_update_goes_where_it_is_cheaper() -> None:
    slow_link = replace(H100, host=replace(H100.host, to_host=Link(1e8, 0.0), to_device=Link(1e8, 0.0)))
    slow_host = replace(H100, host=replace(H100.host, flops=1e6))
    assert {leave.update for _, leave in menus(slow_link)} == {"host"}
    assert {leave.update for _, leave in menus(slow_host)} == {"device"}


def test_with_more_ranks_there_is_less_to_free_and_less_to_wait_for() -> None:
    few, many = menus(H100, 1), menus(H100, 64)
    assert sum(stay.num_bytes for stay, _ in many) < sum(stay.num_bytes for stay, _ in few) / 32
    assert sum(leave.seconds for _, leave in many) < sum(leave.seconds for _, leave in few)


def test_where_the_host_is_full_states_stay() -> None:
    assert not menus(replace(H100, host=replace(H100.host, memory_bytes=8)))


def test_states_that_do_not_all_fit_the_host_leave_room_for_activations() -> None:
    """As many bytes as activations take there, at most half of it; all that fits goes to the host otherwise."""
    _, layout = captured_gpt(num_layers=12)
    held = {bucket.index: 12 * bucket.shard_numel for bucket in layout.buckets}

    def on_host(host_bytes: int, activation_bytes: int) -> int:
        alone = replace(H100.for_ranks(1), host=replace(H100.host, memory_bytes=host_bytes))
        found = state_menus(layout, held, 3, {}, alone, Ledger.of(alone, ("host", "nvme")), activation_bytes)
        assert len(found) == len(held)
        return sum(leave.stored_bytes for _, leave in found.values() if leave.tier == "host")

    # With what an update on the host is handed, and hands back.
    total = on_host(1 << 50, 0)
    largest = total * max(held.values()) // sum(held.values())
    assert total >= sum(held.values()) and on_host(2 * total, total) == total
    scarce = total * 3 // 4
    without, some, most = (on_host(scarce, num) for num in (0, scarce // 4, 10 * total))
    assert 0 < without < total
    assert scarce // 4 - largest <= without - some <= scarce // 4 + largest
    assert most <= scarce // 2


def planned(memory_budget: str | None) -> PlannedStep:
    with torch.device("meta"):
        model = GPT(512, 1024, 8, 8, 128)
        ids = torch.zeros(1, 128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofx.plan(
        model, optimizer, (ids, ids), machine=H100, precision="bf16", memory_budget=memory_budget, backend="eager"
    )


@pytest.mark.days(3)
def test_a_budget_below_the_states_moves_some_buckets_and_a_smaller_one_moves_more() -> None:
    most = planned(None).plan
    some, more = (planned(f"{int(share * most.peak_bytes['device'])}B").plan for share in (0.7, 0.45))
    assert 0 < len(some.states) < len(more.states) <= len(most.buckets)
    assert some.slower_peak_bytes["host"] < more.slower_peak_bytes["host"]
    assert all("frees" in decision.reason and "exposed" in decision.reason for decision in more.states)
    assert most.step_seconds <= some.step_seconds <= more.step_seconds


@pytest.mark.sweep(1)
@pytest.mark.parametrize("share", [0.6, 0.55])
def test_training_with_states_on_the_host_has_the_same_bits(share: float) -> None:
    model, batch = gpt()
    machine = small_machine(1e9)
    plain, expected = trained(model, batch, machine=machine)
    budget = int(share * plain.plan.peak_bytes["device"])
    step, found = trained(model, batch, machine=machine, offload="host", memory_budget=budget)
    assert step.plan.states
    assert same_bits(found, expected)


@pytest.mark.days(3)
def test_states_of_what_ranks_have_parts_of_are_there_where_its_gradients_are_complete() -> None:
    """Nobody else sums those, so that they are updated as on one rank, however many ranks there are."""
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    options: dict[str, Any] = {"machine": "cpu", "backend": "eager", "mesh": {"model": 4}, "recompute": "none"}
    budget = int(0.8 * zerofx.plan(model, optimizer, batch, **options).plan.peak_bytes["device"])
    plan = zerofx.plan(model, optimizer, batch, memory_budget=budget, offload="host", **options).plan
    assert plan.states and plan.peak_bytes["device"] <= budget
