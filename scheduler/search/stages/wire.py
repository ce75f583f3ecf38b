"""Buckets in few bits, as far as the user allows it and that makes the step faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofx.scheduler.decide.quantised_wire import quantise_wire
from zerofx.scheduler.plan.plan import Plan
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
