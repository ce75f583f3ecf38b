"""The number of micro-batches: the fastest that fits, with as few plans as that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tests.lib.graphs import Prepared, prepare, target
from zerofx.ir.graph import StepGraph
from zerofx.options import check_options
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search, trail
from zerofx.scheduler.search.stages.micro_batches import MicroBatches

CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 24)


class Planner:
    """Work whose plans take `shared + divided / number` bytes at least, and `seconds[number]`.

    Values are computed again as long as the number is below `easy`. Layer by layer takes the seconds that are not
    `exposed[number]`.
    """

    name = "made up"

    def __init__(
        self,
        budget: int | None,
        seconds: dict[int, float] | None = None,
        easy: int = 1000,
        exposed: dict[int, float] | None = None,
    ) -> None:
        self.budget, self.seconds, self.easy, self.exposed = budget, seconds or {}, easy, exposed or {}
        self.asked: list[int] = []
        self.by_layer: list[int] = []
        self._prepared = prepare()

    def plan(self, problem: Problem, rest: Search) -> Plan:
        number = problem.step.num_micro_batches
        (self.by_layer if problem.step.by_layer else self.asked).append(number)
        least = 100 + 2400 // number
        if self.budget is not None and least > self.budget:
            raise BudgetMissedError(f"{number} does not fit", least)
        seconds = self.seconds.get(number, float(number))
        exposed = self.exposed.get(number, 0.0)
        if problem.step.by_layer:
            seconds, exposed = seconds - exposed, 0.0
        prediction = Prediction({"device": least}, "mm", {}, 0, 0, seconds, exposed, 0)
        again = (Absence(kind="recomputes", value="mm", num_bytes=8, reason="to fit"),) if number < self.easy else ()
        plan = replace(self._prepared.plan, num_micro_batches=number, by_layer=problem.step.by_layer)
        return plan.replace_absences(recomputes=again).with_prediction(prediction)

    def choose(self, *candidates: int) -> Plan:
        work = InMicroBatches(**vars(self._prepared), numbers=candidates or CANDIDATES)
        with trail(verbose=False, debug=0) as silent:
            problem = Problem.create(work, target(Machine.named("cpu")), check_options(stage=3), self.budget)
            return Search((MicroBatches(), self), silent).plan(problem)


@dataclass
class InMicroBatches(Prepared):
    """A graph that says to have as many micro-batches as are asked for."""

    numbers: Sequence[int] = ()

    @property
    def candidates(self) -> Sequence[int]:
        return self.numbers

    def graph(self, num_micro_batches: int, *, by_layer: bool = False) -> StepGraph:
        step = self.step.clone()
        step.num_micro_batches, step.by_layer = num_micro_batches, by_layer
        return step


def test_a_number_that_was_asked_for_is_taken() -> None:
    planner = Planner(None)
    plan = planner.choose(4)
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


def test_where_computation_waits_micro_batches_run_layer_by_layer() -> None:
    planner = Planner(1300, {2: 9.0, 3: 9.5}, exposed={2: 4.0})
    plan = planner.choose()
    assert (plan.num_micro_batches, plan.by_layer, plan.step_seconds) == (2, True, 5.0)
    assert "layer by layer, 5.00 s rather than 9.00 s" in plan.micro_batches_reason


def test_where_nothing_waits_the_other_order_is_not_tried() -> None:
    planner = Planner(1300)
    planner.choose()
    assert 2 in planner.asked and 2 not in planner.by_layer
