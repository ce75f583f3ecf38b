"""From a batch to a built step that all ranks agree on: capture, plan, fit the budget, build.

Nothing of the user's is changed here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from zerofx.disk.cache import MALFORMED
from zerofx.driver.given_plan import check_budget, check_graph, check_host_budget
from zerofx.driver.micro_batches import MicroBatches
from zerofx.errors import InvalidGraphError, MemoryBudgetError, PlanError, UsageError, ZeroFXError, warn
from zerofx.ir.buckets import BucketLayout, layout_of
from zerofx.ir.graph import StepGraph
from zerofx.lowering.load import CompiledStep, RegionMemory, build
from zerofx.lowering.lower import LoweredStep, lower
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions, check_bucket_names
from zerofx.progress import watched
from zerofx.report.debug import write_debug
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.comm.control import Control, check_equal
from zerofx.runtime.state.optimizer import OptimizerBinding, group_of_parameters
from zerofx.runtime.state.state import TrainingState
from zerofx.scheduler.analysis.slices import Slices
from zerofx.scheduler.cost.catalog import machine_of_device
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.budget import BudgetMissedError
from zerofx.scheduler.search.evaluate import Estimates
from zerofx.scheduler.search.lasting import lasting_plan
from zerofx.scheduler.search.micro_batches import choose_micro_batches
from zerofx.scheduler.search.parameter_slices import choose_slices, slices_asked, slices_of
from zerofx.scheduler.search.planner import budget_bytes
from zerofx.settings import Settings

# At most so many plan/compile rounds; the first of them target the full budget, later ones a reduced one.
_FIT_ROUNDS, _FULL_ROUNDS = 8, 4


@dataclass(frozen=True)
class Prepared:
    """A captured step with the buckets of its parameters and the update of each.

    ``captured`` is the step in the least number of micro-batches that may be planned for. ``updates``: those of the
    coming step, then what later steps have in their place. ``sliced`` prepares the same step with other parameters in
    slices; None where the layout is given.
    """

    captures: MicroBatches
    layout: BucketLayout
    binding: OptimizerBinding
    updates: list[dict[int, UpdateProgram]]
    sliced: Callable[[Slices], Prepared] | None = None

    @property
    def programs(self) -> dict[int, UpdateProgram]:
        """The update of each bucket in the coming step."""
        return self.updates[0]

    @property
    def captured(self) -> StepGraph:
        return self.captures.first

    def agree(self, control: Control) -> None:
        """Compare with the other ranks.

        Raises:
            RankMismatchError: another rank captured another graph, or has another optimizer.
        """
        _agree_on_graph(self.captured, control)
        control.agree(
            "compare optimizers", f"{self.layout}\n{self.binding.variant}", "buckets and optimizer update",
            "Give every rank the same param groups and options.",
        )  # fmt: skip


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    captures: MicroBatches,
    options: CompileOptions,
    num_ranks: int,
    layout: BucketLayout | None,
    binding: OptimizerBinding | None,
    state: TrainingState | None,
    *,
    talk: bool,
) -> Prepared:
    """Do all that can fail because of what the user gave, beginning with the first of ``captures``.

    ``layout``, ``binding`` and ``state`` are those of an earlier batch, if there was one. ``talk``: whether this rank
    shows how long it takes.

    Raises:
        ZeroFXError: the model cannot be captured, or the optimizer does not belong to it.
    """
    with watched("capturing the model", show=talk):
        captured = captures.first
    groups = group_of_parameters(model, optimizer, captured.parameters, set(captured.gradients))
    if layout is not None and binding is not None:
        captures = captures.sliced(slices_of(layout))
        check_bucket_names(options.policy.keep, [bucket.name for bucket in layout.buckets])
        _check_gradients(captures.first, layout)
        return Prepared(captures, layout, binding, [binding.programs(state)])

    def sliced(slices: Slices) -> Prepared:
        cut = captures.sliced(slices)
        made = layout_of(cut.first, groups, num_ranks, options.block)
        check_bucket_names(options.policy.keep, [bucket.name for bucket in made.buckets])
        bound = OptimizerBinding(optimizer, made, captured.device, prefer_fused=options.compiles_regions)
        bound.programs(None, bound.held(dict(model.named_parameters())))
        return Prepared(cut, made, bound, bound.updates(ahead=options.memory_budget is not None), sliced)

    return sliced(slices_asked(captured, options))


def build_within_budget(
    prepared: Prepared, machine: Machine, options: CompileOptions, settings: Settings, control: Control
) -> tuple[Prepared, CompiledStep, RegionMemory]:
    """Plan and build the step; a budget holds for the compiled regions too.

    What a compiled region holds inside is known once it is compiled. Where the compiled step exceeds the budget, it is
    planned again with the measured memory of regions: up to 4 times for the same budget, then for the budget minus the
    largest shortfall seen, or for the least that a plan is estimated to need.

    Returns:
        What was prepared for the step (with parameters in slices, where the budget asks for that), the step, and the
        memory of compiled regions that its plan was made with.

    Raises:
        MemoryBudgetError: no plan fits the budget.
    """
    budget = budget_bytes(options.memory_budget, machine)
    first, needed, aim, short = prepared, None, budget, 0
    estimates: Estimates = {}
    found: Estimates = {}  # those of compiled regions
    for number in range(1, _FIT_ROUNDS + 1):
        try:
            with _carrying_out(options):
                prepared, captured, plan = _agree_on_plan(
                    first, machine, options, settings, control, aim, estimates, found
                )
        except MemoryBudgetError as refusal:
            if needed is None or budget is None:
                raise
            if aim == budget or not isinstance(refusal, BudgetMissedError) or refusal.least_bytes > budget:
                break
            aim = refusal.least_bytes
            continue
        with _carrying_out(options):
            lowered = lower_prepared(
                captured, plan, prepared.layout, prepared.programs, machine, options, settings, estimates,
                talk=control.rank == 0,
            )  # fmt: skip
            check_host_budget(lowered, options, machine)
            compiled = build(lowered, prepared.layout, settings, control, options.backend)
        if options.plan is not None:
            check_budget(compiled.plan, options, machine)
        peak = compiled.plan.peak_bytes["device"]
        if budget is None or peak <= budget:
            return prepared, compiled, found
        needed = min(peak, needed or peak)
        short = max(short, peak - plan.peak_bytes["device"])
        if number >= _FULL_ROUNDS:
            aim = budget - short
        found.update(compiled.memory)
        estimates.update(found)
    assert needed is not None
    raise BudgetMissedError(
        f"memory_budget={budget} bytes cannot be met with compiled regions: the plan that came nearest needs {needed} "
        f"bytes; allow as much, or use backend='eager'",
        needed,
    )


@contextlib.contextmanager
def _carrying_out(options: CompileOptions) -> Iterator[None]:
    """Whatever a plan from a file says that no search does is the file's fault, and said so.

    Raises:
        PlanError: the plan that was given cannot be carried out; says what happens.
    """
    try:
        yield
    except MALFORMED as error:
        ours = isinstance(error, ZeroFXError) and not isinstance(error, InvalidGraphError)
        if options.plan is None or ours:
            raise
        raise PlanError(
            f"expected a plan that can be carried out for this model, found one that cannot be "
            f"({type(error).__name__}: {str(error).strip() or 'no more is known'}): make it anew, it is not as it was"
        ) from error


def lower_prepared(
    captured: StepGraph,
    plan: Plan,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    estimates: Estimates,
    *,
    talk: bool,
) -> LoweredStep:
    """A captured graph, which stays as it is, with ``plan`` carried out; other arguments as for ``lower``."""
    lowered = lower(
        captured.clone(), plan, layout, programs, machine, settings, on_cpu=is_on_cpu(captured.device), talk=talk,
        fused=options.compiles_regions, estimates=estimates,
    )  # fmt: skip
    if talk:
        write_debug(lowered, settings.debug)
    return lowered


def _agree_on_plan(
    prepared: Prepared,
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    control: Control,
    memory_budget: int | None,
    estimates: Estimates,
    found: Estimates,
) -> tuple[Prepared, StepGraph, Plan]:
    """Rank 0's plan, on all ranks, with what it is for; what fails on rank 0 fails everywhere.

    ``found``: those of ``estimates`` that were read from compiled regions.
    """

    def plan_for(one: Prepared) -> Plan:
        def plan_in(num_micro_batches: int) -> Plan:
            captured = one.captures.graph(num_micro_batches)
            return lasting_plan(
                captured, one.layout, one.updates, machine, options, settings, memory_budget,
                on_cpu=is_on_cpu(captured.device), estimates=estimates, found=found,
            )  # fmt: skip

        return choose_micro_batches(one.captures.candidates, memory_budget, plan_in)

    def make() -> str:
        assert not isinstance(options.plan, Path), "a file has been read"
        if options.plan is not None:
            return options.plan.to_json()
        again = prepared.sliced if options.tile == "auto" else None
        return choose_slices(prepared, prepared.captured, memory_budget, again, plan_for)[1].to_json()

    shared = Plan.from_json(control.share("share the plan", make))
    sliced = prepared.sliced
    if shared.slices != prepared.captures.slices and sliced is not None:
        prepared = control.attempt("prepare slices of parameters", lambda: sliced(shared.slices))
        prepared.agree(control)
    captures, captured = prepared.captures, prepared.captured
    if shared.num_micro_batches != captured.num_micro_batches:
        captured = control.attempt("capture a step", lambda: captures.graph(shared.num_micro_batches))
        _agree_on_graph(captured, control)
    check_graph(shared, captured, prepared.layout)
    hashes = control.gather(shared.decisions_hash(), "compare plans")
    check_equal(hashes, "plan", "This is a defect of zerofx: a plan changed on its way between ranks.")
    return prepared, captured, shared


def _agree_on_graph(captured: StepGraph, control: Control) -> None:
    control.agree(
        "compare captured graphs", captured.text(), "captured graph",
        "Build the same model on every rank. Where the forward computes with the rank's number, which is a constant of "
        "each graph, pass it as a tensor in the batch: step(x, rank=torch.tensor(rank)).",
    )  # fmt: skip


def _check_gradients(captured: StepGraph, layout: BucketLayout) -> None:
    trained = {slot.name for bucket in layout.buckets if bucket.trainable for slot in bucket.slots}
    changed = sorted(trained ^ set(captured.gradients))
    if changed:
        raise UsageError(
            f"expected a gradient for the parameters that the first batch trained, found a difference in "
            f"{', '.join(changed[:5])}: parameters must be trained, or not, in every step"
        )


def machine_at_hand(device: torch.device, options: CompileOptions, control: Control) -> Machine:
    """The machine that the options give, or else the built-in row of the device, or the plain CPU's: rank 0's.

    Where ``options.wire`` asks where nodes end, a node has as many ranks as ``torchrun`` has started on it.
    """
    return control.share("describe the machine", lambda: _machine_here(device, options))


def _machine_here(device: torch.device, options: CompileOptions) -> Machine:
    if options.machine is not None:
        return options.machine
    found = _row_of(device)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return replace(found, ranks_per_node=int(local)) if options.wire != "exact" and local.isdigit() else found


def _row_of(device: torch.device) -> Machine:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = machine_of_device(properties.name, properties.total_memory)
        if found is not None:
            # Its driver keeps a part of what a device has by its name.
            num_bytes = min(found.device.memory_bytes, properties.total_memory)
            return replace(found, device=replace(found.device, memory_bytes=num_bytes))
        warn(f"no machine row for {properties.name}: predicted times are an H100's; give machine=Machine.measure()")
        return Machine.named("h100-sxm")
    return Machine.named("cpu")


def describe_request(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: CompileOptions, settings: Settings
) -> str:
    """What must be the same on every rank, a line each."""
    lines = options.texts("ranks")
    plan = options.plan
    lines.append(f"plan: {plan.decisions_hash() if isinstance(plan, Plan) else 'from a file' if plan else None}")
    lines.append(f"ZEROFX_DISABLE: {','.join(sorted(settings.disable))}")
    kernels = "auto" if settings.kernels is None else ",".join(sorted(settings.kernels))
    lines.append(f"ZEROFX_KERNELS: {kernels}")
    lines.append(f"optimizer: {type(optimizer).__name__} with {len(optimizer.param_groups)} param group(s)")
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            frozen = " frozen" if kind == "parameter" and not tensor.requires_grad else ""
            lines.append(f"{kind} {name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{frozen}")
    return "\n".join(lines)
