"""The planner: the stages of its search, one inside the other."""

from __future__ import annotations

from typing import Final

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.stage import Search, Stage, trail
from zerofx.scheduler.search.stages.as_asked import AsAsked
from zerofx.scheduler.search.stages.budgets import HostBudget, LaterUpdates
from zerofx.scheduler.search.stages.cast_gathers import CastGathers
from zerofx.scheduler.search.stages.forward_only import ForwardOnly
from zerofx.scheduler.search.stages.kept import KeptPlans
from zerofx.scheduler.search.stages.micro_batches import MicroBatches
from zerofx.scheduler.search.stages.moves import Moves
from zerofx.scheduler.search.stages.parameter_slices import ParameterSlices
from zerofx.scheduler.search.stages.refine import LeftOver, LowerBound, Wire
from zerofx.scheduler.search.stages.replicas import Replicas
from zerofx.scheduler.search.stages.rungs import Rungs

STAGES: Final[tuple[Stage, ...]] = (
    CastGathers(),  # weights that products read in fp8 gathered so, where computation waits for them
    Replicas(),  # each replica updates a part of its slice, or the whole where computation then waits less for gathers
    ParameterSlices(),  # huge parameters whole, or else in the fewest slices with which a plan fits
    MicroBatches(),  # as many as asked, or those with the fastest plan
    LaterUpdates(),  # a plan that fits in later steps too, whose updates take other bytes
    KeptPlans(),  # what an earlier run has found for the same problem
    Wire(),  # buckets in few bits, where the step is faster with it
    AsAsked(),  # without a budget: no search
    LowerBound(),  # how far from the best the plan may be
    HostBudget(),  # as much on the host as its budget allows
    Rungs(),  # nothing tiled, or else losses, or else chains of operators too
    Moves(),  # what is computed again, offloaded, gathered again, awaited earlier: as little as fits
    LeftOver(),  # what is left of the budget buys overlap
)


# An evaluation, whose parameters and states lie where training has them.
EVALUATION: Final[tuple[Stage, ...]] = (
    KeptPlans(),
    ForwardOnly(),  # as much tiled, and as little gathered ahead, as it takes to fit
    LeftOver(),
)


def make_plan(problem: Problem) -> Plan:
    """Decide: without a budget as the options say, with one the fastest plan that fits.

    With ``ZEROFX_DEBUG=2`` each stage writes what it tried, and why it stopped.

    Raises:
        BudgetMissedError: no plan fits the budget, or none does within the host budget.
        UsageError: ``options.tile`` names what cannot be tiled, or ranks do not fill nodes and ``options.wire`` asks.
    """
    with trail(verbose=problem.target.verbose, debug=problem.target.settings.debug) as log:
        return Search(STAGES if problem.locations is None else EVALUATION, log).plan(problem)
