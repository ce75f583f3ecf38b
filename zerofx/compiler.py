"""From a captured graph and a plan to a step that runs: passes, simulation, emitted source, compiled regions."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerofx.buckets import BucketLayout
from zerofx.checks import names
from zerofx.codegen.emit import EmittedStep, emit
from zerofx.codegen.helpers import Helpers, Task, num_helpers
from zerofx.codegen.regions import Instruction, Region, cut
from zerofx.errors import PlanError, UsageError
from zerofx.graph import StepGraph, value
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions, tiers_for
from zerofx.pipeline import Stage, run_passes, run_quietly
from zerofx.progress import watched
from zerofx.report.units import format_bytes, format_seconds, on_tiers
from zerofx.runtime.control import WORK_SECONDS, Control
from zerofx.runtime.executor import StepFunction, load_source
from zerofx.scheduler.bound import with_least_seconds
from zerofx.scheduler.budget import fit, least_memory
from zerofx.scheduler.fusion import estimated_memory
from zerofx.scheduler.host_budget import fit_host
from zerofx.scheduler.items import Captured, Leaning, Question
from zerofx.scheduler.liveness import Liveness, MemoryEvent, liveness, with_profiles
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.measured import MeasuredCosts
from zerofx.scheduler.merging import may_merge, merge_gathers
from zerofx.scheduler.plan import Plan
from zerofx.scheduler.plan_facts import Prediction
from zerofx.scheduler.policy import decide
from zerofx.scheduler.simulate import Simulation, predict, simulate
from zerofx.scheduler.states import decisions_of, delayed_placements
from zerofx.scheduler.tiling import named_tiles
from zerofx.scheduler.wire import with_wire
from zerofx.settings import Settings

if TYPE_CHECKING:
    from zerofx.codegen.inductor import CompiledRegion


# What compiled regions are estimated to hold, by region key: equal regions hold equal memory.
Estimates = dict[str, tuple[MemoryEvent, ...]]


@dataclass(frozen=True)
class LoweredStep:
    """One step for one batch shape on one rank, as a graph and as source: all that can be known without running it."""

    graph: StepGraph
    plan: Plan
    instructions: tuple[Instruction, ...]
    simulation: Simulation
    stages: tuple[Stage, ...]
    emitted: EmittedStep

    @property
    def num_regions(self) -> int:
        """Regions that the step runs."""
        return len(regions_of(self.instructions))

    @property
    def num_distinct_regions(self) -> int:
        """Regions of different structure: what has to be compiled."""
        return len(self.emitted.functions)


@dataclass(frozen=True)
class CompiledStep(LoweredStep):
    """A lowered step that can be run, and where its source was written."""

    source_path: Path
    function: StepFunction


def lower(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    settings: Settings,
    *,
    on_cpu: bool,
    talk: bool,
    fused: bool = False,
    costs: MeasuredCosts | None = None,
    estimates: Estimates | None = None,
) -> LoweredStep:
    """Carry out ``plan`` on a captured graph, which is edited in place, and predict the outcome on ``machine``.

    ``on_cpu``: whether kernels and collectives are those of a CPU, which hold memory of their own. ``fused``: whether
    regions will be compiled, and so hold less inside. ``costs`` are measured costs to go by. ``estimates`` are those of
    ``make_plan``.
    """
    machine = costs.machine(machine, layout.num_ranks) if costs is not None else machine
    with watched("carrying out the plan", show=talk):
        stages = run_passes(step, plan, layout, programs, settings, on_cpu=on_cpu, talk=talk)
        instructions = cut(step)
        simulation = _simulate(
            step, layout, machine, on_cpu, costs, fused=fused, estimates=estimates, instructions=instructions
        )
        if plan.machine != machine.name:
            plan = replace(plan, prediction=None)  # what was predicted for another machine bounds nothing here
        plan = plan.with_prediction(predict(step, plan, layout, simulation))
        sources = [program.host_source for program in programs.values()]
        emitted = emit(step, instructions, simulation.live, _header(plan, machine), sources)
    lowered = LoweredStep(step, plan, instructions, simulation, stages, emitted)
    if talk:
        _say(lowered, settings.debug)
    return lowered


def _say(lowered: LoweredStep, debug: int) -> None:
    if debug >= 3:
        # Reports are made of lowered steps.
        from zerofx.report.schedule import make_schedule

        sys.stderr.write(f"{make_schedule(lowered)}\n")
    if debug >= 4:
        sys.stderr.write(lowered.emitted.source)


def budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A memory budget in bytes; a fraction is of the machine's device memory."""
    return int(asked * machine.device.memory_bytes) if isinstance(asked, float) else asked


