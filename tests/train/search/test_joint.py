"""Computing again and offloading, decided together: never slower than either alone, and the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofx
from tests.train.search.test_budget import OPERATORS, Chain, convnet, gpt, llama, run
from zerofx.driver.plan_only import PlannedStep, plan
from zerofx.errors import MemoryBudgetError
from zerofx.options import Offload, Recompute
from zerofx.scheduler.cost.machine import Device, Link, Machine

WAYS: dict[str, tuple[Recompute, Offload]] = {
    "joint": ("auto", "host"), "recompute": ("auto", "none"), "offload": ("none", "host"),
}  # fmt: skip


def small_machine(link: float) -> Machine:
    """A device so slow, with launches so cheap, that tiny tensors are worth moving over a link of ``link`` bytes/s."""
    device = Machine.named("h100-sxm").device
    slow = Device(replace(device.peak, float32=2e9), 2e9, device.memory_bytes, 1e-9)
    host = replace(Machine.named("h100-sxm").host, to_host=Link(link, 1e-9), to_device=Link(link, 1e-9))
    return replace(Machine.named("h100-sxm"), name="small", device=slow, host=host)


def attempt(model: torch.nn.Module, batch: Any, machine: Machine, budget: int, way: str) -> PlannedStep | int:
    """The plan, or the least possible peak if there is none."""
    recompute, offload = WAYS[way]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    try:
        return plan(
            model, optimizer, batch, machine=machine, memory_budget=budget, backend="eager",
            recompute=recompute, offload=offload,
        )  # fmt: skip
    except MemoryBudgetError as error:
        return int(str(error).split(" bytes)")[0].split("(")[-1])


@settings(max_examples=5, deadline=None, derandomize=True)
@given(names=OPERATORS, depth=st.integers(2, 4), share=st.floats(0, 1), link=st.sampled_from([1e7, 1e9, 1e11]))
def test_the_joint_plan_is_never_slower_than_the_better_of_the_two(
    names: list[str], depth: int, share: float, link: float
) -> None:
    model, machine = Chain(8, tuple(names), depth), small_machine(link)
    batch = (torch.randn(16, 8),)
    least = attempt(model, batch, machine, 1, "joint")
    most = attempt(model, batch, machine, 10**9, "joint")
    assert isinstance(least, int) and isinstance(most, PlannedStep)
    budget = least + int(share * (most.plan.peak_bytes["device"] - least))
    found = {way: attempt(model, batch, machine, budget, way) for way in WAYS}
    joint = found["joint"]
    assert isinstance(joint, PlannedStep) and joint.plan.peak_bytes["device"] <= budget
    for other in found.values():
        if isinstance(other, PlannedStep):
            assert joint.plan.step_seconds <= other.plan.step_seconds


def test_where_the_link_is_fast_the_joint_plan_offloads_and_is_faster_than_computing_again() -> None:
    model, batch = gpt()
    machine = small_machine(1e10)
    alone = attempt(model, batch, machine, 1, "recompute")
    assert isinstance(alone, int)
    joint, again = (attempt(model, batch, machine, alone, way) for way in ("joint", "recompute"))
    assert isinstance(joint, PlannedStep) and isinstance(again, PlannedStep)
    assert joint.plan.offloads and not again.plan.offloads
    assert joint.plan.step_seconds < again.plan.step_seconds
    assert joint.plan.peak_bytes["host"] > 0
    least = attempt(model, batch, machine, 1, "joint")
    assert isinstance(least, int) and least < alone


SLOW = pytest.mark.slow


@pytest.mark.usefixtures("drive")
@pytest.mark.parametrize("offload", ["host", pytest.param("nvme", marks=SLOW)])
@pytest.mark.parametrize(
    ("make", "tightest"),
    [(gpt, 0.65), pytest.param(convnet, 0.8, marks=SLOW), pytest.param(llama, 0.65, marks=SLOW)],
)
def test_at_every_budget_plans_that_offload_train_the_same_bits_and_fit(
    make: Callable[[], Any], tightest: float, offload: Offload
) -> None:
    model, batch = make()
    machine = small_machine(1e9)
    trained = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, foreach=False)
    plain = zerofx.compile(trained, optimizer, backend="eager")
    reference = [*(run(plain, batch) for _ in range(3)), *(p.detach() for p in trained.parameters())]
    most = plain.plan.peak_bytes["device"]
    peaks, offloaded = [], 0
    for share in (0.9, tightest):
        trained = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, foreach=False)
        step = zerofx.compile(
            trained, optimizer, backend="eager", memory_budget=int(share * most), offload=offload, machine=machine
        )
        results = [run(step, batch) for _ in range(3)]
        with step.full_parameters():  # parameters may be off the device as well
            results += [p.detach().clone() for p in trained.parameters()]
        assert all(torch.equal(one, other) for one, other in zip(results, reference, strict=True))
        assert step.plan.peak_bytes["device"] <= int(share * most)
        peaks.append(step.plan.peak_bytes["device"])
        offloaded += len(step.plan.offloads)
        step.close()
    assert peaks == sorted(peaks, reverse=True)
    assert offloaded
