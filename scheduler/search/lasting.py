"""A plan under a memory budget that is within it in later steps too.

What an update takes differs from step to step for some optimizers: SGD with momentum copies the first gradients, and
adds later ones to what it has then. A step is planned again where its update changes. That must not be refused for a
budget that the first step was allowed, so later updates are planned for before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError
from zerofx.scheduler.search.cache import kept_plan
from zerofx.scheduler.search.evaluate import Estimates, Rehearsal
from zerofx.settings import Settings


def lasting_plan(
    captured: StepGraph,
    layout: BucketLayout,
    updates: Sequence[Mapping[int, UpdateProgram]],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    *,
    on_cpu: bool,
    talk: bool = True,
    estimates: Estimates | None = None,
    found: Estimates | None = None,
) -> Plan:
    """A plan that keeps all ``updates`` within the budget, or else the first one's: each has a plan that does.

    Arguments as for ``kept_plan``, with ``updates`` for its ``programs``: those of the coming step, then what later
    steps have in their place.

    Raises:
        BudgetMissedError: one of the updates has no plan within the budget; that of the most bytes.
        UsageError: as ``kept_plan``.
    """
    fused = options.compiles_regions

    def is_within(plan: Plan, programs: Mapping[int, UpdateProgram]) -> bool:
        known = {} if estimates is None else estimates
        rehearsal = Rehearsal(captured, layout, programs, machine, settings, on_cpu, fused, estimates=known)
        return memory_budget is None or rehearsal.predicted(plan).peak_bytes["device"] <= memory_budget

    plans: list[Plan] = []
    refusals: list[BudgetMissedError] = []
    for programs in updates:
        try:
            plan = kept_plan(
                captured, layout, programs, machine, options, settings, memory_budget,
                on_cpu=on_cpu, talk=talk, estimates=estimates, found=found,
            )  # fmt: skip
        except BudgetMissedError as refusal:
            refusals.append(refusal)
            continue
        if all(is_within(plan, others) for others in updates if others is not programs):
            return plan
        plans.append(plan)
    if refusals:
        raise max(refusals, key=lambda refusal: refusal.least_bytes)
    return plans[0]