def host_budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A host budget in bytes of one rank; a fraction is of its share of the machine's host memory."""
    return int(asked * machine.host_bytes_per_rank) if isinstance(asked, float) else asked


def make_plan(
    captured: StepGraph,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    *,
    on_cpu: bool,
    costs: MeasuredCosts | None = None,
    talk: bool = True,
    estimates: Estimates | None = None,
) -> Plan:
    """Decide. Without a budget the plan is as the options say; with one it is the fastest that fits.

    Where ``options.wire`` allows it, buckets are then sent in few bits as far as that makes the step faster.
    ``costs`` are measured costs to go by; ``talk``: whether this rank shows how far the search is. What compiled
    regions are estimated to hold is added to ``estimates``, for further plans.

    Raises:
        MemoryBudgetError: no plan fits ``memory_budget`` bytes, or none does within the host budget.
        UsageError: ``options.tile`` names what cannot be tiled, or ranks do not fill nodes and ``options.wire`` asks.
    """
    plan = _exact_plan(
        captured, layout, programs, machine, options, settings, memory_budget,
        on_cpu=on_cpu, costs=costs, talk=talk, estimates=estimates, merging=options.wire == "exact",
    )  # fmt: skip
    if options.wire == "exact":
        return plan
    fused, known = options.backend == "inductor", estimates if estimates is not None else {}
    machine_now = costs.machine(machine, layout.num_ranks) if costs is not None else machine

    def carried_out(plan: Plan) -> tuple[StepGraph, Simulation]:
        step = captured.clone()
        run_quietly(step, plan, layout, programs, settings)
        return step, _simulate(step, layout, machine_now, on_cpu, costs, fused=fused, estimates=known)

    found = with_wire(plan, layout, machine_now, options.wire, carried_out, memory_budget)
    if memory_budget is None or not all(one.is_exact for one in found.wires):
        return found
    merged = _exact_plan(
        captured, layout, programs, machine, options, settings, memory_budget,
        on_cpu=on_cpu, costs=costs, talk=talk, estimates=estimates, merging=True,
    )  # fmt: skip
    return replace(merged, wire=found.wire, ranks_per_node=found.ranks_per_node, wires=found.wires)


def _exact_plan(
    captured: StepGraph,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    *,
    on_cpu: bool,
    costs: MeasuredCosts | None,
    talk: bool,
    estimates: Estimates | None,
    merging: bool,
) -> Plan:
    """The plan that sends everything as it is; ``merging``: gathers may start together. See ``make_plan``."""
    machine = costs.machine(machine, layout.num_ranks) if costs is not None else machine
    tiles = named_tiles(captured, options.tile) if isinstance(options.tile, Mapping) else ()
    state_bytes = _state_bytes(layout, programs, options.stage)
    delayed = delayed_placements(layout, state_bytes, options.stage) if options.delayed_update is not None else {}
    if memory_budget is None and options.recompute != "full":
        return decide(
            captured, layout, stage=options.stage, precision=options.precision, machine=machine.name,
            options=options.policy, tiles=tiles, states=decisions_of(delayed),
        )  # fmt: skip

    question = Question(
        captured=Captured(captured, machine, tiles),
        layout=layout,
        stage=options.stage,
        precision=options.precision,
        memory_budget=memory_budget,
        recompute=options.recompute != "none",
        tiers=tiers_for(options.offload, machine),
        asked=options.policy,
        tile=options.tile == "auto",
        state_bytes=state_bytes,
        delayed=delayed,
    )
    fused, known = options.backend == "inductor", estimates if estimates is not None else {}
    with watched("planning", "plans tried", show=talk) as bar:

        def peak(plan: Plan, carried_out: StepGraph) -> int:
            bar.update()
            run_quietly(carried_out, plan, layout, programs, settings, done=("tile", "recompute"))
            live = liveness(carried_out, on_cpu)
            return (_live_when_fused(live, carried_out, cut(carried_out), known) if fused else live).peak_bytes

        def evaluate(plan: Plan) -> Prediction:
            step = captured.clone()
            run_quietly(step, plan, layout, programs, settings)
            return _predict(step, plan, layout, machine, on_cpu, costs, fused=fused, estimates=known)

        def merge(plan: Plan) -> Plan:
            assert memory_budget is not None
            if not merging or not may_merge(plan, layout, machine):
                return plan
            step = captured.clone()
            run_quietly(step, plan, layout, programs, settings)
            simulation = _simulate(step, layout, machine, on_cpu, costs, fused=fused, estimates=known)
            return merge_gathers(plan, step, layout, simulation, machine, memory_budget)

        def progress(leanings: Iterable[Leaning]) -> Iterator[Leaning]:
            for leaning in leanings:
                bar.set_description(f"planning ({leaning})", refresh=False)
                yield leaning

        if memory_budget is None:
            return least_memory(question, evaluate)

        def host_bytes(plan: Plan) -> int:
            step = captured.clone()
            run_quietly(step, plan, layout, programs, settings)
            return liveness(step, on_cpu).host_block_bytes

        limit = host_budget_bytes(options.host_budget, machine)
        found = fit_host(question, limit, lambda one: fit(one, peak, evaluate, progress, merge), host_bytes)
        # The bound is on times by rule, and says nothing of measured ones.
        if costs is not None:
            return found
        return with_least_seconds(found, captured, layout, machine, on_cpu=on_cpu, by_region=fused)


