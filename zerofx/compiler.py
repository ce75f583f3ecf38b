"""From a lowered step to one that runs: its source written and loaded, its regions compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerofx.buckets import BucketLayout
from zerofx.checks import names
from zerofx.codegen.helpers import Helpers, Task, num_helpers
from zerofx.codegen.kernels.choose import UpdateKernels, update_kernels
from zerofx.codegen.kernels.table import UPDATE, kernels_in_use
from zerofx.codegen.regions import Instruction, regions_of
from zerofx.errors import PlanError, UsageError
from zerofx.lowering import LoweredStep
from zerofx.node_facts import value
from zerofx.progress import watched
from zerofx.runtime.control import WORK_SECONDS, Control
from zerofx.runtime.executor import StepFunction, load_source
from zerofx.scheduler.liveness import MemoryEvent, with_profiles
from zerofx.scheduler.simulate import predict
from zerofx.settings import Settings

if TYPE_CHECKING:
    from zerofx.codegen.inductor import CompiledRegion


@dataclass(frozen=True)
class CompiledStep(LoweredStep):
    """A lowered step that can be run, where its source was written, what its compiled regions hold, by key, and which
    kernel each of its updates runs on."""

    source_path: Path
    function: StepFunction
    memory: Mapping[str, tuple[MemoryEvent, ...]]
    updates: UpdateKernels


def build(
    lowered: LoweredStep, layout: BucketLayout, settings: Settings, control: Control, backend: str
) -> CompiledStep:
    """Write the step's source, load it, and compile its regions if ``backend`` is ``"inductor"``."""
    plan, simulation, source = lowered.plan, lowered.simulation, lowered.emitted.source
    # One plan leads to several files: the update in it changes with the optimizer's options.
    folder = settings.dump_dir / hashlib.sha256((plan.decisions_hash() + source).encode()).hexdigest()[:12]
    path = folder / "step.py"
    control.attempt("write the generated step", lambda: _write(path, source) if control.rank == 0 else None)
    kernels = kernels_in_use(settings.kernels, lowered.graph.device) if backend == "inductor" else frozenset[str]()
    loaded = load_step(
        source, str(path), lowered.instructions, lowered.emitted.functions, control, backend, kernels, edited=False
    )
    if loaded.memory:
        profiles = [(r, loaded.memory[r.key]) for r in regions_of(lowered.instructions) if r.key in loaded.memory]
        simulation = replace(simulation, live=with_profiles(simulation.live, lowered.graph, profiles))
        plan = plan.with_prediction(predict(lowered.graph, plan, layout, simulation))
    if control.rank == 0:
        (folder / "plan.json").write_text(plan.to_json())
    return CompiledStep(
        lowered.graph, plan, lowered.instructions, simulation, lowered.stages, lowered.emitted, path,
        loaded.function, loaded.memory, loaded.updates,
    )  # fmt: skip


@dataclass(frozen=True)
class LoadedStep:
    """A step function, what its compiled regions take and free inside, by key, and the kernels of its updates."""

    function: StepFunction
    memory: Mapping[str, tuple[MemoryEvent, ...]]
    updates: UpdateKernels


def load_step(
    source: str,
    filename: str,
    instructions: tuple[Instruction, ...],
    functions: Mapping[str, str],
    control: Control,
    backend: str,
    kernels: frozenset[str],
    *,
    edited: bool,
) -> LoadedStep:
    """The step function of an emitted file, its region functions compiled if ``backend`` is ``"inductor"``.

    ``kernels`` are those of zerofx's own that it uses. ``edited``: whether the file may read what the step does not.
    """
    namespace = load_source(source, filename)
    regions = regions_of(instructions)
    updates = UpdateKernels({}, {})
    if UPDATE in kernels:
        known = {key: namespace[name] for key, name in functions.items()}
        updates = update_kernels(regions, known, all_is_read=edited)
    for key, kernel in updates.made.items():
        namespace[functions[key]] = kernel
    compiled: dict[str, CompiledRegion] = {}
    if backend == "inductor":
        # Inductor takes seconds to import, and warns of what torch itself deprecates: only who needs it pays.
        from zerofx.codegen.inductor import compile_region

        # A region without inputs only makes constants.
        first = {r.key: r for r in reversed(regions) if not r.is_update and r.inputs}
        mine, others = control.divide(sorted(first, key=lambda key: len(first[key].nodes), reverse=True))
        inputs = {key: [value(n) for n in region.inputs] for key, region in first.items()}

        def compile_one(key: str) -> None:
            name = functions[key]
            progress.set_description(f"compiling {name}", refresh=False)
            compiled[key] = compile_region(namespace[name], inputs[key], name, kernels)
            progress.update()

        def compile_all(keys: list[str]) -> None:
            tasks = {key: Task.of(source, filename, functions[key], inputs[key], kernels) for key in keys}
            # The ranks of a host share the work, and its cores, already.
            count = num_helpers(inputs[key] for key in keys) if control.num_ranks == 1 else 0
            with Helpers(tasks, count) as helpers:
                for key in helpers.keys():  # noqa: SIM118 - no mapping: keys are handed out once
                    compile_one(key)
            for key in keys:
                if key not in compiled:
                    compile_one(key)
            for key in keys:
                compiled[key].finish()

        with watched("compiling", "regions", len(first), show=control.rank == 0) as progress:
            for keys in (mine, others):
                control.attempt("compile their regions", partial(compile_all, keys), WORK_SECONDS)
        for key, done in compiled.items():
            namespace[functions[key]] = done.call
    memory = {key: done.memory for key, done in compiled.items()} | dict.fromkeys(updates.made, ())
    return LoadedStep(namespace["step"], memory, updates)


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
