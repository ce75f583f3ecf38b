"""Plan a step for a machine and a number of ranks that need not exist: ``zerofx.plan``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack, get_args

import torch
from torch import nn

from zerofx.budgets import budget_bytes
from zerofx.capture.checks import check_model, check_optimizers
from zerofx.capture.for_gpu.gpu import AbsentGpu
from zerofx.capture.objective.loss import ForwardFunction, LossFunction
from zerofx.capture.objective.token_weighted_loss import add_term_counts
from zerofx.capture.values.constant_arguments import ConstantArguments
from zerofx.choices import Backend, PrecisionWord
from zerofx.deferred import make_buffers
from zerofx.driver.alike import KnownStage, Structure
from zerofx.driver.captures import Captures
from zerofx.driver.driver import lower_step
from zerofx.driver.meshes.choice import choose_mesh
from zerofx.driver.prepared import Prepared, Request, prepare
from zerofx.driver.saved_graph import SavedGraph
from zerofx.driver.shardings import decide_alone, lay_out, layouts
from zerofx.driver.stage_order import PlannedStage, StageOrder, choose_number
from zerofx.driver.stages import CutStep, cut_into_stages, name_stage, plan_all, reason_against_stages
from zerofx.errors import UsageError, wrap_defects
from zerofx.garbage import limit_garbage_collection
from zerofx.ir.batch import Batch
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.micro_batches import times_run
from zerofx.lowering.lower import LoweredStep
from zerofx.mesh_option import AUTO, mesh_for
from zerofx.optimizers import Optimizers
from zerofx.option_checks import check_batch_form, check_count
from zerofx.option_table import check_names, document_options
from zerofx.options import CompileOptions, PlanKeywords, check_options
from zerofx.pipeline import check_disabled
from zerofx.precision import Precision
from zerofx.progress import watch_progress
from zerofx.report.meshes import MeshComparison
from zerofx.report.saved import SavedPlan
from zerofx.report.schedule import Schedule, make_schedule
from zerofx.report.stages import stage_table
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.parameter_groups import group_of_parameters
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import matmul_seconds_at_peak
from zerofx.scheduler.cost.stages import predict_stage
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem, first_that_fits
from zerofx.scheduler.search.stage_cuts import Balance
from zerofx.scheduler.search.target import Target
from zerofx.settings import Settings, ShortTraceback, read_settings
from zerofx.units import format_bytes, format_seconds, tiers_text


@dataclass(frozen=True)
class PlannedStep:
    """A step as it would run on one rank of a machine: nothing was computed to make it, and no process group.

    ``comparison`` has all meshes, where the best of them was asked for. ``stages``: on a mesh with an axis pipe,
    those of all its stages, of which this is the one that takes the most memory.
    """

    lowered: LoweredStep
    prepared: Prepared = field(repr=False)
    comparison: MeshComparison | None = None
    stages: tuple[PlannedStep, ...] = ()

    @property
    def layout(self) -> BucketLayout:
        """The buckets of its parameters."""
        return self.prepared.layout

    @property
    def machine(self) -> Machine:
        """The machine that it is planned for."""
        return self.prepared.request.machine

    @property
    def plan(self) -> Plan:
        """All decisions and predictions; ``zerofx.compile(plan=...)`` takes it where graph and ranks are the same."""
        return self.lowered.plan

    @property
    def fits(self) -> bool:
        """True if the predicted peaks are within the device's memory and one rank's share of the host's and NVMe."""
        capacity = {
            "device": self.machine.device.memory_bytes,
            "host": self.machine.host_bytes_per_rank,
            "nvme": self.machine.nvme_bytes_per_rank,
        }
        fits = all(size <= capacity[tier] for tier, size in self.plan.peak_bytes.items())
        return fits and all(stage.fits for stage in self.stages)

    @property
    def flops_utilisation(self) -> float:
        """The part of a step's seconds that its matrix products, convolutions and attention would take at the device's
        peak FLOP/s, each at that for the dtype of its inputs.

        What is computed again counts again, so that this is MFU only where nothing is (else HFU); causal attention
        counts as full.
        """
        seconds = self.plan.step_seconds
        times = times_run(self.lowered.graph)
        busy = sum(num * matmul_seconds_at_peak(node, self.machine) for node, num in times.items())
        return busy / seconds if seconds else 0.0

    @property
    def num_distinct_regions(self) -> int:
        """Regions of different structure: what would have to be compiled."""
        return len(self.lowered.emitted.functions)

    def schedule(self) -> Schedule:
        """The per-node table of the planned step."""
        return make_schedule(self.lowered)

    def report(self, what: str = "") -> SavedPlan:
        """The plan with its schedule; ``what`` is for the heading: the names of model and optimizer, say."""
        return SavedPlan.from_lowered(self.lowered, self.machine, what)

    def save(self, path: str | Path, what: str = "") -> None:
        """Write the plan with its schedule, for ``compile(plan=path)`` and ``zerofx report``; ``what`` as there. Plans
        of stages have a file each, ``plan-1-of-2.json`` for ``plan.json``."""
        for stage in self.stages or [self]:
            stage.report(what).save(path)

    def __str__(self) -> str:
        plan, memory = self.plan, self.machine.device.memory_bytes
        verdict = "fits" if self.fits else "does NOT fit"
        text = (
            f"stage {plan.stage} on {plan.num_ranks} x {self.machine.name}: peak "
            f"{format_bytes(plan.peak_bytes['device'])} of {format_bytes(memory)}{tiers_text(plan.slower_peak_bytes)} "
            f"({verdict}), step {format_seconds(plan.step_seconds)}, of which {format_seconds(plan.exposed_seconds)} "
            f"exposed communication, {format_bytes(plan.wire_bytes)} sent per rank, "
            f"{100 * self.flops_utilisation:.1f} % of peak FLOP/s"
        )
        if self.stages:
            text = f"{text}\n{stage_table([stage.plan for stage in self.stages])}"
        return text if self.comparison is None else f"{self.comparison}\n{text}"


