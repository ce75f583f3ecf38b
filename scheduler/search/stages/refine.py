"""Stages that refine a plan: few bits on the wire, a lower bound of its time, and overlap for memory that is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerofx.scheduler.decide.coalesce import may_merge, merge_gathers
from zerofx.scheduler.decide.overlap import hide_collectives
from zerofx.scheduler.decide.quantised_wire import quantise_wire
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.bound import add_least_seconds
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search


@dataclass(frozen=True)
class Wire:
    """The plan that sends everything as it is, and then the same with buckets in few bits.

    A gather in few bits does not start together with others. Where a search comes to an exact wire after all, it is
    made once more with gathers that may.
    """

    name: str = "wire"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        wire = problem.options.wire
        if wire == "exact":
            return rest.plan(problem)
        exact = rest.attempt("exact", replace(problem, merges_gathers=False))
        rehearsal, budget = problem.rehearsal, problem.memory_budget
        quantised = quantise_wire(exact, problem.layout, problem.target.machine, wire, rehearsal.simulate, budget)
        num_quantised = sum(not decision.is_exact for decision in quantised.wires)
        rest.say(f"{wire} for {num_quantised} of {len(quantised.wires)} buckets")
        if budget is None or num_quantised:
            return quantised
        merged = rest.attempt("exact, with gathers that start together", problem)
        return replace(merged, wire=quantised.wire, ranks_per_node=quantised.ranks_per_node, wires=quantised.wires)


@dataclass(frozen=True)
class LowerBound:
    """The plan of the stages after, with the least time that any plan can take (``scheduler/search/bound.py``)."""

    name: str = "lower bound"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        plan, target = rest.plan(problem), problem.target
        # The bound is on the times of operators one by one, and says nothing of measured ones, or of fused kernels; and
        # it counts all bytes of what is kept.
        if target.costs is not None or target.fuses or plan.saved:
            return plan
        return add_least_seconds(
            plan, problem.step, problem.layout, target.machine,
            on_cpu=target.on_cpu, by_region=target.compiles_regions,
        )  # fmt: skip


@dataclass(frozen=True)
class LeftOver:
    """A plan that fits, made better with what it leaves of the budget, and with what it leads to. The last stage.

    Collectives run next to computation wherever there is room (``scheduler/decide/overlap.py``), and gathers that
    latency dominates are merged (``scheduler/decide/coalesce.py``).
    """

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
