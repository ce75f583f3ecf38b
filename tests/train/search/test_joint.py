"""Computing again and offloading, decided together: never slower than either alone, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.budgets import Chain, convnet, gpt, llama, planned, same_bits, small_machine, trained
from tests.train.search.test_budget import OPERATORS
from zerofx.choices import OffloadOption, RecomputeOption
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError

WAYS: dict[str, tuple[RecomputeOption, OffloadOption]] = {
    "joint": ("auto", "host"), "recompute": ("auto", "none"), "offload": ("none", "host"),
}  # fmt: skip


def attempt(model: torch.nn.Module, batch: Any, machine: Machine, budget: int, way: str) -> Plan | int:
    """The plan, or the least possible peak if there is none."""
    recompute, offload = WAYS[way]
    try:
        return planned(model, batch, budget, machine=machine, recompute=recompute, offload=offload)
    except BudgetMissedError as error:
        return error.least_bytes


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(names=OPERATORS, depth=st.integers(2, 4), share=st.floats(0, 1), link=st.sampled_from([1e7, 1e9, 1e11]))
def test_the_joint_plan_is_never_slower_than_the_better_of_the_two(
    names: list[str], depth: int, share: float, link: float
) -> None:
    model, machine = Chain(8, tuple(names), depth), small_machine(link)
    batch = (torch.randn(16, 8),)
    least = attempt(model, batch, machine, 1, "joint")
    most = attempt(model, batch, machine, 10**9, "joint")
    assert isinstance(least, int) and isinstance(most, Plan)
    budget = least + int(share * (most.peak_bytes["device"] - least))
    found = {way: attempt(model, batch, machine, budget, way) for way in WAYS}
    joint = found["joint"]
    assert isinstance(joint, Plan) and joint.peak_bytes["device"] <= budget
    for other in found.values():
        if isinstance(other, Plan):
            assert joint.step_seconds <= other.step_seconds


@pytest.mark.slow
def test_where_the_link_is_fast_the_joint_plan_offloads_and_is_faster_than_computing_again() -> None:
    model, batch = gpt()
    machine = small_machine(1e10)
    alone = attempt(model, batch, machine, 1, "recompute")
    assert isinstance(alone, int)
    joint, again = (attempt(model, batch, machine, alone, way) for way in ("joint", "recompute"))
    assert isinstance(joint, Plan) and isinstance(again, Plan)
    assert joint.offloads and not again.offloads
    assert joint.step_seconds < again.step_seconds
    assert joint.peak_bytes["host"] > 0
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
    make: Callable[[], Any], tightest: float, offload: OffloadOption
) -> None:
    model, batch = make()
    plain, expected = trained(model, batch)
    most = plain.plan.peak_bytes["device"]
    peaks, offloaded = [], 0
    for budget in (int(0.9 * most), int(tightest * most)):
        step, found = trained(model, batch, memory_budget=budget, offload=offload, machine=small_machine(1e9))
        assert same_bits(found, expected)
        assert step.plan.peak_bytes["device"] <= budget
        peaks.append(step.plan.peak_bytes["device"])
        offloaded += len(step.plan.offloads)
        step.close()
    assert peaks == sorted(peaks, reverse=True)
    assert offloaded
