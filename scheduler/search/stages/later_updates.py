"""A plan under a memory budget that is within it in later steps too.

What an update takes differs from step to step for some optimizers: SGD with momentum copies the first gradients, and
adds later ones to what it has then. A step is planned again where its update changes. That must not be refused for a
budget that the first step was allowed, so later updates are planned for before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search


@dataclass(frozen=True)
class LaterUpdates:
    """A plan that keeps all updates within the budget, or else the coming step's: each has a plan that does.

    Where one of the updates has no plan within the budget, that of the most bytes is refused.
    """

    name: str = "later updates"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        updates = [problem.replace_updates(programs) for programs in problem.variants.updates]
        plans: list[Plan] = []
        refusals: list[BudgetMissedError] = []
        for number, planned in enumerate(updates):
            described = "the coming step's" if number == 0 else f"a later step's ({number} of {len(updates) - 1})"
            try:
                plan = rest.attempt(described, planned)
            except BudgetMissedError as refusal:
                refusals.append(refusal)
                continue
            if all(_is_within(plan, other) for other in updates if other is not planned):
                return plan
            rest.say("the plan does not fit with another step's update")
            plans.append(plan)
        if refusals:
            raise max(refusals, key=lambda refusal: refusal.least_bytes)
        return plans[0]


def _is_within(plan: Plan, problem: Problem) -> bool:
    budget = problem.memory_budget
    return budget is None or problem.rehearsal.predict(plan).peak_bytes["device"] <= budget
