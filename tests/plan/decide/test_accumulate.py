"""The number of micro-batches: the fastest that fits, with as few plans as that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lib.graphs import prepare
from zerofx.scheduler.plan.decisions import RecomputeDecision
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError
from zerofx.scheduler.search.micro_batches import choose_micro_batches

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 24)


class Planner:
    """Plans that take `shared + divided / number` bytes at least, and `seconds[number]`.

    Values are computed again as long as the number is below `easy`.
    """

    def __init__(self, budget: int, seconds: dict[int, float] | None = None, easy: int = 1000) -> None:
        self.budget, self.seconds, self.easy = budget, seconds or {}, easy
        self.asked: list[int] = []
        self._plan = prepare().plan

    def __call__(self, number: int) -> Plan:
        self.asked.append(number)
        least = 100 + 2400 // number
        if least > self.budget:
            raise BudgetMissedError(f"{number} does not fit", least)
        seconds = self.seconds.get(number, float(number))
        prediction = Prediction({"device": least}, "mm", {}, 0, 0, seconds, 0.0, 0)
        again = (RecomputeDecision("mm", 8, "to fit"),) if number < self.easy else ()
        return replace(self._plan, num_micro_batches=number, recomputes=again, prediction=prediction)

    def choose(self) -> Plan:
        return choose_micro_batches(CANDIDATES, self.budget, self)


def test_a_number_that_was_asked_for_is_taken() -> None:
    planner = Planner(10_000)
    plan = choose_micro_batches((4,), None, planner)
    assert (plan.num_micro_batches, plan.micro_batches_reason, planner.asked) == (4, "as asked", [4])


def test_the_fewest_that_fit_are_taken_where_more_are_slower() -> None:
    planner = Planner(1300)
    plan = planner.choose()
    assert plan.num_micro_batches == 2 and planner.asked == [1, 2, 3]
    assert plan.micro_batches_reason == "the fastest that fits the memory budget; 1 need 2.4 KiB; 3 take 3.00 s"


def test_more_are_taken_where_they_are_faster() -> None:
    planner = Planner(1300, {2: 9.0, 3: 7.0, 4: 5.0, 6: 6.0})
    assert planner.choose().num_micro_batches == 4 and planner.asked == [1, 2, 3, 4, 6]


def test_nothing_more_is_tried_once_nothing_is_given_up() -> None:
    planner = Planner(10_000, easy=1)
    assert planner.choose().num_micro_batches == 1 and planner.asked == [1]


def test_numbers_that_cannot_fit_by_what_others_needed_are_not_tried() -> None:
    planner = Planner(410)  # 8 need 400
    assert planner.choose().num_micro_batches == 8
    assert planner.asked == [1, 2, 3, 8, 12]


def test_where_none_fits_the_least_that_is_possible_is_said() -> None:
    planner = Planner(150)
    with pytest.raises(BudgetMissedError, match="24 does not fit") as refused:
        planner.choose()
    assert refused.value.least_bytes == 200 and planner.asked == [1, 2, 3, 24]