@document_options(PlanKeywords, CompileOptions)
@ShortTraceback()
def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: tuple[Any, ...] | Mapping[str, Any],
    stage: int = 3,
    *,
    world_size: int | None = None,
    **options: Unpack[PlanKeywords],
) -> PlannedStep:
    """Plan a training step without hardware.

    Args:
        model: any module; it may be on ``meta``, or be built inside ``zerofx.empty_init()``, since only shapes are
            used.
        optimizer: the optimizer over its parameters, or a list of several, as for ``zerofx.compile``.
        batch: one data-parallel rank's batch of one step, which ranks along ``model`` share: a tuple of positional
            arguments, or a dict of keywords; ``meta`` tensors will do.
        stage: as for ``zerofx.compile``.
        world_size: number of ranks; None for those of ``mesh``, or one.
        options: as for ``zerofx.compile``, but that ``machine`` is ``"h100-sxm"`` where it is left out, and what
            ``constant`` names needs values. What a compiled region holds inside is estimated
            (``scheduler/cost/fusion.py``), an eager one is simulated node by node, to the byte. Times are those of
            single operators either way.

    Raises:
        ZeroFXError: as ``zerofx.compile`` would.
    """
    check_names(options, PlanKeywords, "plan")
    if options.get("machine") is None:
        options["machine"] = "h100-sxm"
    checked = check_options(stage=stage, **options)
    optimizers = Optimizers.from_user(optimizer, checked.average)
    if checked.mesh == AUTO:
        return _plan_best_mesh(model, optimizers, batch, checked, world_size)
    mesh = mesh_to_plan(checked, world_size)
    with wrap_defects("plan a step"):
        return plan_captured(capture_for_plans(model, optimizers, batch, checked), mesh)