def _state_bytes(layout: BucketLayout, programs: Mapping[int, UpdateProgram], stage: int) -> dict[int, int]:
    """Bytes of one rank's optimizer states and masters, by bucket."""
    found = {}
    for index, program in programs.items():
        bucket = layout.buckets[index]
        local = bucket.shard_numel if stage >= 1 else bucket.numel
        master = bucket.dtype.itemsize if bucket.has_master else 0
        found[index] = local * (master + sum(state.dtype.itemsize for state in program.states))
    return found


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
    """``plan`` with what it leads to, carried out on a copy of the captured graph; see ``lower`` for the rest."""
    machine = costs.machine(machine, layout.num_ranks) if costs is not None else machine
    step = captured.clone()
    run_quietly(step, plan, layout, programs, settings)
    return plan.with_prediction(_predict(step, plan, layout, machine, on_cpu, costs, fused=fused))


def _predict(
    step: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    machine: Machine,
    on_cpu: bool,
    costs: MeasuredCosts | None,
    *,
    fused: bool,
    estimates: Estimates | None = None,
) -> Prediction:
    simulation = _simulate(step, layout, machine, on_cpu, costs, fused=fused, estimates=estimates)
    return predict(step, plan, layout, simulation)


def _simulate(
    step: StepGraph,
    layout: BucketLayout,
    machine: Machine,
    on_cpu: bool,
    costs: MeasuredCosts | None,
    *,
    fused: bool,
    estimates: Estimates | None,
    instructions: tuple[Instruction, ...] | None = None,
) -> Simulation:
    """The step as measured costs, if there are any, and compiled regions make it; see ``lower``."""
    instructions = cut(step) if instructions is None else instructions
    measured = costs.of_nodes(regions_of(instructions), machine) if costs is not None else None
    simulation = simulate(step, machine, layout.num_ranks, on_cpu=on_cpu, measured=measured)
    if fused:
        simulation = replace(simulation, live=_live_when_fused(simulation.live, step, instructions, estimates))
    return simulation


def _live_when_fused(
    live: Liveness,
    step: StepGraph,
    instructions: tuple[Instruction, ...],
    known: Estimates | None = None,
) -> Liveness:
    """``live`` as it will be with compiled regions, by an estimate; updates run on kernels of their own.

    ``known`` are the estimates made before, to which those made here are added.
    """
    compiled = [region for region in regions_of(instructions) if not region.is_update]
    known = {} if known is None else known
    for region in compiled:
        if region.key not in known:
            known[region.key] = estimated_memory(region)
    return with_profiles(live, step, [(region, known[region.key]) for region in compiled])


