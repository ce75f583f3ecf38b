"""Refusals of a budget, which are explained where somebody asks."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from zerofx.driver.stages import plan_all
from zerofx.scheduler.search.problem import BudgetMissedError, needs_least


def _refusal(text: str, least_bytes: int, asked: list[str]) -> BudgetMissedError:
    def explain() -> BudgetMissedError:
        asked.append(text)
        return BudgetMissedError(text, least_bytes)

    return BudgetMissedError(explain=explain)


def test_a_refusal_is_explained_once_and_where_it_is_asked() -> None:
    asked: list[str] = []
    refusal = _refusal("needs 7 bytes", 7, asked)
    assert asked == []
    assert (refusal.least_bytes, str(refusal), asked) == (7, "needs 7 bytes", ["needs 7 bytes"])


def test_a_refusal_reaches_other_processes_explained() -> None:
    sent = pickle.loads(pickle.dumps(_refusal("needs 7 bytes", 7, [])))
    assert isinstance(sent, BudgetMissedError) and (sent.least_bytes, str(sent)) == (7, "needs 7 bytes")


def test_the_only_refusal_is_chosen_unexplained() -> None:
    asked: list[str] = []
    only = _refusal("first", 9, asked)
    assert needs_least([only]) is only and asked == []
    assert str(needs_least([only, _refusal("second", 8, asked)])) == "second"


def test_stages_after_one_that_does_not_fit_are_planned_for_an_explanation_alone() -> None:
    planned: list[int] = []

    def plan(number: int, least_bytes: int) -> Callable[[], int]:
        def run() -> int:
            planned.append(number)
            if least_bytes:
                raise BudgetMissedError(f"stage {number}", least_bytes)
            return number

        return run

    with pytest.raises(BudgetMissedError) as missed:
        plan_all([plan(0, 0), plan(1, 5), plan(2, 0), plan(3, 6)])
    assert planned == [0, 1]
    assert str(missed.value) == "stage 3; 1 of the other parts cannot meet it either"
    assert planned == [0, 1, 2, 3] and missed.value.least_bytes == 6