def _plan_best_mesh(
    model: nn.Module,
    optimizers: Optimizers,
    batch: tuple[Any, ...] | Mapping[str, Any],
    options: CompileOptions,
    world_size: int | None,
) -> PlannedStep:
    num_ranks = mesh_to_plan(replace(options, mesh=None), world_size).num_ranks
    with wrap_defects("plan a step"):
        captured = capture_for_plans(model, optimizers, batch, options)
        planned, comparison = choose_mesh(
            captured.request, captured.captures, num_ranks,
            lambda mesh: plan_captured(captured, mesh), on_cpu=captured.machine.is_cpu,
        )  # fmt: skip
        return replace(planned, comparison=comparison)


@dataclass(frozen=True)
class CapturedStep:
    """A captured step that can be planned for any number of ranks; the one in ``request`` stands for all."""

    request: Request
    captures: Captures

    @property
    def machine(self) -> Machine:
        """The machine that is planned for."""
        return self.request.machine


def mesh_to_plan(options: CompileOptions, world_size: int | None) -> Mesh:
    """The mesh to plan for: that of the options, or ``world_size`` ranks along ``shard``, or one.

    Raises:
        UsageError: ``world_size`` is below 1, or not the mesh's; or the mesh is to be chosen, where one is asked for.
    """
    if options.mesh == AUTO:
        raise UsageError("expected a mesh that is given, found mesh='auto', which zerofx.plan and zerofx.compile take")
    if world_size is None:
        return options.mesh or Mesh()
    check_count("world_size", world_size, 1, "to be a number of ranks, 1 or more")
    return mesh_for(options.mesh, world_size)


def capture_for_plans(
    model: nn.Module,
    optimizers: Optimizers,
    batch: tuple[Any, ...] | Mapping[str, Any],
    options: CompileOptions,
    *,
    verbose: bool = True,
) -> CapturedStep:
    """Capture once what ``plan_captured`` plans many times; ``verbose``: show how long that takes.

    Raises:
        ZeroFXError: the model cannot be captured, or an optimizer is not the model's.
    """
    settings = read_settings()
    check_disabled(settings)
    check_model(model, on_meta=True)
    check_optimizers(model, optimizers)
    check_batch_form(batch)
    taken = batch_to_capture(model, batch, options)
    assert options.machine is not None, "plans are made for a machine that is named"
    request = Request(model, optimizers, taken, options, settings, Mesh(), options.machine.as_torch_computes(), verbose)
    captures = _captures(model, taken, options, settings, verbose=verbose)
    with watch_progress("capturing the model", show=verbose), limit_garbage_collection():
        captured = captures.first
    group_of_parameters(model, optimizers, captured.parameters, set(captured.gradients))
    return CapturedStep(request, captures)


def _captures(
    model: nn.Module, batch: Batch, options: CompileOptions, settings: Settings, *, verbose: bool = False
) -> Captures:
    """The captures of a step for the machine that the options name, whose GPU may be absent.

    A GPU of NVIDIA's is captured for wherever the model is; others, and CPUs, where it is.
    """
    assert options.machine is not None, "plans are made for a machine that is named"
    capability = options.machine.device.compute_capability
    is_there = any(parameter.is_cuda for parameter in model.parameters())
    gpu = None if capability is None or is_there else AbsentGpu(capability)
    return Captures(model, batch, options, settings, gpu=gpu, verbose=verbose)


def graph_to_save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    batch: tuple[Any, ...] | Mapping[str, Any],
    plan: Plan,
    *,
    machine: Machine | str,
    loss_fn: LossFunction | None = None,
    forward: ForwardFunction | None = None,
    backend: Backend = "inductor",
) -> SavedGraph:
    """The captured graph that ``plan`` is for, before it is prepared; other arguments as for the function ``plan``.

    Raises:
        ZeroFXError: the model cannot be captured, or an optimizer is not the model's.
    """
    options = check_options(
        stage=plan.stage, loss_fn=loss_fn, forward=forward, machine=machine,
        precision=Precision(_precision(plan), loss_scale=1.0 if plan.loss_scaled else None),
        accumulate=plan.num_micro_batches, backend=backend,
    )  # fmt: skip
    captures = _captures(model, batch_to_capture(model, batch, options), options, read_settings())
    optimizers = Optimizers.from_user(optimizer)
    return SavedGraph.of(model, optimizers, captures, plan.num_micro_batches, prefer_fused=options.compiles_regions)


