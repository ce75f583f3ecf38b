"""Steps on disk: found by everything they follow from, loaded if all ranks have the same one, kept for the next run.

A kept step follows from the captured graph, which has a key of its own (``capture/cache.py``), and from the parts
listed in ``key_of_step``. The optimizer's update is traced again, and has to be unchanged. The graph after the passes
is not kept: it is made from the captured graph when a report asks for it. ``ZEROFX_DEBUG`` and ``ZEROFX_VERIFY=2``
report on the way there, so they have every step built.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from zerofx.capture.traceable import trace_device
from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.disk.cache import DiskCache, key_of
from zerofx.driver.captures import Captures
from zerofx.driver.kept.step import KeptStep
from zerofx.driver.lent import add_borrowed
from zerofx.driver.prepared import Earlier, Prepared, Request
from zerofx.ir.serialise import NotStorableError
from zerofx.ir.tensor_parts import named_parameters
from zerofx.lowering.load import CompiledStep, apply_memory, load_program, make_compiled_step, write_plan
from zerofx.lowering.lower import LoweredStep, lower
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.optimizers.shadow import structural_flags
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import RegionMemory
from zerofx.torch_private.profiler import is_profiling


@dataclass(frozen=True)
class CacheHit:
    """A kept step, bound to the current optimizer."""

    step: KeptStep
    binding: OptimizerBinding
    programs: dict[int, UpdateProgram]


def key_of_step(request: Request, captures: Captures, earlier: Earlier | None) -> str | None:
    """The key of a step; None if it has none, or if its captured graph is not kept."""
    if request.settings.debug:
        return None
    if request.mesh.pipe > 1:  # a rank's own stage is cut from the whole step
        return None
    recorded = captures.record()
    if recorded is None or recorded.place.key is None:
        return None
    if recorded.text is None and recorded.place.read() is None:
        return None
    model, optimizers, batch = request.model, request.optimizers, request.batch
    options, settings, device = request.options, request.settings, trace_device(request.model, request.batch)
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizers.param_groups]
    # Which update that makes is compared once it is traced; here it keeps steps of several optimizers apart.
    flags = [[structural_flags(group) for group in optimizer.param_groups] for optimizer in optimizers.each]
    update = f"{optimizers.kind} {flags}"
    plan = options.plan
    assert plan is None or isinstance(plan, Plan), "a file has been read"
    parts = (
        recorded.place.key, update, repr(groups),
        repr(None if earlier is None else f"{earlier.layout} {earlier.binding.variant} {earlier.shared}"),
        repr(histories_of(model, optimizers) if earlier is None else None),
        repr(request.locations), repr(request.fixed), repr((request.capacity, request.num_rounds)),
        repr((request.num_copies, request.needed)),
        *(repr(entry.facts()) for entry in request.borrowed),
        repr(sorted(batch.description().items())),
        repr(request.machine), str(request.mesh), str(device),
        f"{torch.get_num_threads()} threads",  # each takes memory of its own
        *options.texts("step"),
        plan.to_json() if plan is not None else "no plan", repr(sorted(settings.disable)), str(settings.verify),
        repr(sorted(kernels_in_use(settings.kernels, device))),
    )  # fmt: skip
    return key_of("step", parts)


def find(key: str, request: Request, captures: Captures, earlier: Earlier | None) -> CacheHit | None:
    """The step that was kept under ``key``; None if there is none, or if the optimizers' update has changed.

    Raises:
        OptimizerError: an optimizer does not belong to the model.
    """
    step = DiskCache(request.settings.cache_dir).read_as(key, KeptStep.from_json)
    recorded = captures.record() if step is not None else None
    if step is None or recorded is None:
        return None
    step = step.set_returned(recorded.record.returned)
    model, optimizers = request.model, request.optimizers
    group_of_parameters(model, optimizers, recorded.place.blank.parameters, set(step.gradients))
    if earlier is not None:
        binding, programs = earlier.binding, earlier.binding.programs(earlier.state.buckets)
    else:
        fused = request.options.compiles_regions
        binding = OptimizerBinding(optimizers, step.layout.own, step.program.device, prefer_fused=fused)
        programs = binding.programs(None, binding.find_states(dict(named_parameters(model))))
    _, of_others = add_borrowed(step.layout.own, request.borrowed)
    # The update follows from code that is no part of zerofx, and from states that the optimizers hold.
    if binding.variant != step.variant:
        return None
    return CacheHit(step, binding, programs | of_others)


def is_everywhere(recalled: CacheHit | None, control: Control) -> bool:
    """True if every rank has kept the same step."""
    digests = control.gather(recalled.step.digest() if recalled is not None else None, "compare kept steps")
    return recalled is not None and all(digest == digests[0] for digest in digests)


def load(request: Request, captures: Captures, recalled: CacheHit, control: Control) -> CompiledStep | None:
    """Load a kept step; None if its regions, compiled here, hold other memory than they did."""
    step, device = recalled.step, recalled.step.program.device
    target = request.target(device, on_cpu=is_on_cpu(device), verbose=False)
    path, loaded = load_program(step.program, target, control, step.decisions_hash)
    if not all(control.gather(dict(loaded.memory) == step.memory, "compare compiled regions")):
        return None
    write_plan(path, step.plan_text, control, request.mesh)
    plan, layout, programs = step.program.plan, step.layout, recalled.programs
    # What is needed later is not to hold the batch.
    graphs = captures.drop_batch().share(plan.shardings, plan.model)
    products = {plan.num_micro_batches: plan.products}
    graphs = graphs.reorder(plan.overlaps).multiply(products).slice_parameters(plan.slices)

    @functools.cache
    def details() -> LoweredStep:
        captured = graphs.graph(plan.num_micro_batches, by_layer=plan.by_layer)
        lowered = lower(captured, plan, layout, programs, target.add_measured(step.measured))
        assert lowered.emitted == step.program.emitted, "what was kept is what its captured graph leads to"
        return apply_memory(lowered, layout, step.memory, in_arena=target.arena)[0]

    return make_compiled_step(step.program, path, loaded, plan, step.takes, details)


def keep(
    request: Request,
    captures: Captures,
    earlier: Earlier | None,
    prepared: Prepared,
    compiled: CompiledStep,
    measured: RegionMemory,
) -> None:
    """Write a step for the next run; ``measured`` is what its plan was made with."""
    key = key_of_step(request, captures, earlier)
    if key is None or is_profiling():  # what some operators take is not known then
        return
    plan = compiled.plan
    step = KeptStep(
        compiled, plan.to_json(), plan.decisions_hash(), prepared.layout, tuple(captures.first.gradients),
        prepared.binding.variant, dict(compiled.memory), measured, compiled.takes,
    )  # fmt: skip
    try:
        DiskCache(request.settings.cache_dir).write(key, step.to_json())
    except NotStorableError:
        return  # an input of a region that has no text; its captured graph has one
