"""Moves: recompute, offload, gather again or await earlier as little as fits the budget.

Where values may be both computed again and offloaded there are three orders of moves: either alone, and for each tensor
the better of both. For each order the shortest length that fits is taken (``search/prefixes.py``), and the fastest of
these plans wins: so the joint plan is never slower, as simulated, than the better of the other two. A smaller budget
never gives a larger peak: where it changes the plan, the plan before it did not fit.

Gathers that are issued later free a whole bucket at once, however little of it is still wanted. Where a plan does so,
its order is searched without such moves too.

A budget that not even all moves of an order come near is out of its reach, which one plan tells: what is held at the
peak then, and is not computed again, is held by every shorter length too (``search/rehearsal.py``).

Where nodes outside layers can be divided into pieces, both are searched, with the division and without: what lies in
one piece can be computed again from less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.items import items_of
from zerofx.scheduler.search.prefixes import Prefixes, least
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes


class OutOfReachError(Exception):
    """No length of any order fits; ``orders`` has what was tried, to find the least possible with."""

    def __init__(self, orders: Sequence[Prefixes]) -> None:
        super().__init__("no length of any order of moves fits")
        self.orders = orders


@dataclass(frozen=True)
class Moves:
    """The fastest of the plans that are the shortest lengths that fit, over all questions and leanings."""

    name: str = "moves"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        """The plan for ``problem.questions``.

        Raises:
            OutOfReachError: no length fits.
        """
        budget = problem.memory_budget
        assert budget is not None, "without a budget nothing is searched"
        orders: list[Prefixes] = []
        fitting: list[Plan] = []
        for order in _orders(problem, rest):
            orders.append(order)
            plan = order.find_plan(budget)
            fitting += [plan] if plan is not None else []
            came_to = "one fits" if plan is not None else f"at least {format_bytes(order.known_bytes)}"
            rest.say(f"{order.name}: {order.num_tried} lengths of {order.num_moves} moves tried, {came_to}")
        if not fitting:
            # What is computed again for few bytes at the end of an order can itself be the peak.
            within_reach = [order for order in orders if order.may_fit(budget)]
            fitting = [plan for num_bytes, plan in least(within_reach, budget) if num_bytes <= budget]
        if not fitting:
            raise OutOfReachError(orders)
        plans = [rest.plan(replace(problem, plan=plan)) for plan in fitting]
        return min(plans, key=lambda plan: plan.step_seconds)


def _orders(problem: Problem, rest: Search) -> Iterator[Prefixes]:
    for question in problem.questions:
        first: Prefixes | None = None
        for leaning in question.leanings:
            rest.trail.describe(leaning)
            items = items_of(question, leaning)
            order = Prefixes(question, leaning, items, problem.rehearsal, first, rest.trail.bar.update)
            first = first or order
            yield order
            staying = order.drop_prefetching()  # by now it is known what fits
            if staying is not None:
                yield staying
