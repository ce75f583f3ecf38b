"""Plans within a budget of host memory, and the pool that keeps to it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import zerofx
from tests.lib.budgets import gpt, same_bits, small_machine, trained
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import placing, prepare_case
from tests.lib.runs.training import build
from zerofx.choices import OffloadOption
from zerofx.driver.plan_only import PlannedStep
from zerofx.errors import MemoryBudgetError, TierError, UsageError, ZeroFXWarning
from zerofx.runtime.tiers.host_memory import HostMemory
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.transfers import PAGE

H100 = Machine.named("h100-sxm")


def planned(memory_budget: int | None, **options: Any) -> PlannedStep:
    model, batch = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    given = {"machine": small_machine(1e10), "memory_budget": memory_budget, "backend": "eager", **options}
    return zerofx.plan(model, optimizer, batch, **given)


@functools.cache
def most() -> int:
    """The peak without a budget."""
    return planned(None).plan.peak_bytes["device"]


def blocks_of(step: PlannedStep) -> int:
    return step.lowered.simulation.live.host_block_bytes


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("offload", ["nvme", "auto"])
def test_a_plan_takes_no_more_of_the_host_than_it_may(offload: OffloadOption) -> None:
    memory_budget = int(0.8 * most())
    free = blocks_of(planned(memory_budget, offload=offload))
    found = planned(memory_budget, offload=offload, host_budget=int(0.8 * free))
    assert 0 < blocks_of(found) <= int(0.8 * free)
    assert found.plan.peak_bytes["device"] <= memory_budget
    assert found.plan.peak_bytes["nvme"] > 0


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("offload", ["nvme", "auto"])
def test_without_one_a_plan_takes_no_more_than_a_ranks_share_of_the_machines(offload: OffloadOption) -> None:
    memory_budget, machine = int(0.8 * most()), small_machine(1e10).for_ranks(1)
    share = int(0.8 * planned(memory_budget, offload=offload).plan.peak_bytes["host"])
    small = replace(machine, host=replace(machine.host, memory_bytes=share * machine.ranks_per_node))
    found = planned(memory_budget, offload=offload, machine=small)
    assert 0 < found.plan.peak_bytes["host"] <= share and found.fits


@pytest.mark.days(3)
def test_a_fraction_of_a_ranks_share_that_is_too_small_is_refused_with_what_would_do() -> None:
    memory_budget, tiny = int(0.6 * most()), 5e3 / H100.for_ranks(1).host_bytes_per_rank
    with pytest.raises(MemoryBudgetError, match=r"host_budget=4\.9 KiB: the least possible") as found:
        planned(memory_budget, offload="host", host_budget=tiny)
    enough = int(str(found.value).split("takes ")[1].split("(")[1].split(" bytes")[0])
    assert blocks_of(planned(memory_budget, offload="host", host_budget=f"{enough}B")) <= enough


def test_states_that_have_to_be_on_the_host_may_take_more_than_there_is() -> None:
    delayed = {"delayed_update": 1, "offload": "auto"}
    tiny = replace(small_machine(1e10), host=replace(H100.host, memory_bytes=5000))
    assert H100.nvme is not None and tiny.nvme is not None
    found = planned(most(), machine=tiny, **delayed)
    assert all(state.tier == "host" for state in found.plan.states) and found.plan.peak_bytes["host"] > 5000
    with pytest.raises(MemoryBudgetError, match=r"host_budget=4.0 KiB cannot be met: what has to be on the host") as e:
        planned(most(), host_budget="4KiB", **delayed)
    enough = int(str(e.value).split("(")[1].split(" bytes")[0])
    assert blocks_of(planned(most(), host_budget=enough, **delayed)) == enough


def test_what_is_on_the_host_by_options_alone_is_held_to_it() -> None:
    needed = blocks_of(planned(None, delayed_update=1))
    assert blocks_of(planned(None, delayed_update=1, host_budget=needed)) == needed
    with pytest.raises(MemoryBudgetError, match=r"allow as much, or have less there \(delayed_update=, offload=\)"):
        planned(None, delayed_update=1, host_budget=needed - 1)


def test_what_cannot_be_a_budget_is_refused() -> None:
    for wrong in (0, -1, 1.5, True, "much"):
        with pytest.raises(UsageError, match=r"host_budget|expected a size"):
            planned(10**9, host_budget=wrong)
    with pytest.warns(ZeroFXWarning, match="host_budget is ignored without a memory_budget"):
        planned(None, host_budget="1GiB")


def test_a_step_that_takes_more_than_the_machine_has_says_so() -> None:
    model, batch = gpt()
    machine = small_machine(1e10).for_ranks(1)
    given = planned(int(0.6 * most()), offload="host", machine=machine).plan
    tiny = replace(machine, host=replace(machine.host, memory_bytes=5000))
    with pytest.warns(ZeroFXWarning, match=r"MiB of host memory on each rank, of 4\.9 KiB that .* has for one"):
        trained(model, batch, 1, plan=given, machine=tiny)


@pytest.mark.usefixtures("drive")
@pytest.mark.parametrize("offload", ["host", pytest.param("nvme", marks=pytest.mark.slow)])
def test_the_pool_keeps_to_it_and_the_bits_are_the_same(offload: OffloadOption) -> None:
    model, batch = gpt()
    plain, expected = trained(model, batch, 2)
    memory_budget = int(0.75 * plain.plan.peak_bytes["device"])
    options = {"memory_budget": memory_budget, "offload": offload, "machine": small_machine(1e9)}
    free, _ = trained(model, batch, 2, **options)
    needed = free.compiled.lowered.simulation.live.host_block_bytes
    limit = needed if offload == "host" else int(0.9 * needed)
    step, found = trained(model, batch, 2, **options, host_budget=limit)
    assert same_bits(found, expected)
    assert step._steps.tiers is not None
    # Blocks of other sizes wait for reuse as long as the limit allows.
    assert 0 < step._steps.tiers.host_block_bytes <= limit
    assert step.compiled.lowered.simulation.live.host_block_bytes <= limit


def test_a_plan_that_was_given_is_held_to_it() -> None:
    case = CASES["gpt"]
    plan = placing(prepare_case(case, 0, 1), "host", "host")
    args, _ = next(batches(case, 0, 1))

    def compiled(limit: int | None) -> zerofx.Step:
        model = build(case)
        step = zerofx.compile(model, case.optimizer(model), 0, plan=plan, backend="eager", host_budget=limit)
        step(*args)
        return step

    with pytest.raises(MemoryBudgetError, match=r"within host_budget=1 B \(1 bytes\), found one that takes"):
        compiled(1)
    needed = compiled(None).compiled.lowered.simulation.live.host_block_bytes
    step = compiled(needed)
    assert step._steps.tiers is not None
    # Adam's moments and the parameters with them, gradients and new parameters on their way: counted to the block.
    assert step.plan.peak_bytes["host"] < step._steps.tiers.host_block_bytes <= needed


def test_blocks_of_other_sizes_make_room_and_what_is_in_use_does_not() -> None:
    memory = HostMemory(pinned=False, budget=10 * PAGE)
    small, large = memory.take(2 * PAGE), memory.take(4 * PAGE)
    memory.give_back(large)
    assert memory.num_bytes == 6 * PAGE
    other = memory.take(6 * PAGE)
    assert memory.num_bytes == 8 * PAGE, "the free block had to go"
    with pytest.raises(TierError, match=r"12.0 KiB .*host_budget=40.0 KiB.* 32.0 KiB"):
        memory.take(3 * PAGE)
    memory.give_back(small)
    memory.give_back(other)
    memory.clear()
    assert memory.num_bytes == 0
