"""Which mesh a step is fastest on: ``mesh="auto"``.

All ways to lay the ranks out are compared at equal work, by seconds a sample: ranks along ``model`` share the batch of
one, so that a step on a mesh with that axis is one of fewer samples. The graph is captured once. How the computation is
shared is decided once for each number of ranks that share it. Every mesh is then planned and simulated for a few of the
layers (``scheduler/analysis/shallow.py``), which says what all of them take; the mesh that is fastest so, of those that
fit, is planned whole. Where a memory budget asks for more than that, what a mesh needs is read off between a plan that
keeps all and one that computes all it can again, and the fastest few are planned whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Protocol, TypeVar

from zerofx.budgets import budget_bytes
from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Request, prepare
from zerofx.driver.sharing import shardings_of, shared_as
from zerofx.errors import MemoryBudgetError, UsageError, ZeroFXError
from zerofx.lowering.lower import LoweredStep
from zerofx.options import Recompute
from zerofx.progress import watched
from zerofx.report.meshes import MeshComparison, MeshOutcome
from zerofx.scheduler.analysis.shallow import KEPT, rows_of, shallow
from zerofx.scheduler.cost.liveness import MemoryEvent
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.target import Target
from zerofx.units import format_bytes, format_seconds

_NODES_OF_MODEL = 2  # an axis that sends in every layer goes little beyond a node
_MOST_WHOLE = 3  # meshes that are planned whole within a budget


class Planned(Protocol):
    """A mesh that was planned whole."""

    @property
    def plan(self) -> Plan: ...
    @property
    def lowered(self) -> LoweredStep: ...
    @property
    def fits(self) -> bool: ...


P = TypeVar("P", bound=Planned)


def candidates(num_ranks: int, ranks_per_node: int, stage: int) -> list[Mesh]:
    """The meshes of so many ranks: ``model`` on a node or a little beyond, all divisions of the others.

    At stage 0 nothing is sliced, so that ``replicate`` would be another name for ``shard``.
    """
    meshes = []
    for model in _divisors(num_ranks):
        if model <= _NODES_OF_MODEL * ranks_per_node:
            others = num_ranks // model
            replicas = _divisors(others) if stage > 0 else [1]
            meshes += [Mesh(replicate, others // replicate, model) for replicate in replicas]
    return meshes


def choose_mesh(
    request: Request, captures: Captures, num_ranks: int, whole: Callable[[Mesh], P], *, on_cpu: bool
) -> tuple[P, MeshComparison]:
    """The fastest mesh of ``num_ranks`` ranks that fits, as ``whole`` plans it, and all that were compared.

    ``request`` is for any mesh, ``on_cpu`` as for ``Target``. Where none fits and there is no budget, the one that
    needs least is planned.

    Raises:
        MemoryBudgetError: no mesh has a plan that fits the memory budget.
        ZeroFXError: the step can run on no mesh, or as ``whole``.
    """
    meshes = candidates(num_ranks, request.machine.ranks_per_node, request.options.stage)
    estimates = _Estimates(request, captures, num_ranks, on_cpu=on_cpu)
    outcomes: dict[Mesh, MeshOutcome] = {}
    with watched("comparing meshes", "meshes", show=request.verbose) as bar:
        for mesh in meshes:
            outcomes[mesh] = estimates.of(mesh)
            bar.update()
    best: tuple[P, MeshOutcome] | None = None
    refusal: ZeroFXError = UsageError(f"expected a mesh that the step can run on: {outcomes[meshes[0]].trouble}")
    for number, outcome in enumerate(sorted(outcomes.values(), key=_order)):
        # Within a budget an estimate may be of more than what a plan takes: it says whom to plan first, and no more.
        enough = number >= (_MOST_WHOLE if request.options.memory_budget is not None else 1)
        if outcome.trouble or (best is not None and enough):
            break
        try:
            planned = whole(outcome.mesh)
        except MemoryBudgetError as error:
            refusal = error
            outcomes[outcome.mesh] = replace(outcome, trouble="no plan fits")
            continue
        now = outcomes[outcome.mesh] = _as_planned(outcome, planned)
        if best is None or _order(now) < _order(best[1]):
            best = planned, now
    if best is None:
        raise refusal
    others = sorted((o for o in outcomes.values() if o is not best[1]), key=_order)
    return best[0], MeshComparison((best[1], *others), _reason(best[1], others))


def _order(outcome: MeshOutcome) -> tuple[bool, bool, float]:
    """The fastest that fits first, then what needs least, then what cannot be."""
    measure = outcome.seconds_per_sample if outcome.fits else float(outcome.peak_bytes)
    return bool(outcome.trouble), not outcome.fits, measure


def _as_planned(outcome: MeshOutcome, planned: Planned) -> MeshOutcome:
    plan = planned.plan
    return replace(
        outcome, peak_bytes=plan.peak_bytes["device"], step_seconds=plan.step_seconds,
        exposed_seconds=plan.exposed_seconds, wire_bytes=planned.lowered.simulation.node_wire_bytes, is_planned=True,
    )  # fmt: skip


def _reason(best: MeshOutcome, others: Sequence[MeshOutcome]) -> str:
    """Why the best is: by how much, because of what, and what would be faster if it fit."""
    if not best.fits:
        return f"{best.mesh}: no mesh fits {format_bytes(best.limit_bytes)}, and this one needs least"
    text = f"{best.mesh}: {format_seconds(best.seconds_per_sample)} a sample"
    fitting = sorted((other for other in others if other.fits), key=lambda outcome: not outcome.is_planned)
    second = next(iter(fitting), None)
    if second is None:
        text += ", the only mesh that fits"
    else:
        waits = second.exposed_seconds / second.num_samples - best.exposed_seconds / best.num_samples
        longer = second.seconds_per_sample - best.seconds_per_sample
        does, by = ("waits", waits) if waits >= longer - waits else ("computes", longer - waits)
        less = longer / second.seconds_per_sample
        text += f", {less:.1%} less than {second.mesh}"
        text += f", which {does} {format_seconds(by)} a sample longer" + (
            " for communication" if does == "waits" else ""
        )
    tempting = [o for o in others if not o.trouble and not o.fits and o.seconds_per_sample < best.seconds_per_sample]
    if tempting:
        fastest = min(tempting, key=lambda outcome: outcome.seconds_per_sample)
        text += f"; {fastest.mesh} needs {format_bytes(fastest.peak_bytes)} of {format_bytes(fastest.limit_bytes)}"
    return text


@dataclass(frozen=True)
class _Numbers:
    """What is added up, layer by layer."""

    peak_bytes: float
    step_seconds: float
    exposed_seconds: float
    within: float
    across: float

    def plus(self, times: float, more: _Numbers, less: _Numbers) -> _Numbers:
        """These, and ``times`` by how much ``more`` is more than ``less``."""
        values = zip(astuple(self), astuple(more), astuple(less), strict=True)
        return _Numbers(*(own + times * (a - b) for own, a, b in values))


class _Estimates:
    """What meshes make of a step, read from a few of its layers."""

    def __init__(self, request: Request, captures: Captures, num_ranks: int, *, on_cpu: bool) -> None:
        self._request, self._captures, self._num_ranks, self._on_cpu = request, captures, num_ranks, on_cpu
        self._micro_batches = captures.candidates[0]
        step = captures.of_one(self._micro_batches)
        self._rows = rows_of(step)
        self._steps = [shallow(step, self._rows), *(shallow(step, self._rows, row) for row in self._rows)]
        self._names = [step.by_name() for step in self._steps]
        self._shared: dict[int, list[Captures] | ZeroFXError] = {}
        self._memory: dict[str, tuple[MemoryEvent, ...]] = {}

    def of(self, mesh: Mesh) -> MeshOutcome:
        """What a step on ``mesh`` takes, or why it cannot run there."""
        options, machine = self._request.options, self._request.machine.for_ranks(mesh.num_ranks)
        budget = budget_bytes(options.memory_budget, machine)
        limit = machine.device.memory_bytes if budget is None else budget
        outcome = MeshOutcome(mesh, captured_samples(self._request) * mesh.num_ranks // mesh.model, limit_bytes=limit)
        request = replace(self._request, mesh=mesh, machine=machine, verbose=False)
        try:
            captures = self._captures_of(request)
            numbers = self._numbers(request, captures, "none" if options.recompute == "auto" else options.recompute)
            if numbers.peak_bytes > limit and budget is not None and options.recompute == "auto":
                least = self._numbers(request, captures, "full")
                freed = numbers.peak_bytes - least.peak_bytes
                part = min((numbers.peak_bytes - limit) / freed, 1.0) if freed > 0 else 1.0
                numbers = numbers.plus(part, least, numbers)
        except ZeroFXError as error:
            return replace(outcome, trouble=str(error))
        return replace(
            outcome, peak_bytes=round(numbers.peak_bytes), step_seconds=numbers.step_seconds,
            exposed_seconds=numbers.exposed_seconds,
            wire_bytes={WITHIN: round(numbers.within), ACROSS: round(numbers.across)},
        )  # fmt: skip

    def _captures_of(self, request: Request) -> list[Captures]:
        """The short steps as one rank of the model axis runs them: the same for all meshes with as many there."""
        model = request.mesh.model
        if model not in self._shared:
            try:
                shardings = shardings_of(request, self._captures)
                short = [self._captures.short(self._micro_batches, step) for step in self._steps]
                self._shared[model] = [
                    shared_as(request, part, tuple(decision for decision in shardings if decision.node in names))
                    for part, names in zip(short, self._names, strict=True)
                ]
            except ZeroFXError as error:
                self._shared[model] = error
        shared = self._shared[model]
        if isinstance(shared, ZeroFXError):
            raise shared
        return shared

    def _numbers(self, request: Request, captures: Sequence[Captures], recompute: Recompute) -> _Numbers:
        options = replace(request.options, memory_budget=None, recompute=recompute)
        short, *longer = [self._simulated(replace(request, options=options), part) for part in captures]
        whole = short
        for row, more in zip(self._rows, longer, strict=True):
            whole = whole.plus(len(row.repetitions) - KEPT, more, short)
        return whole

    def _simulated(self, request: Request, captures: Captures) -> _Numbers:
        prepared = prepare(request, captures)
        device = prepared.captured.device
        target = Target.of(
            request.machine, request.options, request.settings, device, on_cpu=self._on_cpu, verbose=False
        )
        target = replace(target, estimates=self._memory)
        plan = make_plan(Problem.of(prepared, target, request.options, None))
        problem = Problem.of(prepared.for_plan(plan), target, request.options, None)
        _, simulation = problem.rehearsal.simulated(plan)
        sent = simulation.node_wire_bytes
        return _Numbers(
            simulation.live.peaks["device"], simulation.step_seconds, simulation.exposed_seconds, sent[WITHIN],
            sent[ACROSS],
        )  # fmt: skip


def captured_samples(request: Request) -> int:
    """Samples of the batch that a rank is given; 1 where it has none that could be counted."""
    try:
        return request.batch.size()
    except UsageError:
        return 1


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