def build(
    lowered: LoweredStep, layout: BucketLayout, settings: Settings, control: Control, backend: str
) -> CompiledStep:
    """Write the step's source, load it, and compile its regions if ``backend`` is ``"inductor"``."""
    plan, simulation, source = lowered.plan, lowered.simulation, lowered.emitted.source
    # One plan leads to several files: the update in it changes with the optimizer's options.
    folder = settings.dump_dir / hashlib.sha256((plan.decisions_hash() + source).encode()).hexdigest()[:12]
    path = folder / "step.py"
    control.attempt("write the generated step", lambda: _write(path, source) if control.rank == 0 else None)
    function, compiled = load_step(source, str(path), lowered.instructions, lowered.emitted.functions, control, backend)
    if compiled:
        profiles = [(r, compiled[r.key].memory) for r in regions_of(lowered.instructions) if r.key in compiled]
        simulation = replace(simulation, live=with_profiles(simulation.live, lowered.graph, profiles))
        plan = plan.with_prediction(predict(lowered.graph, plan, layout, simulation))
    if control.rank == 0:
        (folder / "plan.json").write_text(plan.to_json())
    return CompiledStep(
        lowered.graph, plan, lowered.instructions, simulation, lowered.stages, lowered.emitted, path, function
    )


def load_step(
    source: str,
    filename: str,
    instructions: tuple[Instruction, ...],
    functions: Mapping[str, str],
    control: Control,
    backend: str,
) -> tuple[StepFunction, dict[str, CompiledRegion]]:
    """The step function of an emitted file, its region functions compiled if ``backend`` is ``"inductor"``."""
    namespace = load_source(source, filename)
    compiled: dict[str, CompiledRegion] = {}
    if backend == "inductor":
        # Inductor takes seconds to import, and warns of what torch itself deprecates: only who needs it pays.
        from zerofx.codegen.inductor import compile_region

        # A region without inputs only makes constants.
        first = {r.key: r for r in reversed(regions_of(instructions)) if not r.is_update and r.inputs}
        mine, others = control.divide(sorted(first, key=lambda key: len(first[key].nodes), reverse=True))
        inputs = {key: [value(n) for n in region.inputs] for key, region in first.items()}

        def compile_one(key: str) -> None:
            name = functions[key]
            progress.set_description(f"compiling {name}", refresh=False)
            compiled[key] = compile_region(namespace[name], inputs[key], name)
            progress.update()

        def compile_all(keys: list[str]) -> None:
            tasks = {key: Task.of(source, filename, functions[key], inputs[key]) for key in keys}
            # The ranks of a host share the work, and its cores, already.
            count = num_helpers(inputs[key] for key in keys) if control.num_ranks == 1 else 0
            with Helpers(tasks, count) as helpers:
                for key in helpers.keys():  # noqa: SIM118 - no mapping: keys are handed out once
                    compile_one(key)
            for key in keys:
                if key not in compiled:
                    compile_one(key)

        with watched("compiling", "regions", len(first), show=control.rank == 0) as progress:
            for keys in (mine, others):
                control.attempt("compile their regions", partial(compile_all, keys), WORK_SECONDS)
        for key, done in compiled.items():
            namespace[functions[key]] = done.call
    return namespace["step"], compiled


def _write(path: Path, source: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    except OSError as error:
        raise UsageError(
            f"expected a folder to write the generated step to, found that {path.parent} is none ({error}): set "
            f"ZEROFX_DUMP_DIR to one"
        ) from error


def read_edited(path: str | Path, functions: Mapping[str, str]) -> str:
    """The text of an edited step that has all of ``functions`` (by region key).

    Raises:
        PlanError: there is no such file, or it cannot be loaded, or lacks a function.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"expected a generated step at {path}, found none: {error}") from error
    namespace = load_source(text, str(path))
    missing = [name for name in functions.values() if not callable(namespace.get(name))]
    if missing:
        raise PlanError(f"expected the functions of this step's regions in {path}, found no {names(missing)}")
    return text


def regions_of(instructions: tuple[Instruction, ...]) -> list[Region]:
    """The regions among the instructions of a step, in order; equal ones as often as they run."""
    return [i for i in instructions if isinstance(i, Region)]


def _header(plan: Plan, machine: Machine) -> str:
    return (
        f"One training step, generated by zerofx. It can be edited, and loaded with step.load(path).\n"
        f"stage {plan.stage} on {plan.num_ranks} rank(s), plan {plan.decisions_hash()[:12]}, times for {machine.name}\n"
        f"predicted, per rank: peak {format_bytes(plan.peak_bytes['device'])} at {_predicted_node(plan)}"
        f"{on_tiers(plan.slower_peak_bytes)}, step {format_seconds(plan.step_seconds)}, of which "
        f"{format_seconds(plan.exposed_seconds)} exposed communication, {format_bytes(plan.wire_bytes)} sent"
    )


def _predicted_node(plan: Plan) -> str:
    assert plan.prediction is not None
    return plan.prediction.peak_node