def _precision(plan: Plan) -> PrecisionWord | None:
    return next((known for known in get_args(PrecisionWord) if known == plan.precision), None)


def batch_to_capture(model: nn.Module, batch: tuple[Any, ...] | Mapping[str, Any], options: CompileOptions) -> Batch:
    """The batch that a model, which may be on ``meta``, is captured with.

    Raises:
        UsageError: what ``constant`` names is no part of it, or has no values.
    """
    make_buffers(model)
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (tuple(batch), {})
    taken = Batch.from_call(args, add_term_counts(options.loss_terms, args, kwargs, num_ranks=1))
    return ConstantArguments(options.constant, model, options.objective.forward).add_hashes(taken)


def plan_captured(captured: CapturedStep, mesh: Mesh, *, verbose: bool = True) -> PlannedStep:
    """Plan a captured step for the ranks of ``mesh``; ``verbose``: show how long it takes, and what was decided.

    Raises:
        MemoryBudgetError: no plan fits the memory budget among the options.
        OptimizerError: the optimizer cannot be run on flat shards.
    """
    with limit_garbage_collection():
        return _plan_on(captured, mesh, verbose=verbose)


def _plan_on(captured: CapturedStep, mesh: Mesh, *, verbose: bool) -> PlannedStep:
    request = replace(captured.request, mesh=mesh, machine=captured.machine.for_ranks(mesh.num_ranks), verbose=verbose)
    if mesh.pipe == 1:
        return _plan_stage(request, captured.captures)
    ways = lay_out(request, captured.captures, None, decide_alone)
    return first_that_fits(ways, lambda laid_out: _plan_stages(request, *laid_out))


def _plan_stages(request: Request, one_rank: Captures, balance: Balance) -> PlannedStep:
    """The largest of the stages of the step that one rank of the model axis runs, with all of them."""
    planned: dict[tuple[int, StageOrder], list[PlannedStep]] = {}
    outcomes: dict[tuple[int, StageOrder], list[PlannedStage]] = {}

    def cut_in(captures: Captures, num_chunks: int | None) -> CutStep:
        return cut_into_stages(request, captures, balance=balance, num_chunks=num_chunks)

    def plan_in(order: StageOrder, cut: CutStep) -> list[PlannedStage]:
        ordered, known, key = order.request(request), list[KnownStage](), (cut.num_micro_batches, order)
        stages = plan_all(partial(_plan_stage, ordered, order.captures(stage), known) for stage in cut.stages)
        planned[key] = _number_buckets(stages)
        outcomes[key] = [PlannedStage.of(stage.lowered) for stage in planned[key]]
        return outcomes[key]

    order, cut = choose_number(request, one_rank, cut_in, plan_in)
    key = cut.num_micro_batches, order
    if key not in planned:
        plan_in(order, cut)
    stages = planned[key]
    pipeline = order.simulate(outcomes[key], cut.num_micro_batches)
    predicted = [
        replace(stage, lowered=replace(stage.lowered, plan=predict_stage(stage.plan, pipeline, order.why)))
        for stage in stages
    ]
    largest = max(predicted, key=lambda stage: stage.plan.peak_bytes["device"])
    return replace(largest, stages=tuple(predicted))


