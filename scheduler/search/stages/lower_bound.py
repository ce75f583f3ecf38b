"""Lower bound of step time for plans within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.bound import add_least_seconds
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search


@dataclass(frozen=True)
class LowerBound:
    """The plan of the stages after, with the least time that any plan can take (``scheduler/search/bound.py``)."""

    name: str = "lower bound"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        plan, target = rest.plan(problem), problem.target
        # The bound is on the times of operators one by one, and says nothing of measured ones, or of fused kernels.
        if target.costs is not None or target.fuses:
            return plan
        return add_least_seconds(
            plan, problem.step, problem.layout, target.machine,
            on_cpu=target.on_cpu, by_region=target.compiles_regions,
        )  # fmt: skip
