"""Plans of evaluations: what is gathered when, and what is tiled. Where parameters and states lie is given.

A forward holds nothing for a backward, so that little is left to decide. Within a budget first nothing is tiled, then
what the rungs of a training step tile too (``decide/tiling.py``), and for each of these gathers and copies are ahead of
their use, or else where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerofx.scheduler.decide.prefetch import place_arrivals
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.tiling import rungs
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.graph_facts import GraphFacts
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes


@dataclass(frozen=True)
class ForwardOnly:
    """The first plan of an evaluation that fits: nothing is tiled, or else what can be; gathers are ahead, or not."""

    name: str = "forward only"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        budget, missed = problem.memory_budget, list[Plan]()
        for plan in _plans(problem):
            if budget is None:
                return plan
            predicted = plan.with_prediction(problem.rehearsal.predict(plan))
            rest.trail.bar.update()
            if predicted.peak_bytes["device"] <= budget:
                return rest.plan(replace(problem, plan=plan))
            missed.append(predicted)
        assert budget is not None, "without a budget the first plan is taken"
        least = min(missed, key=lambda plan: plan.peak_bytes["device"])
        assert least.prediction is not None
        live = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.prediction.peak_live.items())
        num_bytes = least.peak_bytes["device"]
        raise BudgetMissedError(
            f"memory_budget={format_bytes(budget)} cannot be met by this evaluation: the least possible is "
            f"{format_bytes(num_bytes)} ({num_bytes} bytes), at {least.prediction.peak_node}, where these are live: "
            f"{live}. Evaluate fewer samples at a time, or have the forward return less",
            num_bytes,
        )


def _plans(problem: Problem) -> Iterator[Plan]:
    """The plans that there are, the fastest first."""
    may_tile = problem.memory_budget is not None and problem.options.tile != "none"
    ladder = rungs(problem.step, may_tile)
    undecided = problem.undecided()
    for tiles in (tiles for rung in ladder for tiles in rung):
        facts = GraphFacts(problem.step, problem.machine, tiles, target=problem.target)
        for units in range(problem.options.policy.prefetch, -1, -1):
            yield _plan(problem, replace(undecided, tiles=tiles), facts, units)


def _plan(problem: Problem, plan: Plan, facts: GraphFacts, units: int) -> Plan:
    locations = problem.locations
    assert locations is not None, "it is known where an evaluation's parameters lie"
    parameters = tuple(away for away in locations if away.kind == "parameters")
    plan = decide(facts.piece_graph, problem.layout, replace(plan, absences=parameters), PolicyOptions(units))
    plan = place_arrivals(
        plan, facts.piece_graph, problem.layout, {}, facts.run_seconds, problem.machine, ahead=units > 0
    )
    return plan.replace_absences(states=(away for away in locations if away.kind == "states"))
