"""Decisions of ``zerofx.tune``: variations of the options, candidate plans, which of them to run, and the best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zerofx.budgets import budget_bytes
from zerofx.codegen.regions import Region
from zerofx.driver.prepared import Prepared, Request
from zerofx.errors import MemoryBudgetError
from zerofx.options import CompileOptions
from zerofx.scheduler.cost.links import Transfer
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem
from zerofx.scheduler.search.rehearsal import Rehearsal
from zerofx.scheduler.search.target import Target
from zerofx.tuning.result import Candidate, candidate_table
from zerofx.units import format_bytes

_PREFETCHES = (0, 2, 4)  # units to gather ahead, besides what was asked for


@dataclass(frozen=True)
class Variation:
    """Options with one strategy. ``searched``: whether the plan is searched within the memory budget; one that is not
    follows the options, and is not run if it does not fit."""

    name: str
    options: CompileOptions
    searched: bool = True


def variations(options: CompileOptions, mesh: Mesh) -> Iterator[Variation]:
    """All variations of the requested options, those first. Several may lead to one plan."""
    yield Variation("as asked", options)
    if options.recompute == "auto":
        yield Variation("recompute nothing", replace(options, recompute="none"))
    if options.recompute != "none":
        yield Variation("recompute all", replace(options, recompute="full"), searched=False)
    if options.offload not in ("auto", "none"):
        yield Variation("offload nothing", replace(options, offload="none"))
    if options.stage < 3 or mesh.num_ranks == mesh.replicate:
        return  # nothing is gathered
    for ahead in _PREFETCHES:
        if ahead != options.prefetch:
            yield Variation(f"prefetch {ahead}", replace(options, prefetch=ahead))
    if options.keep_gathered != "all":
        yield Variation("keep all gathered", replace(options, keep_gathered="all"))
    if options.keep_gathered:
        yield Variation("keep none gathered", replace(options, keep_gathered=()))


@dataclass(frozen=True)
class Planner:
    """Makes candidates for one captured step."""

    prepared: Prepared
    target: Target

    @property
    def budget(self) -> int | None:
        """Bytes on the device."""
        return budget_bytes(self._request.options.memory_budget, self.target.machine)

    @property
    def _request(self) -> Request:
        return self.prepared.request

    def plan(self) -> list[Candidate]:
        """A candidate for each variation; those that do not fit, or repeat another, say so.

        Raises:
            MemoryBudgetError: none of them fits.
        """
        candidates: list[Candidate] = []
        for variation in variations(self._request.options, self._request.mesh):
            candidates.append(self._judge(self._candidate(variation, None), candidates))
        if not any(candidate.is_open for candidate in candidates):
            raise MemoryBudgetError(
                f"expected a plan within memory_budget={format_bytes(self.budget or 0)}, found none:\n"
                f"{candidate_table(candidates)}\nAllow more, or a smaller batch, or let recompute='auto'"
            )
        return candidates

    def correct(
        self,
        candidates: Sequence[Candidate],
        measured: Mapping[str, Sequence[float]],
        regions: Sequence[Region],
        transfers: Mapping[str, Sequence[Transfer]],
    ) -> tuple[MeasuredCosts, list[Candidate]]:
        """Costs from measurements, and the candidates with predictions from them; within a budget also new candidates
        that are made from these costs.

        Args:
            measured: seconds of each distinct region in each candidate that had it, by the region's key.
            regions: all regions that ran.
            transfers: all collectives, and copies between tiers, by stream.
        """
        seconds = {key: statistics.median(spans) for key, spans in measured.items()}
        costs = MeasuredCosts.from_times(seconds, regions, self.target.machine, transfers, self._request.mesh)
        known = list(candidates)
        if self.budget is not None:  # without one, nothing of a plan depends on costs
            for variation in variations(self._request.options, self._request.mesh):
                candidate = self._candidate(variation, costs)
                if candidate.plan is not None and not self._judge(candidate, known).outcome:
                    known.append(replace(candidate, name=f"{candidate.name}, corrected"))
        return costs, [
            replace(candidate, corrected=self._predict(candidate.plan, costs).prediction)
            if candidate.plan
            else candidate
            for candidate in known
        ]

    def _candidate(self, variation: Variation, costs: MeasuredCosts | None) -> Candidate:
        """The plan of a variation, made with ``costs`` if there are any; predicted without them."""
        budget = self.budget if variation.searched else None
        try:
            plan = make_plan(Problem.create(self.prepared, self._target(costs), variation.options, budget))
        except BudgetMissedError as error:
            return Candidate(variation.name, None, f"does not fit: takes at least {format_bytes(error.least_bytes)}")
        return Candidate(variation.name, self._predict(replace(plan, memory_budget=self.budget), None))

    def _predict(self, plan: Plan, costs: MeasuredCosts | None) -> Plan:
        prepared = self.prepared.adapt_to(plan)
        captured = prepared.graph_for(plan)
        rehearsal = Rehearsal(captured, prepared.layout, prepared.programs, self._target(costs))
        return plan.with_prediction(rehearsal.predict(plan))

    def _target(self, costs: MeasuredCosts | None) -> Target:
        return self.target if costs is None else self.target.replace_costs(costs, self._request.mesh)

    def _judge(self, candidate: Candidate, before: Sequence[Candidate]) -> Candidate:
        """The ``candidate`` with the reason not to run it, if there is one."""
        plan = candidate.plan
        if plan is None:
            return candidate
        same = [other.name for other in before if other.plan == plan]
        if same:
            return replace(candidate, outcome=f"the same plan as: {same[0]}")
        over = plan.peak_bytes["device"] - self.budget if self.budget is not None else 0
        return replace(candidate, outcome=f"does not fit: {format_bytes(over)} too much") if over > 0 else candidate


def most_promising(candidates: Sequence[Candidate], number: int) -> list[int]:
    """The candidates to run first: the plan that was asked for, and the fastest of the others as predicted."""
    open_ones = _open(candidates)
    open_ones.sort(key=lambda index: (index > 0, _prediction(candidates[index].plan)[0]))
    return open_ones[:number]


def promises_more(candidates: Sequence[Candidate]) -> int | None:
    """A candidate that has not been run, and that corrected costs put ahead of the best; or that takes the least
    memory, if none that was run fits."""
    open_ones, best = _open(candidates), best_of(candidates)
    if best is None:
        return min(open_ones, key=lambda index: _prediction(candidates[index].plan)[1], default=None)
    first = min(open_ones, key=lambda index: _get_corrected_seconds(candidates[index]), default=None)
    if first is None or _get_corrected_seconds(candidates[first]) >= _get_corrected_seconds(best):
        return None
    return first


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest that was measured and fits."""
    fitting = [candidate for candidate in candidates if candidate.measured is not None and not candidate.outcome]
    return min(
        fitting, key=lambda candidate: candidate.measured.step_seconds if candidate.measured else math.inf, default=None
    )


def conclude(candidate: Candidate, best: Candidate) -> Candidate:
    """The ``candidate`` with its outcome, once the best is known."""
    if candidate.outcome:
        return candidate
    if candidate is best:
        return replace(candidate, outcome="best")
    if candidate.measured is None or best.measured is None:
        return replace(candidate, outcome="not run: predicted to be slower")
    more = candidate.measured.step_seconds / best.measured.step_seconds - 1
    return replace(candidate, outcome=f"{more:.0%} slower")


def _open(candidates: Sequence[Candidate]) -> list[int]:
    return [index for index, candidate in enumerate(candidates) if candidate.is_open]


def _prediction(plan: Plan | None) -> tuple[float, int]:
    """Seconds, and the peak in bytes."""
    assert plan is not None, "an open candidate has a plan"
    return plan.step_seconds, plan.peak_bytes["device"]


def _get_corrected_seconds(candidate: Candidate) -> float:
    return candidate.corrected.step_seconds if candidate.corrected is not None else math.inf
