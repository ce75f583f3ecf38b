"""What memory buys for gathers: kept buckets and early gathers, where they save time that was exposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from zerofx.driver.plan_only import PlannedStep
from zerofx.scheduler.cost.machine import Link, Machine

FAST = Machine.named("h100-sxm")
SLOW = replace(FAST, name="slow-network", intra_node=Link(1e9, 1e-5), inter_node=Link(1e9, 1e-5))


def planned(machine: Machine, memory_budget: int | str | None, **options: Any) -> PlannedStep:
    with torch.device("meta"):
        model = GPT(512, 256, 4, 4, 128)
        batch = (torch.zeros(4, 128, dtype=torch.long), torch.zeros(4, 128, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters())
    return zerofx.plan(
        model, optimizer, batch, machine=machine, world_size=8, memory_budget=memory_budget, offload="none", **options
    )


def gathers_of(step: PlannedStep) -> dict[str, int]:
    names = [bucket.name for bucket in step.plan.buckets]
    found: dict[str, int] = {}
    for decision in step.plan.gathers:
        found[names[decision.bucket]] = found.get(names[decision.bucket], 0) + 1
    return found


def test_with_memory_to_spare_buckets_whose_second_gather_is_exposed_are_kept() -> None:
    lavish, unlimited = planned(SLOW, "80GB"), planned(SLOW, None)
    assert set(gathers_of(lavish).values()) == {1}
    assert max(gathers_of(unlimited).values()) == 2
    assert lavish.plan.step_seconds < unlimited.plan.step_seconds
    assert lavish.plan.wire_bytes < unlimited.plan.wire_bytes
    kept = [d.reason for d in lavish.plan.gathers if "kept from forward to backward" in d.reason]
    assert any("holding" in reason and "of exposed gathering" in reason for reason in kept)


@pytest.mark.days(3)
def test_with_less_memory_fewer_are_kept_and_the_step_takes_longer() -> None:
    most = planned(SLOW, "80GB", recompute="none").plan
    limits = [int(share * most.peak_bytes["device"]) for share in (0.95, 0.9, 0.85)]
    plans = [most, *(planned(SLOW, limit, recompute="none").plan for limit in limits)]
    assert all(plan.peak_bytes["device"] <= limit for plan, limit in zip(plans[1:], limits, strict=True))
    assert len(plans[-1].gathers) > len(most.gathers)
    times = [plan.step_seconds for plan in plans]
    assert times == sorted(times)


def test_computing_again_goes_before_gathering_again_where_it_is_cheaper() -> None:
    most = planned(SLOW, "80GB").plan
    less = planned(SLOW, int(0.85 * most.peak_bytes["device"])).plan
    assert less.recomputes and len(less.gathers) == len(most.gathers)


def test_where_gathers_are_hidden_nothing_is_kept_for_them() -> None:
    endless = replace(FAST, name="fast-network", intra_node=Link(1e15, 0.0), inter_node=Link(1e15, 0.0))
    kept = [d.reason for d in planned(endless, "80GB").plan.gathers if "holding" in d.reason]
    assert not kept


@pytest.mark.parametrize("asked", ["all", ("layers.0",)])
def test_what_the_user_keeps_is_kept_at_every_budget(asked: str | tuple[str, ...]) -> None:
    tight = planned(FAST, None).plan.peak_bytes["device"] * 9 // 10
    assert gathers_of(planned(FAST, tight, keep_gathered=asked))["layers.0"] == 1
