"""What plans for a captured graph lead to: each is carried out on a copy of it, and simulated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from zerofx.codegen.kernels.choose import update_kernels
from zerofx.codegen.kernels.table import UPDATE, kernels_in_use
from zerofx.codegen.regions import Instruction, cut, regions_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.pipeline import run_quietly
from zerofx.scheduler.cost.fusion import estimated_memory
from zerofx.scheduler.cost.liveness import Liveness, MemoryEvent, liveness, with_profiles
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.cost.simulate import Simulation, predict, simulate
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.held import Held, held
from zerofx.settings import Settings

# What compiled regions are estimated to hold, by region key: equal regions hold equal memory.
Estimates = dict[str, tuple[MemoryEvent, ...]]


@dataclass(frozen=True)
class Rehearsal:
    """A captured graph to carry plans out on, copy by copy, and what their outcome is predicted with.

    ``on_cpu``: whether kernels and collectives are those of a CPU, which hold memory of their own. ``fused``: whether
    regions will be compiled, and so hold less inside; what they are estimated to hold is added to ``estimates``.
    ``costs`` are measured costs to go by, which ``machine`` has the links of. ``latest`` is the plan that was simulated
    last, with what it came to: whoever spends what a plan leaves of a budget asks for it twice.
    """

    captured: StepGraph
    layout: BucketLayout
    programs: Mapping[int, UpdateProgram]
    machine: Machine
    settings: Settings
    on_cpu: bool
    fused: bool
    costs: MeasuredCosts | None = None
    estimates: Estimates = field(default_factory=dict)
    latest: list[tuple[Plan, StepGraph, Simulation]] = field(default_factory=list, repr=False, compare=False)

    @property
    def kernels(self) -> frozenset[str]:
        """The kernels of zerofx's own that the step will use."""
        return kernels_in_use(self.settings.kernels, self.captured.device) if self.fused else frozenset()

    def carried_out(self, plan: Plan) -> StepGraph:
        """The captured graph as all passes leave it."""
        step = self.captured.clone()
        run_quietly(step, plan, self.layout, self.programs, self.settings)
        return step

    def simulated(self, plan: Plan) -> tuple[StepGraph, Simulation]:
        """The graph that carries ``plan`` out, and its run on paper."""
        if not self.latest or self.latest[0][0] is not plan:
            step = self.carried_out(plan)
            simulation = simulate_step(
                step, cut(step), self.layout, self.machine, self.on_cpu, self.costs,
                fused=self.fused, estimates=self.estimates, kernels=self.kernels,
            )  # fmt: skip
            self.latest[:] = [(plan, step, simulation)]
        return self.latest[0][1:]

    def predicted(self, plan: Plan) -> Prediction:
        """What ``plan`` leads to."""
        step, simulation = self.simulated(plan)
        return predict(step, plan, self.layout, simulation)

    def held(self, plan: Plan, begun: StepGraph, done: Collection[str]) -> Held:
        """What the device holds when ``plan`` is carried out on ``begun``, which the passes ``done`` have been on."""
        run_quietly(begun, plan, self.layout, self.programs, self.settings, done=done)
        live = liveness(begun, self.on_cpu, fused=self.fused)
        if self.fused:
            live = _live_when_fused(live, begun, cut(begun), self.estimates, self.kernels, on_cpu=self.on_cpu)
        return held(begun, live)

    def host_block_bytes(self, plan: Plan) -> int:
        """What ``plan`` takes of the host, counted in blocks."""
        return liveness(self.carried_out(plan), self.on_cpu).host_block_bytes


def predict_plan(
    captured: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    settings: Settings,
    *,
    on_cpu: bool,
    fused: bool,
    costs: MeasuredCosts | None = None,
) -> Plan:
    """``plan`` with what it leads to on ``machine``, whose links are corrected by ``costs``; see ``Rehearsal``."""
    machine = costs.machine(machine, layout.num_ranks) if costs is not None else machine
    rehearsal = Rehearsal(captured, layout, programs, machine, settings, on_cpu, fused, costs)
    return plan.with_prediction(rehearsal.predicted(plan))


def simulate_step(
    step: StepGraph,
    instructions: tuple[Instruction, ...],
    layout: BucketLayout,
    machine: Machine,
    on_cpu: bool,
    costs: MeasuredCosts | None,
    *,
    fused: bool,
    estimates: Estimates | None,
    kernels: frozenset[str],
) -> Simulation:
    """The run of a step on paper as measured costs, if there are any, and compiled regions make it; see ``Rehearsal``.

    ``instructions`` are those that ``step`` is cut into.
    """
    measured = costs.of_nodes(regions_of(instructions), machine) if costs is not None else None
    simulation = simulate(step, machine, layout.num_ranks, on_cpu=on_cpu, fused=fused, measured=measured)
    if fused:
        known = {} if estimates is None else estimates
        live = _live_when_fused(simulation.live, step, instructions, known, kernels, on_cpu=on_cpu)
        simulation = replace(simulation, live=live)
    return simulation


def _live_when_fused(
    live: Liveness,
    step: StepGraph,
    instructions: tuple[Instruction, ...],
    known: Estimates,
    kernels: frozenset[str],
    *,
    on_cpu: bool,
) -> Liveness:
    """``live`` as it will be with compiled regions, by an estimate; updates run on torch's kernels, or on one of ours,
    which holds nothing.

    ``known`` are the estimates made before, to which those made here are added.
    """
    regions = regions_of(instructions)
    if UPDATE in kernels:
        known |= dict.fromkeys(update_kernels([region for region in regions if region.key not in known]).made, ())
    compiled = [region for region in regions if not region.is_update or region.key in known]
    for region in compiled:
        if region.key not in known:
            known[region.key] = estimated_memory(region, kernels, on_cpu=on_cpu)
    return with_profiles(live, step, [(region, known[region.key]) for region in compiled])
