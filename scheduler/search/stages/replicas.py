"""Updates by replicas: parts of slices each, or whole slices on all, by what exposes less time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Role, placeholder
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_seconds

_NEXT_TO_NOTHING = 1e-3  # of a step: what is exposed less is not worth another search


@dataclass(frozen=True)
class Replicas:
    """States in parts of slices, which take 1 / replicas of what slices take, unless computation waits for the gathers
    of new values that follow, and waits less for those of gradients where every replica updates whole slices."""

    name: str = "replicas"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        is_open = problem.options.states_over == "auto" and problem.variants.may_be_sliced
        if not (is_open and problem.layout.has_parts and problem.options.stage > 0):
            return rest.plan(problem)
        parts = rest.attempt("states in parts of slices", problem)
        seconds, exposed = _seconds(problem, parts)
        reason = "states in parts of slices, one on each replica: "
        if exposed <= _NEXT_TO_NOTHING * seconds:
            return replace(parts, states_reason=f"{reason}gathers of new values are hidden")
        whole = problem.variants.use_whole_slices()
        try:
            other = rest.attempt("states in whole slices", problem.replace_variants(whole, whole.candidates[0]))
        except BudgetMissedError:
            return replace(parts, states_reason=f"{reason}whole slices do not fit the budget")
        others, _ = _seconds(problem.replace_variants(whole, whole.candidates[0]), other)
        if others < seconds:
            saved = f"saves {format_seconds(seconds - others)} a step, in which new values are gathered across replicas"
            return replace(other, states_reason=f"states in slices, which every replica has: it {saved}")
        why = f"of {format_seconds(exposed)} that are exposed for gathers of new values, whole slices save nothing"
        return replace(parts, states_reason=reason + why)


def _seconds(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Seconds of a step with ``plan``, and those in which it waits for parts of slices that replicas have updated."""
    variants = problem.variants.slice_parameters(plan.slices)
    step, simulation = problem.replace_variants(
        variants, plan.num_micro_batches, by_layer=plan.by_layer
    ).rehearsal.simulate(plan)
    rising = [node for node in step.calls() if node.target is ops.all_gather_into and _is_of_part(node)]
    exposed = sum(simulation.timings[wait].exposed_seconds for node in rising for wait in node.users)
    return simulation.step_seconds, exposed


def _is_of_part(gather: fx.Node) -> bool:
    own = gather.args[1]
    return isinstance(own, fx.Node) and own.op == "placeholder" and placeholder(own).role is Role.PART
