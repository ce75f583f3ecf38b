"""Stages dealt round robin, whose parameters lie on the host: one process's bits, and few bytes to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import adamw
from tests.lib.runs.stages import Dropping

BUDGET = 200_000
ROUNDS = {"mesh": {"pipe": 2}, "order": "round-robin", "offload": "host"}


@dataclass(frozen=True)
class Trained:
    """Losses and parameters of a training, the numbers of those that lay on the host, and bytes: of a stage's
    parameters, of its peaks, and of what is copied in a step."""

    values: list[Tensor]
    parameter_bytes: int
    on_host: list[int]
    predicted: dict[str, int]
    measured: dict[str, int]
    moved: dict[str, int]


def train(num: int, steps: int, options: dict[str, Any]) -> Trained:
    torch.manual_seed(0)
    model = Dropping()
    step = zerofx.compile(model, adamw(model), accumulate=num, backend="eager", **options)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(19, (2, 2 * num, 16), generator=generator) for _ in range(steps)]
    values = [step(*batch) for batch in batches]
    values += step.full_state_dict().values()
    measured, plan = step.measure(*batches[0], num_steps=1), step.plan
    on_host = [plan.buckets[away.bucket].num_parameters for away in plan.parameters]
    num_bytes = 4 * sum(bucket.num_parameters for bucket in plan.buckets)
    return Trained(values, num_bytes, on_host, plan.peak_bytes, measured.peak_bytes, measured.link_bytes)


def train_all(nums: list[int], options: dict[str, Any]) -> list[Trained]:
    return [train(num, 3, options) for num in nums]


@pytest.mark.days(3)
@pytest.mark.parametrize("options", [{}, pytest.param({"max_grad_norm": 0.1}, marks=pytest.mark.slow)])
def test_parameters_on_the_host_come_up_twice_a_step_however_many_micro_batches(options: dict[str, Any]) -> None:
    nums = [4, 8]
    alone = train_all(nums, options)
    for outcomes in run_ranks(train_all, 2, nums, {**ROUNDS, "memory_budget": BUDGET, **options}):
        for mine, one in zip(outcomes, alone, strict=True):
            assert all(torch.equal(found, expected) for found, expected in zip(mine.values, one.values, strict=True))
            assert mine.measured == mine.predicted and mine.predicted["device"] <= BUDGET
            # For forward and for backward; of a stage's last chunk one follows the other.
            first, last = mine.on_host
            assert 4 * (2 * first + last) <= mine.moved["to_device"] <= 2 * mine.parameter_bytes
