"""Spend the rest of a budget on time for collectives.

They run next to computation wherever there is room (``scheduler/decide/overlap.py``), and gathers that latency
dominates are merged (``scheduler/decide/coalesce.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerofx.scheduler.decide.coalesce import may_merge, merge_gathers
from zerofx.scheduler.decide.overlap import hide_collectives
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search


@dataclass(frozen=True)
class LeftOver:
    """A plan that fits, made better with what it leaves, and with what it leads to. The last stage."""

    name: str = "left over"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        plan, budget, predicted = problem.plan, problem.memory_budget, problem.rehearsal.predict
        assert plan is not None and budget is not None, "the stage before gives a plan that fits"
        for better in reversed(list(_better(problem, plan, budget))):
            spent = better.with_prediction(predicted(better))
            # What compiled regions hold is estimated, and a collective that moves may change where they are cut.
            if spent.peak_bytes["device"] <= budget:
                rest.say("collectives are moved to where they overlap with computation")
                return spent
        rest.say("the plan stays as it is")
        return plan.with_prediction(predicted(plan))


def _better(problem: Problem, plan: Plan, budget: int) -> Iterator[Plan]:
    """The plans that ``plan`` leads to as far as what is left allows, the best last."""
    layout, rehearsal, prefetch = problem.layout, problem.rehearsal, problem.options.policy.prefetch
    machine = problem.target.machine
    step, simulation = rehearsal.simulate(plan)
    hidden = hide_collectives(plan, step, layout, simulation, prefetch, budget)
    if hidden != plan:
        yield hidden
        step, simulation = rehearsal.simulate(hidden)
    if problem.merges_gathers and may_merge(hidden, layout, machine):
        yield merge_gathers(hidden, step, layout, simulation, machine, budget)
