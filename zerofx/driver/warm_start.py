"""Build the step of a batch, or load it from disk where an earlier run has kept it: the entry of every build.

The forward is run on fake tensors and recorded, as it is for a captured graph's key; where graph and step are on disk,
nothing is planned, lowered or emitted, and only what runs is loaded. Ranks take what they have kept together, or not at
all. ``ZEROFX_DEBUG`` and ``ZEROFX_VERIFY=2`` ask for what happens on the way, and have every step built.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.capture.trace import tracing_device
from zerofx.disk.cache import DiskCache
from zerofx.driver.building import Prepared, build_within_budget, lower_prepared, prepare
from zerofx.driver.micro_batches import MicroBatches
from zerofx.driver.step_cache import KeptStep, step_key
from zerofx.errors import working
from zerofx.ir.batch import Batch
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.serialise import NotStorableError
from zerofx.lowering.load import CompiledStep, RegionMemory, compiled_step, load_program, with_memory, write_plan
from zerofx.lowering.lower import LoweredStep
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions
from zerofx.progress import watched
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.optimizer import OptimizerBinding, group_of_parameters
from zerofx.runtime.state.state import TrainingState
from zerofx.scheduler.cost.machine import Machine
from zerofx.settings import Settings
from zerofx.torch_private.profiler import is_profiling


@dataclass(frozen=True)
class Built:
    """A step that can be run, and what its model is taken over with."""

    compiled: CompiledStep
    layout: BucketLayout
    binding: OptimizerBinding
    programs: dict[int, UpdateProgram]


@dataclass(frozen=True)
class Request:
    """What is asked for, and the machine that is planned for."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    options: CompileOptions
    settings: Settings
    num_ranks: int
    machine: Machine


@dataclass(frozen=True)
class Earlier:
    """What the first step of a model has made, for further ones."""

    layout: BucketLayout
    binding: OptimizerBinding
    state: TrainingState


@dataclass(frozen=True)
class _Found:
    """A step that was kept, for the optimizer as it is now."""

    kept: KeptStep
    binding: OptimizerBinding
    programs: dict[int, UpdateProgram]


def build_step(request: Request, earlier: Earlier | None, control: Control) -> Built:
    """The step that is asked for, from disk or built; ``earlier`` is None for the first one of a model.

    Raises:
        ZeroFXError: as ``prepare`` and ``build_within_budget``.
    """
    captures, found = control.attempt("capture a step", lambda: _find(request, earlier, talk=control.rank == 0))
    digests = control.gather(found.kept.digest() if found is not None else None, "compare kept steps")
    if found is not None and all(digest == digests[0] for digest in digests):
        recalled = _recalled(request, captures, found, control)
        if recalled is not None:
            return recalled
    return _built(request, captures, earlier, control)


def _built(request: Request, captures: MicroBatches, earlier: Earlier | None, control: Control) -> Built:
    def prepared_here() -> Prepared:
        return prepare(
            request.model, request.optimizer, captures, request.options, request.num_ranks,
            earlier.layout if earlier else None, earlier.binding if earlier else None,
            earlier.state if earlier else None,
            talk=control.rank == 0,
        )  # fmt: skip

    prepared = control.attempt("capture a step", prepared_here)
    prepared.agree(control)
    with working("plan, emit and load a step"):
        prepared, compiled, measured = build_within_budget(
            prepared, request.machine, request.options, request.settings, control
        )
    _keep(request, captures, earlier, prepared, compiled, measured)
    return Built(compiled, prepared.layout, prepared.binding, prepared.programs)


def _key(request: Request, captures: MicroBatches, earlier: Earlier | None) -> str | None:
    """The key of the step in the cache; None if it has none, or if its captured graph is not kept."""
    if request.settings.debug:
        return None
    recorded = captures.recorded()
    if recorded is None or recorded.kept.key is None:
        return None
    if recorded.text is None and recorded.kept.read() is None:
        return None
    device = tracing_device(request.model, request.batch)
    return step_key(
        recorded.kept.key, request.model, request.optimizer, request.batch, request.machine,
        request.options, request.settings, request.num_ranks, device,
        None if earlier is None else f"{earlier.layout} {earlier.binding.variant}",
    )  # fmt: skip


def _find(request: Request, earlier: Earlier | None, *, talk: bool) -> tuple[MicroBatches, _Found | None]:
    strides = earlier.state.strides() if earlier is not None else {}
    captures = MicroBatches(request.model, request.batch, request.options, request.settings, strides, talk=talk)
    programs = earlier.binding.programs(earlier.state) if earlier is not None else {}
    with watched("capturing the model", show=talk):
        key = _key(request, captures, earlier)
    kept = DiskCache(request.settings.cache_dir).read_as(key, KeptStep.from_json) if key is not None else None
    recorded = captures.recorded() if kept is not None else None
    if kept is None or recorded is None:
        return captures, None
    kept = kept.returning(recorded.record.returned)
    layout, model, optimizer = kept.layout, request.model, request.optimizer
    group_of_parameters(model, optimizer, recorded.kept.blank.parameters, set(kept.gradients))
    if earlier is not None:
        binding = earlier.binding
    else:
        fused = request.options.compiles_regions
        binding = OptimizerBinding(optimizer, layout, kept.program.device, prefer_fused=fused)
        programs = binding.programs(None, binding.held(dict(model.named_parameters())))
    # The update follows from code that is no part of zerofx, and from states that the optimizer holds.
    if binding.variant != kept.variant:
        return captures, None
    return captures, _Found(kept.with_update(one.host_source for one in programs.values()), binding, programs)


def _recalled(request: Request, captures: MicroBatches, found: _Found, control: Control) -> Built | None:
    """The step that was kept, loaded; None where its regions, compiled here, hold other memory than they did."""
    kept, settings, backend = found.kept, request.settings, request.options.backend
    path, loaded = load_program(kept.program, settings, control, backend, kept.decisions_hash)
    if not all(control.gather(dict(loaded.memory) == kept.memory, "compare compiled regions")):
        return None
    write_plan(path, kept.plan_text, control)
    graphs = captures.without_batch().sliced(kept.program.plan.slices)
    # What is needed later is not to hold the batch.
    options, machine = request.options, request.machine

    @functools.cache
    def details() -> LoweredStep:
        plan = kept.program.plan
        lowered = lower_prepared(
            graphs.graph(plan.num_micro_batches), plan, kept.layout, found.programs, machine, options, settings,
            dict(kept.measured), talk=False,
        )  # fmt: skip
        assert lowered.emitted == kept.program.emitted, "what was kept is what its captured graph leads to"
        return with_memory(lowered, kept.layout, kept.memory)

    compiled = compiled_step(kept.program, path, loaded, kept.program.plan, details)
    return Built(compiled, kept.layout, found.binding, found.programs)


def _keep(
    request: Request,
    captures: MicroBatches,
    earlier: Earlier | None,
    prepared: Prepared,
    compiled: CompiledStep,
    measured: RegionMemory,
) -> None:
    """Write the step for the next run."""
    key = _key(request, captures, earlier)
    if key is None or is_profiling():  # what some operators take is not known then
        return
    plan = compiled.plan
    kept = KeptStep(
        compiled, plan.to_json(), plan.decisions_hash(), prepared.layout, tuple(captures.first.gradients),
        prepared.binding.variant, dict(compiled.memory), measured,
    )  # fmt: skip
    try:
        DiskCache(request.settings.cache_dir).write(key, kept.to_json())
    except NotStorableError:
        return  # an input of a region that has no text; its captured graph has one
