"""Trials of plans: those that fail, take more than they promise, or turn out slower; what a trial copies."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.runs.tuning import WIDTH, check, noisy, peak_of, tune
from tests.lib.users import adamw, untouched
from zerofx import Plan, PlanError, UsageError
from zerofx.runtime.measure.measure import Measurement
from zerofx.tuning import trial
from zerofx.tuning import tuner as tuning


def measuring(monkeypatch: pytest.MonkeyPatch, change: Callable[[Plan, Measurement], Measurement]) -> list[Plan]:
    """Let trials say something else than they have measured; gives the plans that were run."""
    ran: list[Plan] = []

    def changed(training: Any, plan: Plan, *args: Any) -> Any:
        ran.append(plan)
        found, regions = trial.run_trial(training, plan, *args)
        assert found.measured is not None
        return replace(found, measured=change(plan, found.measured)), regions

    monkeypatch.setattr(tuning, "run_trial", changed)
    return ran


@pytest.mark.days(3)
def test_a_peak_that_is_measured_over_the_budget_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = peak_of("none")

    def more(plan: Plan, found: Measurement) -> Measurement:
        return found if plan.recomputes else replace(found, peak_bytes={"device": budget + 2048})

    measuring(monkeypatch, more)
    result = tune(noisy_model := noisy(), adamw(noisy_model), memory_budget=budget)
    check(result)
    assert result.plan.recomputes
    assert "does not fit: measured 2.0 KiB too much" in str(result)


@pytest.mark.days(3)
def test_what_promises_more_once_costs_are_corrected_is_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # One candidate at first; regions that only it has turn out to be slow, so that the other looks better.
    model = noisy()
    optimizer = adamw(model)
    unlike = tune(model, optimizer, num_candidates=2).candidates
    keys = [set(one.measured.region_seconds) for one in unlike if one.measured]
    own = keys[0] - keys[1]
    assert own

    def slower(plan: Plan, found: Measurement) -> Measurement:
        seconds = {key: spent * (1000 if key in own else 1) for key, spent in found.region_seconds.items()}
        return replace(found, region_seconds=seconds, step_seconds=1.0 if set(seconds) & own else 0.5)

    ran = measuring(monkeypatch, slower)
    result = tune(model, optimizer, num_candidates=1)
    assert [bool(plan.recomputes) for plan in ran] == [False, True]
    assert result.best.name == "recompute all"
    check(result)


class OutOfMemoryStep(zerofx.Step):
    """A step that has too little memory for plans that keep everything."""

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        if not self.plan.recomputes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return super().measure(*args, num_steps=num_steps, **kwargs)


@pytest.mark.days(3)
def test_a_candidate_without_memory_is_reported_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Step", OutOfMemoryStep)
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        result = tune(model, optimizer)
    check(result)
    assert result.plan.recomputes
    line = "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert result.candidates[0].outcome == line
    assert re.search(rf"^as asked .* {re.escape(line)}$", str(result), flags=re.MULTILINE)


class FailingStep(zerofx.Step):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no luck")


def test_when_all_fail_the_error_says_how_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Step", FailingStep)
    model = noisy()
    with pytest.raises(PlanError, match=r"every candidate failed:(?s:.)*as asked .*RuntimeError: no luck"):
        tune(model, adamw(model))


def test_a_loss_function_of_the_model_is_that_of_the_copy() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

        def loss(self, y: Tensor, x: Tensor) -> Tensor:
            return F.mse_loss(y, x) + self.inner.weight.square().sum()

    model = Own()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        check(tune(model, optimizer, loss_fn=model.loss))


def test_what_cannot_be_copied_is_refused() -> None:
    model = noisy()
    model.lock = threading.Lock()  # type: ignore[assignment]  # a module's attribute, as any user's
    with pytest.raises(UsageError, match=r"copy\.deepcopy can copy.*TypeError: cannot pickle '_thread.lock'"):
        tune(model, adamw(model))