def _number_buckets(stages: Sequence[PlannedStep]) -> list[PlannedStep]:
    """The stages with the numbers of their buckets among those that all have now: a budget may have sliced some."""
    chunks = [stage.prepared.chunks for stage in stages]
    numbered = [stage.prepared.number_buckets(chunks) for stage in stages]
    return [
        stage if own is stage.prepared else PlannedStep(lower_step(own, own.graph_for(plan), plan, _target(own)), own)
        for stage, own in zip(stages, numbered, strict=True)
        for plan in (stage.plan,)
    ]


def _target(prepared: Prepared) -> Target:
    request = prepared.request
    return request.target(prepared.captured.device, on_cpu=request.machine.is_cpu)


def _plan_stage(request: Request, captures: Captures, known: list[KnownStage] | None = None) -> PlannedStep:
    """The step, or the stage, that ``captures`` are of; ``known``: stages that have been planned, to which it comes."""
    options, machine = request.options, request.machine
    staged = None if captures.pipe is None else prepare(request, captures)
    if staged is not None and known and (alike := _plan_alike(staged, known)) is not None:
        return alike
    budget = aim = budget_bytes(options.memory_budget, machine)
    nearest: int | None = None

    def decide(prepared: Prepared) -> tuple[Prepared, Target, Plan]:
        target = _target(prepared)
        with name_stage(captures.pipe):
            decided = replace(make_plan(Problem.create(prepared, target, options, aim)), memory_budget=budget)
        return prepared.adapt_to(decided), target, decided

    while True:
        try:
            if staged is not None:
                prepared, target, decided = decide(staged)
            else:
                ways = layouts(request, captures, None, decide_alone)
                prepared, target, decided = first_that_fits(ways, lambda one_rank: decide(prepare(request, one_rank)))
        except BudgetMissedError as missed:
            if nearest is None:
                raise
            raise BudgetMissedError(
                f"memory_budget={budget} bytes cannot be met with an arena: the plan that came nearest needs {nearest} "
                f"bytes; allow as much, or leave arena=True out",
                nearest,
            ) from missed
        lowered = lower_step(prepared, prepared.graph_for(decided), decided, target)
        peak = lowered.plan.peak_bytes["device"]
        if budget is None or not options.arena or peak <= budget:
            if known is not None and not decided.slices:  # of parameters that no other stage has
                known.append(KnownStage(Structure.of(prepared, decided), lowered))
            return PlannedStep(lowered, prepared)
        # Plans are searched for what is live at once; an arena takes more.
        nearest = min(peak, nearest or peak)
        aim = budget - (peak - decided.peak_bytes["device"])


def _plan_alike(prepared: Prepared, known: Sequence[KnownStage]) -> PlannedStep | None:
    """The stage with the plan of one that it is alike; None where it is alike none."""
    for stage in reversed(known):  # the one before it first
        own = Structure.of(prepared, stage.lowered.plan)
        plan = stage.plan_for(own)
        if plan is not None:
            lowered = lower_step(own.prepared, own.graph, plan, _target(prepared))
            if stage.comes_to(lowered):
                return PlannedStep(lowered, own.prepared)
    return None


def best_mesh(request: Request, control: Control) -> Mesh:
    """The mesh of all ranks on which the step of ``request``, which has no mesh yet, is fastest. Collective.

    With ``ZEROFX_DEBUG=1`` rank 0 writes the meshes that were compared.

    Raises:
        MemoryBudgetError: no mesh has a plan that fits.
        ZeroFXError: the step cannot be captured, or run on any mesh.
    """
    return control.share("choose a mesh", lambda: _choose(request, control.num_ranks))


def _choose(request: Request, num_ranks: int) -> Mesh:
    captures = Captures(request.model, request.batch, request.options, request.settings)
    captured = CapturedStep(request, captures)
    _, comparison = choose_mesh(
        request, captures, num_ranks, lambda mesh: plan_captured(captured, mesh, verbose=False),
        on_cpu=is_on_cpu(captures.first.device), without_stages=reason_against_stages(request),
    )  # fmt: skip
    if request.settings.debug:
        sys.stderr.write(f"{comparison}\n")
    return comparison.best.mesh
