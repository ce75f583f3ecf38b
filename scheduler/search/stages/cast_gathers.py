"""Weights that products read in fp8, gathered so where the step is faster with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zerofx.ir import ops
from zerofx.passes.wire.casts import gathers_of_casts
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.stage import Search
from zerofx.units import format_bytes, format_seconds

_NEXT_TO_NOTHING = 1e-3  # of a step: what is exposed less is not worth another search


@dataclass(frozen=True)
class CastGathers:
    """The plan whose gathers send parameters as they are, unless computation waits for these, and less for casts to
    fp8 of those weights that products read so, in buckets of their own."""

    name: str = "gathers in fp8"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        options, variants = problem.options, problem.variants
        is_open = options.wire == "exact" and options.delayed_update is None and options.stage == 3
        if not (is_open and problem.layout.mesh.num_ranks > 1 and any(each.in_fp8 for each in problem.step.products)):
            return rest.plan(problem)
        exact = rest.attempt("as they are", problem)
        seconds, exposed = _seconds(problem, exact)
        if exposed <= _NEXT_TO_NOTHING * seconds:
            return exact
        apart = variants.put_casts_apart()
        split = replace(problem.replace_variants(apart, apart.candidates[0]), merges_gathers=False)
        try:
            plan = rest.attempt("casts in buckets of their own", split)
        except BudgetMissedError:
            return exact
        low = _cast_all(split, plan)
        _, simulation = _rehearse(split, plan).rehearsal.simulate(low)
        less, budget = simulation.step_seconds, problem.memory_budget
        if not low.has_casts or less >= seconds or (budget is not None and simulation.live.peak_bytes > budget):
            rest.say(f"with casts a step takes {format_seconds(less)}, in place of {format_seconds(seconds)}")
            return exact
        sizes = [split.layout.buckets[gather.bucket] for gather in low.gathers if gather.in_fp8]
        num_bytes = sum(bucket.full_bytes - bucket.numel for bucket in sizes)
        saved = f"{format_seconds(seconds - less)} less for a step, which gathers {format_bytes(num_bytes)} less"
        why = {True: f"; casts to fp8: {saved}", False: ""}
        gathers = tuple(replace(gather, reason=gather.reason + why[gather.in_fp8]) for gather in low.gathers)
        return replace(low, gathers=gathers, prediction=None)


def _seconds(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Seconds of a step with ``plan``, and those in which it waits for parameters."""
    step, simulation = _rehearse(problem, plan).rehearsal.simulate(plan)
    gathers = (node for node in step.calls() if node.target is ops.all_gather)
    exposed = sum(simulation.timings[wait].exposed_seconds for node in gathers for wait in node.users)
    return simulation.step_seconds, exposed


def _cast_all(problem: Problem, plan: Plan) -> Plan:
    """``plan`` with all gathers in fp8 that can be."""
    rehearsed = _rehearse(problem, plan).rehearsal
    kinds = gathers_of_casts(rehearsed.simulate(plan)[0], rehearsed.layout)
    return replace(plan, gathers=tuple(replace(g, in_fp8=n in kinds) for n, g in enumerate(plan.gathers)))


def _rehearse(problem: Problem, plan: Plan) -> Problem:
    variants = problem.variants.slice_parameters(plan.slices)
    return problem.replace_variants(variants, plan.num_micro_batches, by_layer=plan.by_layer)
