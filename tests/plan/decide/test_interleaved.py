"""Stages of two chunks each: how long they idle, what they hold, and where a plan has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.models import adamw
from tests.plan.decide.test_stages import planned
from tests.plan.decide.test_zero_bubble import replay, torch_actions
from zerofx import UsageError
from zerofx.driver.plan_only import PlannedStep
from zerofx.scheduler.cost.stages import StageSeconds, choose_lags, simulate_stages

HALVES = {"F": 0.5, "B": 1.0, "I": 0.5, "W": 0.5}


def _layers(depth: int = 8, dim: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(depth)))


def _plan(model: nn.Module, num: int = 8, dim: int = 256, **options: Any) -> PlannedStep:
    rows = torch.ones(512 * num, dim)
    return planned(model, (rows, rows), 4, accumulate=num, loss_fn=nn.MSELoss(), **options)


@pytest.mark.parametrize(("num_stages", "num", "at_once", "apart"), [(4, 8, 4.5, 1.5), (8, 16, 10.5, 3.5)])
def test_chunks_idle_half_as_long_as_torch_s_schedules_do(
    num_stages: int, num: int, at_once: float, apart: float
) -> None:
    chunks = [StageSeconds(0.5, 1.0, weights=0.5)] * (2 * num_stages)
    own = simulate_stages(chunks, num, by_turns=True, num_stages=num_stages)
    assert own.idle == (at_once,) * num_stages
    assert own.idle == tuple(replay(torch_actions("Interleaved1F1B", num_stages, num, 2), HALVES, 2 * num_stages))
    lags = choose_lags(chunks, num, num_stages - 1, [True] * num_stages)
    own = simulate_stages(chunks, num, by_turns=True, lags=lags, num_stages=num_stages)
    assert own.idle == (apart,) * num_stages
    assert own.idle == tuple(replay(torch_actions("ZBVZeroBubble", num_stages, num, 2), HALVES, 2 * num_stages))


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_what_chunks_hold_does_not_grow_with_the_number_of_micro_batches(num_stages: int) -> None:
    chunks = [StageSeconds(0.5, 1.0)] * (2 * num_stages)
    held = [
        simulate_stages(chunks, num, by_turns=True, num_stages=num_stages).under_way for num in (8 * num_stages, 100)
    ]
    assert held[0] == held[1] == tuple(2 * num_stages - 1 - stage for stage in range(num_stages))


@pytest.mark.days(3)
def test_chunks_are_taken_where_they_are_faster_and_fit() -> None:
    best = _plan(_layers())
    (lags,) = {tuple(stage.plan.weights_lag for stage in best.stages)}
    assert {stage.plan.num_chunks for stage in best.stages} == {2} and lags[0] is None
    one = _plan(_layers(), order="zero-bubble")
    assert best.plan.step_seconds < 0.98 * one.plan.step_seconds
    (reason,) = {stage.plan.micro_batches_reason.partition("; ")[2] for stage in best.stages}
    assert "2 chunks a stage" in reason and "rather than one forward, one backward, weight gradients" in reason
    peak = max(stage.plan.peak_bytes["device"] for stage in one.stages)
    within = _plan(_layers(), recompute="none", offload="none", memory_budget=peak)
    assert {stage.plan.num_chunks for stage in within.stages} == {1}
    assert all("two chunks a stage do not fit" in stage.plan.micro_batches_reason for stage in within.stages)


def test_a_plan_says_what_its_chunks_are(golden: Callable[..., None]) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    rows = torch.ones(16, 8)
    stage = planned(layers, (rows, rows), 2, accumulate=8, order="interleaved", loss_fn=nn.MSELoss()).stages[0]
    source = stage.lowered.emitted.source
    golden(f"{stage.plan}\n\n{source[source.index('def step(') :]}")


@pytest.mark.parametrize(
    ("model", "num", "problem"),
    [
        (_layers, 3, "found 3 on 4 stages"),
        (lambda: _layers(6), 8, "at least 8 parts"),
    ],
)
def test_what_cannot_run_in_chunks_is_refused_or_left_out(
    model: Callable[[], nn.Module], num: int, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        _plan(model(), num, order="interleaved")
    assert {stage.plan.num_chunks for stage in _plan(model(), num).stages} == {1}


def test_chunks_are_of_stages_alone() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="interleaved"):
        zerofx.plan(model, adamw(model), (torch.ones(8, 8),), order="interleaved", accumulate=2)
