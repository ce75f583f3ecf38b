"""From a request to a step that can be run, the same on every rank: captured, planned, lowered, loaded, kept.

``zerofx.compile`` comes here for every batch shape; ``zerofx.plan`` and ``zerofx.tune`` take the same steps one by one.
What the way leads through: ``driver/captures.py`` (captured), ``driver/prepared.py`` (buckets and updates),
``scheduler/search/planner.py`` (planned), ``lowering/lower.py`` (lowered), ``lowering/load.py`` (compiled and loaded),
``driver/kept/step_cache.py`` (kept). Nothing of the user's is changed on it.
"""

from __future__ import annotations

import contextlib
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zerofx.budgets import budget_bytes
from zerofx.capture.checks import device_of
from zerofx.disk.cache import MALFORMED
from zerofx.driver.captures import Captures
from zerofx.driver.given_plan import check_budget, check_graph, check_host_budget
from zerofx.driver.kept import step_cache
from zerofx.driver.lent import own_part
from zerofx.driver.prepared import Earlier, Prepared, Request, Shared, agree_on_graph, prepare
from zerofx.driver.shardings import (
    check_batches,
    choose_products,
    lay_out,
    record_shardings,
    share_computation,
)
from zerofx.driver.stage_order import PlannedStage, StageOrder, choose_number
from zerofx.driver.stages import CutStep, choose_worst, cut_into_stages, name_stage, reason_against_stages
from zerofx.errors import (
    InternalError,
    InvalidGraphError,
    MemoryBudgetError,
    PlanError,
    UsageError,
    ZeroFXError,
    notify,
    wrap_defects,
)
from zerofx.garbage import limit_garbage_collection
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.lowering.load import CompiledStep, build
from zerofx.lowering.lower import LoweredStep, lower
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.options import CompileOptions
from zerofx.progress import watch_progress
from zerofx.report.schedule import make_schedule
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.stages import agree_in_stages, share_in_stages
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.stages import chunks_in_order, predict_stage, simulate_stages, stage_seconds
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import BudgetMissedError, Problem, first_that_fits
from zerofx.scheduler.search.stage_cuts import Balance
from zerofx.scheduler.search.target import RegionMemory, Target
from zerofx.units import format_bytes

# At most so many plan/compile rounds; the first of them target the full budget, later ones a reduced one.
_FIT_ROUNDS, _FULL_ROUNDS = 8, 4


