"""Which parameters a step has in slices: as asked, as a given plan says, as a layout has them, or as a budget needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.options import CompileOptions
from zerofx.scheduler.analysis.slices import Slices, named_slices, slice_rungs
from zerofx.scheduler.plan.decisions import SliceDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError

T = TypeVar("T")


def slices_asked(captured: StepGraph, options: CompileOptions) -> Slices:
    """The slices that a given plan has, or that are asked for by name; ``captured`` has whole parameters.

    Raises:
        UsageError: a parameter that is named cannot be worked with in so many slices.
    """
    if isinstance(options.plan, Plan):
        return options.plan.slices
    return named_slices(captured, options.tile) if isinstance(options.tile, Mapping) else ()


def slices_of(layout: BucketLayout) -> Slices:
    """The slices that a layout has: every batch shape of a step has the same."""
    counts: dict[str, list[int]] = {}
    for bucket in layout.buckets:
        for slot in bucket.slots:
            if slot.whole is not None:
                counts.setdefault(slot.whole, []).append(slot.numel * bucket.compute_dtype.itemsize)
    return tuple(SliceDecision(n, len(sizes), sum(sizes), "as its buckets are") for n, sizes in counts.items())


def choose_slices(
    first: T,
    captured: StepGraph,
    budget: int | None,
    sliced: Callable[[Slices], T] | None,
    plan_for: Callable[[T], Plan],
) -> tuple[T, Plan]:
    """What to plan for, and the plan: ``first`` if it fits, else with huge parameters in the fewest slices that do.

    Args:
        first: what was prepared as asked.
        captured: its graph.
        budget: bytes on the device, if there is a budget.
        sliced: prepares the same with parameters in slices; None where they are given.
        plan_for: the plan for what was prepared.

    Raises:
        BudgetMissedError: none fits; that of the least peak.
    """
    try:
        return first, plan_for(first)
    except BudgetMissedError as missed:
        refusals = [missed]
    if budget is None or sliced is None:
        raise refusals[0]
    for slices in slice_rungs(captured, refusals[0].least_bytes - budget):
        other = sliced(slices)
        try:
            return other, plan_for(other)
        except BudgetMissedError as missed:
            refusals.append(missed)
    raise min(refusals, key=lambda missed: missed.least_bytes)
