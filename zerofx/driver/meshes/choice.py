"""Choose the mesh that a step is fastest on: ``mesh="auto"``.

All ways to lay the ranks out are compared at equal work, by seconds per sample: ranks along ``model`` share one rank's
batch, so a step on a mesh with that axis has fewer samples. The graph is captured once, and each mesh is simulated with
a few of the layers (``zerofx/driver/meshes/estimates.py``), the most promising first: a mesh that cannot fit, or is at
least as slow as another that fits, is skipped. The fastest that fits is planned whole. If the memory budget is below
what it needs, a mesh is planned for these layers within their share of the budget, and a second one, with another
number of ``model`` ranks, is planned whole if it may be faster. So is one without an axis ``pipe`` where the best has
it, and takes longer than was estimated: to have more meshes to choose from makes no choice worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Protocol, TypeVar

from zerofx.driver.captures import Captures
from zerofx.driver.meshes.estimates import Estimates
from zerofx.driver.prepared import Request
from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.garbage import limit_garbage_collection
from zerofx.lowering.lower import LoweredStep
from zerofx.option_checks import options_against_stages, warn_of_ignored_shardings
from zerofx.options import CompileOptions
from zerofx.progress import watch_progress
from zerofx.report.meshes import MeshComparison, MeshOutcome
from zerofx.scheduler.analysis.sharding_pins import pins_of
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_bytes, format_seconds

_NODES_OF_MODEL = 2  # an axis that sends in every layer goes little beyond a node
_MOST_WHOLE = 2  # meshes that are planned whole within a budget, with unlike numbers of ``model`` ranks
_TOO_LONG = 0.1  # of its seconds, that a step within a budget has been estimated at too much
_MOST_REFUSED = 3  # meshes for which no plan is found, until those that need more are not tried any more


class Planned(Protocol):
    """A mesh that was planned whole."""

    @property
    def plan(self) -> Plan: ...
    @property
    def lowered(self) -> LoweredStep: ...


P = TypeVar("P", bound=Planned)


def candidates(num_ranks: int, ranks_per_node: int, stage: int, most_stages: int = 1) -> list[Mesh]:
    """The meshes of so many ranks: ``model`` within a node or a little beyond, all divisions of the other axes.

    At stage 0 nothing is sliced, so ``replicate`` would be another name for ``shard``. With up to ``most_stages`` along
    ``pipe`` the ranks of a stage are slices of one, or replicas, or slices on each node.
    """
    meshes = []
    for pipe in _divisors(num_ranks):
        for model in _divisors(num_ranks // pipe):
            if model > _NODES_OF_MODEL * ranks_per_node or pipe > most_stages:
                continue
            others = num_ranks // pipe // model
            replicas = _divisors(others) if stage > 0 else [1]
            if pipe > 1:
                on_node = max(ranks_per_node // model, 1)
                replicas = [each for each in replicas if each in (1, others) or others // each == on_node]
            meshes += [Mesh(replicate, others // replicate, model, pipe) for replicate in replicas]
    return meshes


def _reason_against_stages(options: CompileOptions) -> str:
    if options.accumulate == "auto":
        return "accumulate='auto': they are compared for a number of micro-batches"
    if isinstance(options.tile, Mapping):
        return f"tile={options.tile!r}: a few layers do not have all that it names"
    return options_against_stages(options)


def choose_mesh(
    request: Request,
    captures: Captures,
    num_ranks: int,
    whole: Callable[[Mesh], P],
    *,
    on_cpu: bool,
    without_stages: str = "",
) -> tuple[P, MeshComparison]:
    """The fastest mesh of ``num_ranks`` ranks that fits, planned by ``whole``, and the comparison of all meshes.

    ``request`` has no mesh yet, ``on_cpu`` as for ``Target``. If none fits and there is no budget, the one that needs
    least is planned. ``without_stages``: why none has an axis ``pipe``, besides what its options say.

    Raises:
        MemoryBudgetError: no mesh has a plan that fits the memory budget.
        UsageError: ``shardings=`` names something that is not in the model.
        ZeroFXError: the step can run on no mesh, or the error of ``whole``.
    """
    shardings = request.options.shardings
    if shardings:  # what names nothing is no trouble of a mesh with an axis ``model``
        pins_of(captures.whole_graph(captures.candidates[0]), shardings)
    with limit_garbage_collection():
        estimates = Estimates(request, captures, num_ranks, on_cpu=on_cpu)
        divided = request.options.accumulate != 1
        without_stages = (without_stages or _reason_against_stages(request.options)) if divided else ""
        most_stages = 1 if without_stages else captures.candidates[0]
        meshes = candidates(num_ranks, request.machine.ranks_per_node, request.options.stage, most_stages)
        planned, comparison = _plan_best(request, _estimate(estimates, meshes), whole)
        comparison = replace(comparison, without_stages=without_stages)
    if shardings:
        warn_of_ignored_shardings(comparison.best.mesh)
    return planned, comparison


def _estimate(estimates: Estimates, meshes: Sequence[Mesh]) -> dict[Mesh, MeshOutcome]:
    """Estimates, or lower bounds, for all ``meshes``; if none fits, the one that needs least is simulated."""
    outcomes: dict[Mesh, MeshOutcome] = {}
    with watch_progress("comparing meshes", "meshes", show=estimates.verbose) as bar:
        for _, alike in groupby(meshes, key=lambda mesh: (mesh.pipe, mesh.model)):
            before = _fastest(outcomes)
            for mesh in sorted(alike, key=lambda mesh: estimates.least_seconds(mesh, before)):
                outcomes[mesh] = estimates.estimate(mesh, _fastest(outcomes))
                bar.update()
        while (first := min(outcomes.values(), key=_order)).is_least and not first.trouble:
            outcomes[first.mesh] = estimates.estimate(first.mesh)
    return outcomes


def _fastest(outcomes: Mapping[Mesh, MeshOutcome]) -> float:
    return min((outcome.seconds_per_sample for outcome in outcomes.values() if outcome.fits), default=math.inf)


def _plan_best(
    request: Request, outcomes: dict[Mesh, MeshOutcome], whole: Callable[[Mesh], P]
) -> tuple[P, MeshComparison]:
    """The best of ``outcomes``, planned by ``whole``."""
    best: tuple[P, MeshOutcome] | None = None
    refusals: list[MemoryBudgetError] = []
    ranked = sorted(outcomes.values(), key=_order)
    within = request.options.memory_budget is not None
    most_whole = _MOST_WHOLE if within else 1
    whole_with = set[tuple[int, bool]]()  # as many model ranks, in stages or not
    for outcome in ranked:
        if outcome.trouble or (len(refusals) >= _MOST_REFUSED and not outcome.fits):
            break
        # Within a budget, and in stages, a few layers do not say all that a plan takes: it may be more than what
        # another is taken for. What meshes with as many model ranks give up is found once, and wrong by as much for
        # all of them.
        in_stages = outcome.mesh.pipe > 1
        if best is not None:
            too_long = _TOO_LONG if within and not in_stages else 0.0
            is_slower = (1.0 - too_long) * outcome.seconds_per_sample >= best[1].seconds_per_sample
            if len(whole_with) >= most_whole or not outcome.fits or is_slower:
                break
            if (outcome.mesh.model, in_stages) in whole_with:
                continue
        try:
            planned = whole(outcome.mesh)
        except MemoryBudgetError as error:
            refusals.append(error)
            outcomes[outcome.mesh] = replace(outcome, trouble="no plan fits")
            continue
        most_whole += in_stages
        whole_with.add((outcome.mesh.model, in_stages))
        now = outcomes[outcome.mesh] = _replace_by_plan(outcome, planned)
        if best is None or _order(now) < _order(best[1]):
            best = planned, now
    if best is None:
        if refusals:
            raise min(refusals, key=lambda error: getattr(error, "least_bytes", math.inf))
        raise UsageError(f"expected a mesh that the step can run on: {ranked[0].trouble}")
    others = sorted((o for o in outcomes.values() if o is not best[1]), key=_order)
    return best[0], MeshComparison((best[1], *others), _reason(best[1], others))


def _order(outcome: MeshOutcome) -> tuple[int, float]:
    """A sort key: the fastest that fits first, then slower ones, then those that need least, then impossible ones."""
    place = ("fits", "slower", "does not fit", "cannot be").index(outcome.verdict)
    return place, float(outcome.peak_bytes) if outcome.verdict == "does not fit" else outcome.seconds_per_sample


def _replace_by_plan(outcome: MeshOutcome, planned: Planned) -> MeshOutcome:
    plan = planned.plan
    return replace(
        outcome, peak_bytes=plan.peak_bytes["device"], step_seconds=plan.step_seconds,
        exposed_seconds=plan.exposed_seconds, wire_bytes=planned.lowered.simulation.node_wire_bytes, is_planned=True,
    )  # fmt: skip


def _reason(best: MeshOutcome, others: Sequence[MeshOutcome]) -> str:
    """The reason for the best mesh: its margin, the cause, and the meshes that would be faster if they fit."""
    if not best.fits:
        return f"{best.mesh}: no mesh fits {format_bytes(best.limit_bytes)}, and this one needs least"
    text = f"{best.mesh}: {format_seconds(best.seconds_per_sample)} a sample"
    fitting = sorted((other for other in others if other.fits), key=lambda outcome: not outcome.is_planned)
    second = next(iter(fitting), None)
    slower = [other for other in others if other.verdict == "slower"]
    if second is None and slower:
        least = min(slower, key=lambda outcome: outcome.seconds_per_sample)
        text += f", where {least.mesh} takes {format_seconds(least.seconds_per_sample)} or longer"
    elif second is None:
        text += ", the only mesh that fits"
    else:
        waits = second.exposed_seconds / second.num_samples - best.exposed_seconds / best.num_samples
        longer = second.seconds_per_sample - best.seconds_per_sample
        does, by = ("waits", waits) if waits >= longer - waits else ("computes", longer - waits)
        if second.is_planned or longer > 0:
            text += f", {longer / second.seconds_per_sample:.1%} less than {second.mesh}"
            text += f", which {does} {format_seconds(by)} a sample longer"
            text += " for communication" if does == "waits" else ""
        else:
            text += f", planned whole; {second.mesh} was estimated at {format_seconds(second.seconds_per_sample)}"
    tempting = [o for o in others if o.verdict == "does not fit" and o.seconds_per_sample < best.seconds_per_sample]
    if tempting:
        fastest = min(tempting, key=lambda outcome: outcome.seconds_per_sample)
        needs = "needs at least" if fastest.is_least else "needs"
        text += f"; {fastest.mesh} {needs} {format_bytes(fastest.peak_bytes)} of {format_bytes(fastest.limit_bytes)}"
    return text


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
