"""Turn a lowered step into one that runs: write and load its source, compile its regions."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerofx.codegen.arena import Take, plan_arena
from zerofx.codegen.cpu.update_blocks import NoBlocksError, make_block_update
from zerofx.codegen.emit import EmittedStep
from zerofx.codegen.kernels.choose import UpdateKernels, kernels_of_facts
from zerofx.codegen.kernels.table import UPDATE
from zerofx.codegen.region_facts import RegionFacts, region_facts
from zerofx.codegen.regions import regions_of
from zerofx.codegen.step_file import load_source
from zerofx.disk import dumps
from zerofx.errors import PlanError
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import Role
from zerofx.ir.graph import num_bodies
from zerofx.ir.returned import Returned
from zerofx.lowering.lower import LoweredStep
from zerofx.progress import watch_progress
from zerofx.runtime.arena import Allocate, Allocations
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.stages import is_first_of_stage, share_in_stages
from zerofx.runtime.executor import Runtime, StepFunction, functions_of, replace_functions
from zerofx.runtime.state.arguments import StepArguments
from zerofx.scheduler.cost.liveness import apply_profiles
from zerofx.scheduler.cost.simulate import predict
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import RegionMemory, Target
from zerofx.units import first_few

if TYPE_CHECKING:
    from zerofx.codegen.inductor.compile import CompiledRegion


@dataclass(frozen=True)
class StepProgram:
    """The parts of a lowered step that are needed to run it: its plan and source, its arguments, and its distinct
    regions. ``num_regions`` is the number it runs, ``returned`` the structure of a micro-batch's other outputs."""

    plan: Plan
    emitted: EmittedStep
    arguments: StepArguments
    regions: tuple[RegionFacts, ...]
    num_regions: int
    device: torch.device
    returned: Returned

    @staticmethod
    def from_lowered(lowered: LoweredStep, kernels: frozenset[str]) -> StepProgram:
        """The program of a step that will use ``kernels`` of zerofx's own."""
        regions = regions_of(lowered.instructions)
        facts = region_facts(regions, with_updates=UPDATE in kernels)
        arguments = StepArguments.of(lowered.graph)
        return StepProgram(
            lowered.plan, lowered.emitted, arguments, facts, len(regions), lowered.graph.device, lowered.graph.returned
        )


