"""Estimate a step from a few of its layers.

It is planned and simulated with a few layers of each row of equal ones (``scheduler/analysis/shallow.py``), and with
one more of each row: every further layer adds the same, which gives the total of all layers. If that exceeds a memory
budget, the few layers, and twice as many, are planned within their share of it: each saves as much as each of all
layers has to, in any way that a search finds. The cost for the additional layers is taken for all others: around the
end of forward it is higher, but that part occurs once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Generic, TypeVar

from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Prepared, Request, prepare
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.scheduler.analysis.shallow import KEPT, rows_of, shallow
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.cost.transfers import CollectiveKind
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN, seconds_along
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.mesh import Axes, Mesh
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem

_FURTHER = 1.1  # than what layers have given up, that more are taken to give up at the same price

T = TypeVar("T")
S = TypeVar("S")
ShortPart = tuple[Captures, tuple[ShardingDecision, ...]]


@dataclass(frozen=True)
class Short(Generic[T]):
    """A value for each short step: of ``few`` layers, of one more of each row, and of ``twice`` as many as the few.

    ``twice`` is None if no memory has to be saved.
    """

    few: T
    longer: tuple[T, ...]
    twice: T | None

    def each(self, change: Callable[[T], S]) -> Short[S]:
        """The results of ``change`` on each."""
        twice = None if self.twice is None else change(self.twice)
        return Short(change(self.few), tuple(change(longer) for longer in self.longer), twice)


@dataclass(frozen=True)
class StepTotals:
    """Quantities that add up over layers. ``computing``: seconds of the step without its updates."""

    peak_bytes: float
    step_seconds: float
    exposed_seconds: float
    within: float
    across: float
    computing: float

    def plus(self, times: float, more: StepTotals, less: StepTotals) -> StepTotals:
        """These totals plus ``times`` the difference between ``more`` and ``less``."""
        values = zip(astuple(self), astuple(more), astuple(less), strict=True)
        return StepTotals(*(own + times * (a - b) for own, a, b in values))


@dataclass(frozen=True)
class Unlimited:
    """The totals of all layers without a memory limit, and those of the few layers they follow from.

    ``more`` are the totals of twice the few layers. ``times`` and ``more_times`` say how often the layers of ``few``
    are in ``all`` and in ``more``, by their bytes: of a row of 24 layers, 4 of them in ``few``, 6 times and twice.
    """

    all: StepTotals
    few: StepTotals
    more: StepTotals
    times: float
    more_times: float


@dataclass(frozen=True)
class Savings:
    """The totals of a step that keeps all, and with each layer saving as much as a few of them had to for a budget.

    Steps that take more bytes than ``least`` and fewer than ``keeping`` are on the line between these: to free half of
    ``bytes_freed`` costs half of ``least.step_seconds - keeping.step_seconds``.

    ``is_refused``: whether that is the maximum, and was not enough.
    """

    keeping: StepTotals
    least: StepTotals
    is_refused: bool

    @property
    def bytes_freed(self) -> float:
        """The bytes saved."""
        return self.keeping.peak_bytes - self.least.peak_bytes

    @property
    def seconds_per_byte(self) -> float:
        """The cost of a saved byte; 0 if there are none."""
        longer = max(self.least.step_seconds - self.keeping.step_seconds, 0.0)
        return longer / self.bytes_freed if self.bytes_freed > 0 else 0.0

    def reaches(self, numbers: StepTotals, limit: int) -> bool:
        """True if these savings determine the totals within ``limit`` of a step that takes ``numbers`` otherwise."""
        return not self.is_refused and numbers.peak_bytes - limit <= _FURTHER * self.bytes_freed

    def apply(self, numbers: StepTotals, limit: int) -> StepTotals:
        """The totals within ``limit`` of a step that takes ``numbers`` when it keeps all."""
        freed, most = self.bytes_freed, 1.0 if self.is_refused else _FURTHER
        part = min((numbers.peak_bytes - limit) / freed, most) if freed > 0 else 1.0
        return numbers.plus(max(part, 0.0), self.least, self.keeping)


class ShortSteps:
    """The step of ``request`` with few of its layers, to be simulated on any mesh; ``on_cpu`` as for ``Target``."""

    def __init__(self, request: Request, captures: Captures, *, on_cpu: bool) -> None:
        number = captures.candidates[0]
        step = captures.whole_graph(number)
        self.rows = rows_of(step)
        gives_up = self.rows and request.options.memory_budget is not None
        self._short = Short(
            shallow(step, self.rows),
            tuple(shallow(step, self.rows, row) for row in self.rows),
            shallow(step, self.rows, remaining=2 * KEPT) if gives_up else None,
        ).each(lambda part: (captures.short(number, part), part.nodes_by_name()))
        self._known: OptimizerBinding | None = None
        self._target = request.target(step.device, on_cpu=on_cpu, verbose=False)

    def parts(self, shardings: tuple[ShardingDecision, ...]) -> Short[ShortPart]:
        """The short steps, each with those of ``shardings``, which are for all layers, whose nodes it has."""
        return self._short.each(
            lambda short: (short[0], tuple(decision for decision in shardings if decision.node in short[1]))
        )

    def simulate_unlimited(self, request: Request, shared: Short[Captures]) -> Unlimited:
        """The totals of all layers without a budget; ``shared``: the steps as one rank of the model axis runs them.

        Raises:
            ZeroFXError: the step cannot run so.
        """
        short = self._simulate(request, shared.few, None)
        longer = [self._simulate(request, captures, None) for captures in shared.longer]
        every = few = more = short
        for row, one_more in zip(self.rows, longer, strict=True):
            further = len(row.repetitions) - KEPT
            every = every.plus(further, one_more, short)
            more = more.plus(min(further, KEPT), one_more, short)
            few = few.plus(KEPT, one_more, short)

        def times(numbers: StepTotals) -> float:
            grown = few.peak_bytes - short.peak_bytes
            return 1.0 + (numbers.peak_bytes - short.peak_bytes) / grown if grown > 0 else 1.0

        return Unlimited(every, short, more, times(every), times(more))

    def find_savings(self, request: Request, shared: Short[Captures], keeping: Unlimited, limit: int) -> Savings:
        """The savings of all layers within ``limit`` bytes, which are fewer than those of ``keeping``.

        Raises: as ``keeping``.
        """
        per_few = (keeping.all.peak_bytes - limit) / keeping.times
        least, is_refused = self._fit(request, shared.few, keeping.few, per_few)
        if is_refused:
            return Savings(keeping.all, keeping.all.plus(keeping.times, least, keeping.few), is_refused)
        every = keeping.all.plus(1.0, least, keeping.few)
        if keeping.more_times > 1.0:
            assert shared.twice is not None, "something is given up"
            further, is_refused = self._fit(request, shared.twice, keeping.more, keeping.more_times * per_few)
            times = (keeping.times - 1.0) / (keeping.more_times - 1.0)
            every = every.plus(times, further, keeping.more).plus(times, keeping.few, least)
        # Extrapolated from two searches, which give up whole layers' values: less than nothing is none.
        every = replace(
            every, step_seconds=max(every.step_seconds, keeping.all.step_seconds),
            computing=max(every.computing, keeping.all.computing),
        )  # fmt: skip
        return Savings(keeping.all, every, is_refused)

    def _fit(
        self, request: Request, captures: Captures, keeping: StepTotals, freed_bytes: float
    ) -> tuple[StepTotals, bool]:
        """The totals of the layers of ``captures``, ``keeping`` otherwise, with so many bytes freed; and whether that
        is impossible: then with the least bytes possible."""
        budget = math.floor(keeping.peak_bytes - freed_bytes)
        try:
            return self._simulate(request, captures, budget), False
        except BudgetMissedError as missed:
            return replace(keeping, peak_bytes=min(max(missed.least_bytes, budget + 1), keeping.peak_bytes)), True

    def floor(self, request: Request, shared: Short[Captures]) -> Floor:
        """A lower bound of the totals of all layers.

        Raises: as ``keeping``.
        """

        def compute(captures: Captures) -> Floor:
            return floor_of(self._problem(request, self._prepare(request, captures)), request.mesh)

        whole = short = compute(shared.few)
        for row, captures in zip(self.rows, shared.longer, strict=True):
            whole = whole.plus(len(row.repetitions) - KEPT, compute(captures), short)
        return whole

    def _simulate(self, request: Request, captures: Captures, budget: int | None) -> StepTotals:
        return _numbers_of(*self.simulate(request, captures, budget))

    def simulate(self, request: Request, captures: Captures, budget: int | None) -> tuple[StepGraph, Simulation]:
        """A short step, or a stage of one, planned within ``budget`` bytes if given, and its simulation.

        Raises:
            BudgetMissedError: no plan takes ``budget`` bytes.
            ZeroFXError: the step cannot run so.
        """
        if budget is not None and budget <= 0:
            raise BudgetMissedError("a few layers have no share of the budget", 1)
        request = replace(request, options=replace(request.options, memory_budget=budget))
        prepared = self._prepare(request, captures)
        problem = self._problem(request, prepared, budget)
        plan = make_plan(problem)
        problem = problem.replace_variants(prepared.adapt_to(plan), plan.num_micro_batches, by_layer=plan.by_layer)
        return problem.rehearsal.simulate(plan)

    def _prepare(self, request: Request, captures: Captures) -> Prepared:
        prepared = prepare(request, captures, known=self._known)
        self._known = prepared.binding
        return prepared

    def _problem(self, request: Request, prepared: Prepared, budget: int | None = None) -> Problem:
        return Problem.create(prepared, self._target, request.options, budget)


def _numbers_of(step: StepGraph, simulation: Simulation) -> StepTotals:
    sent = simulation.node_wire_bytes
    updating = sum(simulation.timings[node].seconds for node in step.calls() if origin(node).phase is Phase.UPDATE)
    return StepTotals(
        simulation.live.peaks["device"], simulation.step_seconds, simulation.exposed_seconds, sent[WITHIN],
        sent[ACROSS], simulation.step_seconds - updating,
    )  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """``held_bytes``: slices of parameters, states and masters of a rank, which stay on the device from step to step.
    ``link_seconds``: those of collectives on buckets, by the axes that they run over."""

    held_bytes: float
    link_seconds: Mapping[Axes, float]

    @property
    def busy_seconds(self) -> float:
        """Of the link that is busy for longest."""
        return max(self.link_seconds.values(), default=0.0)

    def plus(self, times: float, more: Floor, less: Floor) -> Floor:
        """This, and ``times`` by how much ``more`` is more than ``less``, which are about the same axes."""
        seconds = {
            axes: own + times * (more.link_seconds[axes] - less.link_seconds[axes])
            for axes, own in self.link_seconds.items()
        }
        return Floor(self.held_bytes + times * (more.held_bytes - less.held_bytes), seconds)


def floor_of(problem: Problem, mesh: Mesh) -> Floor:
    """Least bytes held, and seconds on links, of the ranks of ``mesh``: each bucket is gathered and reduced once."""
    stage, machine = problem.options.stage, problem.machine
    held, seconds = 0, dict[Axes, float]()

    def add(axes: Axes, kind: CollectiveKind, num_bytes: int) -> None:
        along = mesh.axes_in_use(axes)
        if along:
            seconds[along] = seconds.get(along, 0.0) + seconds_along(kind, num_bytes, mesh, along, machine)

    for bucket in problem.layout.buckets:
        gathered = bucket.is_gathered(stage)
        held += bucket.shard_bytes if gathered else bucket.full_bytes
        if gathered:
            add(bucket.gathered_over, "all_gather", bucket.full_bytes)
        if bucket.trainable:
            add(bucket.reduction_axes, "reduce_scatter", bucket.gradient_bytes)
            if bucket.crosses:
                add(bucket.crossed_over, "reduce_scatter", bucket.gradient_slice_bytes)
    if problem.options.delayed_update is None:  # else they are on the host
        held += sum(problem.state_bytes().values())
    return Floor(held, seconds)
