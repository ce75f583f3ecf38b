"""A budget holds for what compiled regions are found to hold, where plans can be made for less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zerofx
from tests.lib.models import CASES, batches
from tests.lib.runs.training import build
from zerofx.driver import driver
from zerofx.lowering.load import CompiledStep
from zerofx.lowering.load import build as build_step
from zerofx.scheduler.search.problem import BudgetMissedError


def _short_by(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every step that is built hold so many bytes more than was estimated; returns the budgets planned for."""
    planned_for: list[int] = []

    def with_more(*args: Any) -> CompiledStep:
        compiled = build_step(*args)
        planned_for.append(compiled.plan.memory_budget or 0)
        peak_bytes = {**compiled.plan.peak_bytes, "device": compiled.plan.peak_bytes["device"] + num_bytes}
        assert compiled.plan.prediction is not None
        prediction = replace(compiled.plan.prediction, peak_bytes=peak_bytes)
        return replace(compiled, plan=compiled.plan.with_prediction(prediction))

    monkeypatch.setattr(driver, "build", with_more)
    return planned_for


def _step(name: str, budget: int | None) -> zerofx.Step:
    case = CASES[name]
    model = build(case)
    ((args, _),) = batches(case, 0, 1)
    return zerofx.compile(
        model, case.optimizer(model), 0, memory_budget=budget, machine="cpu", backend="eager", example_batch=args
    )


def test_where_estimates_stay_short_plans_are_made_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    free = _step("gpt", None).plan.peak_bytes["device"]
    budget, short = int(0.9 * free), int(0.05 * free)
    planned_for = _short_by(short, monkeypatch)
    step = _step("gpt", budget)
    assert step.plan.peak_bytes["device"] <= budget
    assert planned_for[0] == budget and planned_for[-1] == budget - short


@pytest.mark.slow
def test_where_that_is_less_than_any_plan_needs_the_least_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(zerofx.MemoryBudgetError) as missed:
        _step("stack", 1)
    least = _least_bytes(missed.value)
    budget, short = int(1.2 * least), int(0.4 * least)
    planned_for = _short_by(short, monkeypatch)
    with pytest.raises(zerofx.MemoryBudgetError, match="cannot be met with compiled regions") as missed:
        _step("stack", budget)
    assert planned_for[0] == budget and budget - short < planned_for[-1] <= least
    assert _least_bytes(missed.value) <= planned_for[-1] + short


def _least_bytes(error: Exception) -> int:
    assert isinstance(error, BudgetMissedError)
    return error.least_bytes
