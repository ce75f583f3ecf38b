"""What a step takes, read from a few of its layers.

It is planned and simulated with a few layers of each row of equal ones (``scheduler/analysis/shallow.py``), and with
one more of each row: as every further layer adds the same, that says what all of them take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Prepared, Request, prepare
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.options import Recompute
from zerofx.runtime.state.optimizer import OptimizerBinding
from zerofx.scheduler.analysis.shallow import KEPT, rows_of, shallow
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.search.mesh_floor import Floor, floor_of
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import Problem
from zerofx.scheduler.search.target import Target

Part = tuple[Captures, tuple[ShardingDecision, ...]]


@dataclass(frozen=True)
class Numbers:
    """What is added up, layer by layer. ``computing``: seconds of the step but for its updates."""

    peak_bytes: float
    step_seconds: float
    exposed_seconds: float
    within: float
    across: float
    computing: float

    def plus(self, times: float, more: Numbers, less: Numbers) -> Numbers:
        """These, and ``times`` by how much ``more`` is more than ``less``."""
        values = zip(astuple(self), astuple(more), astuple(less), strict=True)
        return Numbers(*(own + times * (a - b) for own, a, b in values))


@dataclass(frozen=True)
class Recomputing:
    """A step that keeps all, and the same where all is computed again that can be; ``held_bytes`` are its floor's."""

    keeping: Numbers
    least: Numbers
    held_bytes: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """What a byte costs that is computed again; 0 where that frees none."""
        freed = self.keeping.peak_bytes - self.least.peak_bytes
        return max(self.least.step_seconds - self.keeping.step_seconds, 0.0) / freed if freed > 0 else 0.0

    def within(self, numbers: Numbers, limit: int) -> Numbers:
        """``numbers`` of a step that keeps all, where as much is computed again as ``limit`` asks for."""
        freed = self.keeping.peak_bytes - self.least.peak_bytes
        part = min((numbers.peak_bytes - limit) / freed, 1.0) if freed > 0 else 1.0
        return numbers.plus(max(part, 0.0), self.least, self.keeping)


class ShortSteps:
    """The step of ``request`` with few of its layers, to be simulated on any mesh; ``on_cpu`` as for ``Target``."""

    def __init__(self, request: Request, captures: Captures, *, on_cpu: bool) -> None:
        number = captures.candidates[0]
        step = captures.of_one(number)
        self._rows = rows_of(step)
        short = [shallow(step, self._rows), *(shallow(step, self._rows, row) for row in self._rows)]
        self._captures = [captures.short(number, part) for part in short]
        self._names = [part.by_name() for part in short]
        self._known: OptimizerBinding | None = None
        options, machine = request.options, request.machine
        self._target = Target.of(machine, options, request.settings, step.device, on_cpu=on_cpu, verbose=False)

    def parts(self, shardings: tuple[ShardingDecision, ...]) -> list[Part]:
        """The steps, each with those of ``shardings``, which are about all layers, that it has the nodes of."""
        return [
            (captures, tuple(decision for decision in shardings if decision.node in names))
            for captures, names in zip(self._captures, self._names, strict=True)
        ]

    def numbers(self, request: Request, shared: Sequence[Captures], recompute: Recompute) -> Numbers:
        """What all layers take, without a budget; ``shared``: the steps as one rank of the model axis runs them.

        Raises:
            ZeroFXError: the step cannot run so.
        """
        request = replace(request, options=replace(request.options, memory_budget=None, recompute=recompute))
        short, *longer = [self._simulated(request, captures) for captures in shared]
        whole = short
        for row, more in zip(self._rows, longer, strict=True):
            whole = whole.plus(len(row.repetitions) - KEPT, more, short)
        return whole

    def floor(self, request: Request, shared: Sequence[Captures]) -> Floor:
        """What all layers take at least.

        Raises: as ``numbers``.
        """
        short, *longer = [
            floor_of(self._problem(request, self._prepared(request, captures)), request.mesh) for captures in shared
        ]
        whole = short
        for row, more in zip(self._rows, longer, strict=True):
            whole = whole.plus(len(row.repetitions) - KEPT, more, short)
        return whole

    def _simulated(self, request: Request, captures: Captures) -> Numbers:
        prepared = self._prepared(request, captures)
        problem = self._problem(request, prepared)
        plan = make_plan(problem)
        problem = problem.on(prepared.for_plan(plan), plan.num_micro_batches)
        return _numbers_of(*problem.rehearsal.simulated(plan))

    def _prepared(self, request: Request, captures: Captures) -> Prepared:
        prepared = prepare(request, captures, known=self._known)
        self._known = prepared.binding
        return prepared

    def _problem(self, request: Request, prepared: Prepared) -> Problem:
        return Problem.of(prepared, self._target, request.options, None)


def _numbers_of(step: StepGraph, simulation: Simulation) -> Numbers:
    sent = simulation.node_wire_bytes
    updating = sum(simulation.timings[node].seconds for node in step.calls() if origin(node).phase is Phase.UPDATE)
    return Numbers(
        simulation.live.peaks["device"], simulation.step_seconds, simulation.exposed_seconds, sent[WITHIN],
        sent[ACROSS], simulation.step_seconds - updating,
    )  # fmt: skip
