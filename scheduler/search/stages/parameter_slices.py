"""Parameters in slices: as asked, as a given plan says, as a layout has them, or as a budget needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerofx.errors import OptimizerError
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.options import CompileOptions
from zerofx.scheduler.analysis.slices import Slices, slice_rungs, slices_of_names
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem, needs_least
from zerofx.scheduler.search.stage import Search


def slices_asked(captured: StepGraph, options: CompileOptions) -> Slices:
    """The slices that a given plan has, or that are asked for by name; ``captured`` has whole parameters.

    Raises:
        UsageError: a parameter that is named cannot be worked with in so many slices.
    """
    if isinstance(options.plan, Plan):
        return options.plan.slices
    return slices_of_names(captured, options.tile) if isinstance(options.tile, Mapping) else ()


def slices_of(layout: BucketLayout) -> Slices:
    """The slices that a layout has: every batch shape of a step has the same."""
    counts: dict[str, list[int]] = {}
    for bucket in layout.buckets:
        for slot in bucket.slots:
            if slot.whole is not None:
                counts.setdefault(slot.whole, []).append(slot.numel * bucket.compute_dtype.itemsize)
    return tuple(TileDecision(n, len(sizes), sum(sizes), "as its buckets are") for n, sizes in counts.items())


@dataclass(frozen=True)
class ParameterSlices:
    """Parameters as they are if a plan fits so, else the huge ones in the fewest slices with which one does."""

    name: str = "slices"

    def plan(self, problem: Problem, rest: Search) -> Plan:
        whole, budget = problem.variants, problem.memory_budget
        try:
            return rest.attempt("as asked", problem)
        except BudgetMissedError as missed:
            refusals = [missed]
        if budget is None or not whole.may_be_sliced or problem.options.tile != "auto":
            raise refusals[0]
        for slices in slice_rungs(problem.step, lambda: refusals[0].least_bytes - budget):
            described = ", ".join(f"{decision.value} in {decision.num_tiles}" for decision in slices)
            try:
                sliced = whole.slice_parameters(slices)
                return rest.attempt(described, problem.replace_variants(sliced, sliced.candidates[0]))
            except OptimizerError:  # its update needs the parameter whole
                break
            except BudgetMissedError as missed:
                refusals.append(missed)
        raise needs_least(refusals)