@dataclass(frozen=True)
class CompiledStep(StepProgram):
    """A step that can be run: the path of its source, the memory of its regions, and the kernel of each update.

    ``details`` returns the lowered step, which only reports read: for a step that an earlier run kept, it is made on
    demand. ``takes`` are the places of its allocations in the arena, where it has one, and ``allocations`` hands those
    out.
    """

    source_path: Path
    function: StepFunction
    memory: RegionMemory
    updates: UpdateKernels
    details: Callable[[], LoweredStep]
    takes: tuple[Take, ...] = ()
    allocations: Allocations | None = None

    def extras(self, tensors: Sequence[Any], *, as_list: bool) -> Any:
        """The outputs of ``forward`` after its loss, rebuilt from a step's tensors; for several micro-batches a list.

        ``as_list``: also for one micro-batch.
        """
        extras = [self.returned.rebuilt(part) for part in self._micro_batches(tensors)]
        return extras if self.plan.num_micro_batches > 1 or as_list else extras[0]

    def tensors_to_log(self, tensors: Sequence[Any]) -> list[Sequence[torch.Tensor]]:
        """The tensors that Python reads, of each micro-batch."""
        first, end = self.returned.num_tensors - self.returned.num_logged, self.returned.num_tensors
        return [part[first:end] for part in self._micro_batches(tensors)]

    def row_shares(self, tensors: Sequence[Any]) -> list[torch.Tensor]:
        """The most rows that a rank has for another in each micro-batch, as ``row_shares`` gives them; none where no
        rows of experts are sent."""
        return [part[-1] for part in self._micro_batches(tensors)] if self.plan.sends_rows else []

    def _micro_batches(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """The results of each micro-batch besides its loss."""
        each = self.returned.num_tensors + self.plan.sends_rows
        num = num_bodies(self.plan.num_micro_batches, self.arguments.num_before)
        columns = [list[Any]() for _ in range(each)]
        for number, given in enumerate(tensors[: each * num]):
            columns[number % each] += given if isinstance(given, list) else [given]  # a loop gives what each round does
        return list(zip(*columns, strict=True)) or [()] * self.plan.num_micro_batches

    def function_for(self, runtime: Runtime) -> StepFunction:
        """The step's ``function``; during a save, its updates first keep the values that they overwrite."""
        runtime.allocate_in(self.allocations)
        if runtime.tiers.snapshot is None:
            return self.function
        names_of_updates = {self.emitted.functions[region.key] for region in self.regions if region.is_update}
        updates = functions_of(self.function, names_of_updates)
        return replace_functions(
            self.function, {name: partial(runtime.update, update) for name, update in updates.items()}
        )

    @property
    def draws_together(self) -> bool:
        """True if ranks that share the step's computation draw random numbers in it."""
        shares = any(facts.role is Role.HOST_RANK for facts in self.arguments.placeholders.values())
        return shares or self.plan.draws_together

    @property
    def lowered(self) -> LoweredStep:
        """The step as a graph, with its predictions."""
        return self.details()


def build(lowered: LoweredStep, layout: BucketLayout, target: Target, control: Control) -> CompiledStep:
    """Write the step's source, load it, and compile its regions if ``target`` says so."""
    program = StepProgram.from_lowered(lowered, target.kernels)
    path, loaded = load_program(program, target, control, lowered.plan.decisions_hash())
    final, takes = apply_memory(lowered, layout, loaded.memory, in_arena=target.arena)
    write_plan(path, final.plan.to_json(), control, final.plan.mesh)
    return make_compiled_step(program, path, loaded, final.plan, takes, lambda: final)


def load_program(
    program: StepProgram, target: Target, control: Control, decisions_hash: str
) -> tuple[Path, LoadedStep]:
    """Write a step's source, and load it with its regions; ``decisions_hash`` is its plan's."""
    source = program.emitted.source
    # One plan leads to several files: the update in it changes with the optimizer's options.
    name = hashlib.sha256((decisions_hash + source).encode()).hexdigest()[:12]
    path = share_in_stages(
        control, program.plan.mesh, "write the generated step",
        lambda: dumps.write_source(target.settings.dump_dir, name, source),
    )  # fmt: skip
    loaded = load_step(
        source, str(path), program.regions, program.emitted.functions, target, control, edited=False,
        own_alone=program.plan.pipe > 1,
    )  # fmt: skip
    if is_first_of_stage(control, program.plan.mesh):
        dumps.hold(path, loaded.function)
    return path, loaded


def apply_memory(
    lowered: LoweredStep, layout: BucketLayout, memory: RegionMemory, *, in_arena: bool
) -> tuple[LoweredStep, tuple[Take, ...]]:
    """Replace estimates in ``lowered`` by the memory of its compiled regions, and place its allocations.

    ``in_arena``: whether these lie in an arena.
    """
    if not memory:
        return lowered, ()
    profiles = [(region, memory[region.key]) for region in regions_of(lowered.instructions) if region.key in memory]
    live, takes = apply_profiles(lowered.simulation.live, lowered.graph, profiles), tuple[Take, ...]()
    if in_arena:
        arena = plan_arena(lowered.graph, lowered.instructions, live, memory)
        live, takes = replace(live, arena=arena.use), arena.takes
    simulation = replace(lowered.simulation, live=live)
    plan = lowered.plan.with_prediction(predict(lowered.graph, lowered.plan, layout, simulation))
    return replace(lowered, simulation=simulation, plan=plan), takes


def write_plan(source_path: Path, text: str, control: Control, mesh: Mesh) -> None:
    """Put a step's plan next to its source."""
    if is_first_of_stage(control, mesh):
        dumps.write_plan(source_path, text)


def make_compiled_step(
    program: StepProgram,
    path: Path,
    loaded: LoadedStep,
    plan: Plan,
    takes: tuple[Take, ...],
    details: Callable[[], LoweredStep],
) -> CompiledStep:
    """The compiled step of a program that was loaded; ``plan`` has its predictions, ``takes`` are the places in its
    arena."""
    function, arena, allocations = loaded.function, plan.arena, None
    if arena is not None:
        allocations = Allocations(takes, arena.pool_bytes)
        function = replace_functions(
            function, {name: make(allocations.take) for name, make in loaded.replace_allocator.items()}
        )
    return CompiledStep(
        plan, program.emitted, program.arguments, program.regions, program.num_regions, program.device,
        program.returned, path,
        function, loaded.memory, loaded.updates, details, takes, allocations,
    )  # fmt: skip


@dataclass(frozen=True)
class LoadedStep:
    """A step function, the memory that its compiled regions take and free, by key, and the kernels of its updates.

    ``replace_allocator``: by the name of a compiled region, what has it take its tensors from an allocator.
    """

    function: StepFunction
    memory: RegionMemory
    updates: UpdateKernels
    replace_allocator: Mapping[str, Callable[[Allocate], Callable[..., Any]]]


def load_step(
    source: str,
    filename: str,
    regions: Sequence[RegionFacts],
    functions: Mapping[str, str],
    target: Target,
    control: Control,
    *,
    edited: bool,
    own_alone: bool = False,
) -> LoadedStep:
    """The step function of an emitted file, its region functions compiled if ``target`` says so.

    ``edited``: whether the file may read values that the step does not. ``own_alone``: whether other ranks have other
    regions.
    """
    kernels = target.kernels
    namespace = load_source(source, filename)
    updates = UpdateKernels({}, {})
    if UPDATE in kernels:
        known = {key: namespace[name] for key, name in functions.items()}
        updates = kernels_of_facts(regions, known, all_is_read=edited)
    for key, kernel in updates.kernels.items():
        namespace[functions[key]] = kernel
    for region in regions:
        if region.is_update and region.on_host:
            with contextlib.suppress(NoBlocksError):  # it runs as it is written
                namespace[functions[region.key]] = make_block_update(namespace[functions[region.key]], region.inputs)
    compiled: dict[str, CompiledRegion] = {}
    if target.compiles_regions:
        # Inductor takes seconds to import, and warns of what torch itself deprecates: only who needs it pays.
        from zerofx.codegen.inductor.compile import compile_region

        # A region without inputs only makes constants.
        first = {region.key: region for region in reversed(regions) if not region.is_update and region.inputs}
        inputs = {key: region.inputs for key, region in first.items()}
        longest_first = sorted(first, key=lambda key: first[key].num_nodes, reverse=True)
        # Inductor keeps what it compiles for a GPU for that one only: other ranks' is none of this rank's.
        tensors = [each for given in inputs.values() for each in given if isinstance(each, torch.Tensor)]
        alike = not own_alone and all(is_on_cpu(tensor.device) for tensor in tensors)
        mine, others = control.divide(longest_first) if alike else (longest_first, [])

        def compile_all(keys: list[str]) -> None:
            shared = target.shares_kernels and not edited
            for key in keys:
                name = functions[key]
                progress.set_description(f"compiling {name}", refresh=False)
                compiled[key] = compile_region(namespace[name], inputs[key], name, kernels, shared=shared)
                progress.update()
            for key in keys:
                compiled[key].finish()

        with watch_progress("compiling", "regions", len(first), show=control.rank == 0) as progress:
            for keys in (mine, others):
                control.attempt("compile their regions", partial(compile_all, keys))
        for key, done in compiled.items():
            namespace[functions[key]] = done.call
    memory = {key: done.memory for key, done in compiled.items()} | dict.fromkeys(updates.kernels, ())
    makers = {functions[key]: done.replace_allocator for key, done in compiled.items()}
    allocating = {name: maker for name, maker in makers.items() if maker is not None}
    return LoadedStep(namespace["step"], memory, updates, allocating)


def read_edited(path: str | Path, emitted: EmittedStep) -> str:
    """The text of an edited step that has all region functions of ``emitted``.

    Raises:
        PlanError: there is no such file, or it cannot be loaded, or lacks a function.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"expected a generated step at {path}, found none: {error}") from error
    namespace = load_source(text, str(path))
    missing = [name for name in emitted.functions.values() if not callable(namespace.get(name))]
    if missing:
        raise PlanError(f"expected the functions of this step's regions in {path}, found no {first_few(missing)}")
    return text