@dataclass(frozen=True)
class OwnStage:
    """The request for this rank's stage, in the order that all take, and its captures; ``why`` it is that order.

    ``cuts`` as for ``CutStep``. Without stages all of the step is the only one.
    """

    request: Request
    captures: Captures
    cuts: tuple[int, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Built:
    """A step that can be run, and what its model is taken over with."""

    compiled: CompiledStep
    layout: BucketLayout
    binding: OptimizerBinding
    programs: dict[int, UpdateProgram]
    shared: Shared


def build_step(request: Request, earlier: Earlier | None, control: Control) -> Built:
    """The step that is asked for, from disk or built; ``earlier`` is None for the first one of a model.

    Raises:
        MemoryBudgetError: no plan fits the budget.
        ZeroFXError: as ``prepare``.
    """
    with control.report_interrupts("build a step"), _prepare_compiler(request), limit_garbage_collection():
        built = _build(request, earlier, control)
    if request.verbose and request.locations is None:
        _warn_of_host(built.compiled.plan, request.machine)
        _warn_of_exact_updates(built.compiled.plan, request.options)
    return built


def _build(request: Request, earlier: Earlier | None, control: Control) -> Built:
    check_batches(request.batch, request.mesh, control.gather)
    captures, recalled = control.attempt("capture a step", lambda: _capture(request, earlier))
    if step_cache.is_everywhere(recalled, control):
        assert recalled is not None
        loaded = step_cache.load(request, captures, recalled, control)
        if loaded is not None:
            layout, programs = own_part(recalled.step.layout, recalled.programs)
            shared = record_shardings(request, captures, loaded.plan, layout.placements)
            return Built(loaded, layout, recalled.binding, programs, shared)

    def plan_and_compile(
        laid_out: tuple[Captures, Balance],
    ) -> tuple[OwnStage, Prepared, CompiledStep, RegionMemory]:
        own = _take_stage(request, *laid_out, earlier, control)
        prepared = _prepare(own.request, own.captures, earlier, control)
        with wrap_defects("plan, emit and load a step"):
            return own, *_fit_budget(prepared, control, own.why)

    own, prepared, compiled, memory = first_that_fits(
        lay_out(request, captures, earlier, control.share), plan_and_compile
    )
    step_cache.keep(own.request, own.captures, earlier, prepared, compiled, memory)
    layout, programs = own_part(prepared.layout, prepared.programs)
    placements = prepared.layout.placements
    if request.mesh.pipe > 1 and request.mesh.model > 1:
        placements = dict(ChainMap(*control.gather(placements, "share how parameters lie")))
    shared = record_shardings(request, captures, compiled.plan, placements)
    if (pipe := prepared.captures.pipe) is not None:
        shared = replace(shared, cuts=own.cuts, buckets=pipe.buckets, by_chunk=pipe.by_chunk)
    return Built(compiled, layout, prepared.binding, programs, shared)


def _take_stage(
    request: Request, one_rank: Captures, balance: Balance, earlier: Earlier | None, control: Control
) -> OwnStage:
    """This rank's stage of what one rank of the model axis runs, in the order that all stages take. Collective.

    Raises:
        MemoryBudgetError: no order fits the budget.
    """
    if request.mesh.pipe == 1:
        return OwnStage(request, one_rank)
    given, place = request.options.plan, request.mesh.place(control.rank, "pipe")
    if isinstance(given, Plan):
        hint = "Give all ranks of a stage the plan of that."
        agree_in_stages(control, request.mesh, "compare plans", given.decisions_hash(), "plan", hint)
    _check_model(request)
    with wrap_defects("plan a step"):
        order, cut = choose_number(
            request,
            one_rank,
            lambda captures, num_chunks: _cut(request, captures, earlier, control, balance, num_chunks),
            lambda order, cut: _plan_in(request, order, cut.stages[place], earlier, control),
        )
    return OwnStage(order.request(request), order.captures(cut.stages[place]), cut.cuts, order.why)


def _plan_in(
    request: Request, order: StageOrder, own: Captures, earlier: Earlier | None, control: Control
) -> list[PlannedStage]:
    """All stages as they are planned in an order, of which ``own`` is this rank's. Collective.

    Raises:
        MemoryBudgetError: one of them fits no budget.
    """
    captures = control.attempt("capture a step", lambda: order.captures(own))
    prepared = _prepare(replace(order.request(request), verbose=False), captures, earlier, control)
    target, budget = target_of(prepared), budget_bytes(request.options.memory_budget, request.machine)
    prepared, captured, plan = _agree_on_plan(prepared, target, budget, control)
    lowered = control.attempt("plan a stage", lambda: lower_step(prepared, captured, plan, target))
    of_ranks = control.gather(PlannedStage.of(lowered), "plan stages in an order")
    return [of_ranks[rank] for rank in request.mesh.first_of_stages]


def _check_model(request: Request) -> None:
    """Raises:
    UsageError: the model is one that cannot run in stages.
    """
    trouble = reason_against_stages(request)
    if trouble:
        raise UsageError(f"expected a model that can run on a mesh with an axis 'pipe', found {trouble}; leave it out")


def _cut(
    request: Request,
    captures: Captures,
    earlier: Earlier | None,
    control: Control,
    balance: Balance,
    num_chunks: int | None,
) -> CutStep:
    """The step in its stages, the same on all ranks, which have captured the same. Collective."""
    step = control.attempt("capture a step", lambda: captures.rank_graph(captures.candidates[0]))
    agree_on_graph(step, control, replace(request.mesh, pipe=1))
    strides = str([(info.name, info.stride) for info in step.parameters])  # in which stages send each other some
    control.agree("compare parameters", strides, "strides", "Build the same model on every rank.")
    cut = control.attempt(
        "cut the step into stages", lambda: cut_into_stages(request, captures, earlier, balance, num_chunks)
    )
    control.agree("cut the step into stages", str(cut.cuts), "cuts", "Give every rank the same options.")
    return cut


def find_kept_plan(request: Request, earlier: Earlier, control: Control) -> Plan | None:
    """The plan of a step that an earlier run has kept on every rank, which takes little to load; None for none.

    Raises:
        ZeroFXError: as ``prepare``.
    """
    _, recalled = control.attempt("capture a step", lambda: _capture(request, earlier))
    if not step_cache.is_everywhere(recalled, control):
        return None
    assert recalled is not None
    return recalled.step.program.plan


def prepare_together(request: Request, control: Control) -> Prepared:
    """A model's first step, captured, and shared along the axis ``model``; the same on all ranks. Collective.

    Raises:
        ZeroFXError: as ``prepare``.
    """
    captures = control.attempt("capture a step", lambda: _captures(request, {}))
    one_rank = share_computation(request, captures, None, control.share)
    return _prepare(request, choose_products(request, one_rank, None, control.share), None, control)


def _prepare(request: Request, one_rank: Captures, earlier: Earlier | None, control: Control) -> Prepared:
    prepared = control.attempt("capture a step", lambda: prepare(request, one_rank, earlier))
    prepared = _number_buckets(prepared, control)
    prepared.agree(control)
    return prepared


def fits_budget(request: Request, control: Control) -> bool:
    """True if a plan of a model's first step fits the budget; nothing is compiled. Collective.

    Raises:
        ZeroFXError: as ``prepare``.
    """
    captures = control.attempt("capture a step", lambda: _captures(request, {}))
    budget = budget_bytes(request.options.memory_budget, request.machine)

    def plan_once(laid_out: tuple[Captures, Balance]) -> None:
        own = _take_stage(request, *laid_out, None, control)
        prepared = _prepare(own.request, own.captures, None, control)
        _agree_on_plan(prepared, target_of(prepared), budget, control)

    try:
        first_that_fits(lay_out(request, captures, None, control.share), plan_once)
    except MemoryBudgetError:
        return False
    return True


def _prepare_compiler(request: Request) -> contextlib.AbstractContextManager[None]:
    """While open, what Inductor does once in a process is done next to the capture."""
    if not request.options.compiles_regions:
        return contextlib.nullcontext()
    # Inductor takes seconds to import: only who needs it pays.
    from zerofx.codegen.inductor.cpp import preparation

    return preparation(device_of(request.model).type).run()


def _captures(request: Request, strides: Mapping[int, tuple[int, ...]]) -> Captures:
    return Captures(
        request.model, request.batch, request.options, request.settings, strides, verbose=request.verbose,
        sizes=request.sizes,
    )  # fmt: skip


def _capture(request: Request, earlier: Earlier | None) -> tuple[Captures, step_cache.CacheHit | None]:
    """The step's forward, recorded, and the step if an earlier run has kept it."""
    captures = _captures(request, earlier.state.strides() if earlier is not None else {})
    with watch_progress("capturing the model", show=request.verbose):
        key = step_cache.key_of_step(request, captures, earlier)
    return captures, step_cache.find(key, request, captures, earlier) if key is not None else None


def _fit_budget(prepared: Prepared, control: Control, order: str = "") -> tuple[Prepared, CompiledStep, RegionMemory]:
    """Plan, lower and compile a step; a budget holds for the compiled regions too.

    What a compiled region holds inside is known once it is compiled. Where the compiled step exceeds the budget, it is
    planned again with the measured memory of regions: up to 3 times for the same budget, then for the budget minus the
    largest shortfall seen, or for the least that a plan is estimated to need. ``order``: why stages take
    micro-batches in the order that is planned for.

    Returns:
        What was prepared for the step (with parameters in slices, where the budget asks for that), the step, and the
        memory of compiled regions that its plan was made with.

    Raises:
        MemoryBudgetError: no plan fits the budget.
    """
    request, options = prepared.request, prepared.request.options
    budget = budget_bytes(options.memory_budget, request.machine)
    target = target_of(prepared)
    needed, aim, short = None, budget, 0
    for number in range(1, _FIT_ROUNDS + 1):
        try:
            with _blame_plan(options):
                planned, captured, plan = _agree_on_plan(prepared, target, aim, control)
        except MemoryBudgetError as refusal:
            if needed is None or budget is None or request.mesh.pipe > 1:
                raise
            if aim == budget or not isinstance(refusal, BudgetMissedError) or refusal.least_bytes > budget:
                break
            aim = refusal.least_bytes
            continue
        with _blame_plan(options):
            lowered = lower_step(planned, captured, plan, target)
            compiled = build(lowered, planned.layout, target, control)
            if request.mesh.pipe > 1:
                compiled = _predict_among_stages(compiled, lowered, control, order)
        if options.plan is not None:
            check_budget(compiled.plan, options, request.machine)
        peak = compiled.plan.peak_bytes["device"]
        fits = budget is None or peak <= budget
        if fits if request.mesh.pipe == 1 else all(control.gather(fits, "fit stages into the budget")):
            return planned, compiled, target.measured_regions
        assert budget is not None, "without one all plans fit"
        needed = min(peak, needed or peak)
        short = max(short, peak - plan.peak_bytes["device"])
        # Once all regions are known, the same plan would be made again for the same budget.
        if number >= _FULL_ROUNDS or compiled.memory.keys() <= target.measured_regions.keys():
            aim = budget - short
        target = target.add_measured(compiled.memory)
    assert needed is not None
    raise BudgetMissedError(
        f"memory_budget={budget} bytes cannot be met with compiled regions: the plan that came nearest needs {needed} "
        f"bytes; allow as much, or use backend='eager'",
        needed,
    )


def _predict_among_stages(compiled: CompiledStep, lowered: LoweredStep, control: Control, order: str) -> CompiledStep:
    """A stage's step with the seconds that it takes among the others. Collective."""
    plan = compiled.plan
    own = stage_seconds(lowered.graph, lowered.simulation), plan.weights_lag
    of_ranks = control.gather(own, "predict a step in stages")
    stages, lags = zip(*(of_ranks[rank] for rank in plan.mesh.first_of_stages), strict=True)
    pipeline = simulate_stages(
        chunks_in_order(stages), plan.num_micro_batches, by_turns=not plan.by_layer, lags=lags, num_stages=len(stages)
    )
    predicted = predict_stage(plan, pipeline, order)
    details = replace(compiled.lowered, plan=predicted)
    return replace(compiled, plan=predicted, details=lambda: details)


def target_of(prepared: Prepared) -> Target:
    """The target to plan the step for, on the device that it was captured for."""
    device = prepared.captured.device
    return prepared.request.target(device, on_cpu=is_on_cpu(device))


def lower_step(prepared: Prepared, captured: StepGraph, plan: Plan, target: Target) -> LoweredStep:
    """``captured``, which stays as it is, with ``plan`` carried out; writes what ``ZEROFX_DEBUG`` asks for.

    Raises:
        MemoryBudgetError: the plan, which was not searched within ``host_budget``, takes more of the host.
    """
    lowered = lower(captured, plan, prepared.layout, prepared.programs, target)
    check_host_budget(lowered, prepared.request.options, prepared.request.machine)
    if target.verbose:
        if target.settings.debug >= 3:
            sys.stderr.write(f"{make_schedule(lowered)}\n")
        if target.settings.debug >= 4:
            sys.stderr.write(lowered.emitted.source)
    return lowered


def _agree_on_plan(
    prepared: Prepared, target: Target, memory_budget: int | None, control: Control
) -> tuple[Prepared, StepGraph, Plan]:
    """Rank 0's plan, on all ranks, with what it is for; what fails on rank 0 fails everywhere."""
    options = prepared.request.options

    def plan_to_share() -> str:
        assert not isinstance(options.plan, Path), "a file has been read"
        if options.plan is not None:
            return options.plan.to_json()
        request = prepared.request
        with name_stage(prepared.captures.pipe):
            plan = make_plan(Problem.create(prepared, target, options, memory_budget, request.locations, request.fixed))
        if options.arena:  # the plan is within the whole budget, though it was searched for less
            plan = replace(plan, memory_budget=budget_bytes(options.memory_budget, request.machine))
        return plan.to_json()

    mesh = prepared.request.mesh
    plan = Plan.from_json(share_in_stages(control, mesh, "share the plan", plan_to_share, choose_worst))
    if prepared.may_be_sliced and _is_anywhere(not prepared.is_for(plan), mesh, control):
        prepared = control.attempt("prepare slices of parameters", lambda: prepared.adapt_to(plan))
        prepared = _number_buckets(prepared, control)
        prepared.agree(control)
    captured = prepared.captured
    if (plan.num_micro_batches, plan.by_layer) != (captured.num_micro_batches, captured.by_layer):
        captured = control.attempt("capture a step", lambda: prepared.graph_for(plan))
        agree_on_graph(captured, control, mesh)
    check_graph(plan, captured, prepared.layout)
    agree_in_stages(
        control, mesh, "compare plans", plan.decisions_hash(), "plan",
        "This is a defect of zerofx: a plan changed on its way between ranks.",
    )  # fmt: skip
    return prepared, captured, plan


def _is_anywhere(is_here: bool, mesh: Mesh, control: Control) -> bool:
    """True if something is so on any rank; it is alike on all of a stage. Collective in stages."""
    return is_here if mesh.pipe == 1 else any(control.gather(is_here, "share the plan"))


def _number_buckets(prepared: Prepared, control: Control) -> Prepared:
    """The same with the numbers of a stage's buckets among those that all stages have now. Collective in stages."""
    if prepared.captures.pipe is None or not prepared.captured.gradients:
        return prepared
    of_ranks = control.gather(prepared.chunks, "number the buckets of stages")
    return prepared.number_buckets([of_ranks[rank] for rank in prepared.request.mesh.first_of_stages])


def _warn_of_exact_updates(plan: Plan, options: CompileOptions) -> None:
    """Say that ``delayed_update`` delays nothing: all updates need whole parameters."""
    if options.delayed_update is not None and not any(decision.delayed for decision in plan.states):
        notify(
            "delayed_update delays no update here: the optimizer needs whole parameters, which the device updates in "
            "their own step, with states that wait on the host"
        )


def _warn_of_host(plan: Plan, machine: Machine) -> None:
    """Say that a plan takes more of the host than there is, where no other was found, or this one was given."""
    taken, there = plan.peak_bytes.get("host", 0), machine.host_bytes_per_rank
    if taken > there:
        notify(
            f"the plan takes {format_bytes(taken)} of host memory on each rank, of {format_bytes(there)} that "
            f"{machine.name} has for one: raise memory_budget=, let offload= use 'nvme', or use more ranks"
        )


@contextlib.contextmanager
def _blame_plan(options: CompileOptions) -> Iterator[None]:
    """Whatever a plan from a file says that no search does is the file's fault, and said so.

    Raises:
        PlanError: the plan that was given cannot be carried out; says what happens.
    """
    try:
        yield
    except MALFORMED as error:
        ours = isinstance(error, ZeroFXError) and not isinstance(error, InvalidGraphError | InternalError)
        if options.plan is None or ours or isinstance(error, torch.OutOfMemoryError):
            raise
        cause = error.__cause__ if isinstance(error, InternalError) and error.__cause__ is not None else error
        raise PlanError(
            f"expected a plan that can be carried out for this model, found one that cannot be "
            f"({type(cause).__name__}: {str(cause).strip() or 'no more is known'}): make the plan again with "
            f"zerofx.plan or zerofx.tune"
        ) from error
