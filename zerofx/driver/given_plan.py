"""A plan that the user gave: read it, and see that it is for what it is used for, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from zerofx.budgets import GRADIENTS, budget_bytes, host_budget_bytes
from zerofx.errors import MemoryBudgetError, PlanError, UsageError, notify
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.lowering.lower import LoweredStep
from zerofx.mesh_option import AUTO, mesh_for
from zerofx.options import CompileOptions
from zerofx.precision import dtype_name
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.cost.machine import MEASURED, Machine
from zerofx.scheduler.decide.residency import PolicyOptions
from zerofx.scheduler.decide.undecided import summarise, summarise_graph
from zerofx.scheduler.plan.facts import BucketSummary
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan, stage_path
from zerofx.units import format_bytes, format_count

T = TypeVar("T")

_SHOWN = 8  # differences of one kind


def take_plan(options: CompileOptions, machine: Machine, control: Control) -> CompileOptions:
    """``options`` with the plan that they give, read from its file by rank 0, and checked against the other options.
    In stages each rank reads that of its own.

    Raises:
        PlanError: there is no plan in the file, or it is for another stage, precision, machine or number of ranks.
        MemoryBudgetError: the plan needs more than ``memory_budget``.
        UsageError: another option contradicts the plan.
    """
    if options.plan is None:
        return options
    given, mesh = options.plan, options.mesh
    if isinstance(given, Plan):
        plan = given
    elif isinstance(mesh, Mesh) and mesh.pipe > 1:
        own = stage_path(given, control.rank // (mesh.num_ranks // mesh.pipe), mesh.pipe)
        plan = control.attempt("read the plan", lambda: Plan.load(own))
    else:
        plan = control.share("read the plan", lambda: Plan.load(given))
    control.attempt("check the plan", lambda: _check(plan, options, machine, control))
    if control.rank == 0 and options.policy != PolicyOptions():
        notify("prefetch and keep_gathered have no effect with a plan: it says when every bucket is gathered")
    if control.rank == 0 and options.shardings and plan.model > 1:
        notify("shardings has no effect with a plan: it says how every value lies on the axis 'model'")
    return replace(options, plan=plan)


def _check(plan: Plan, options: CompileOptions, machine: Machine, control: Control) -> None:
    """Raises: as ``take_plan``."""
    num_stage_ranks = control.num_ranks // plan.pipe or 1
    settings = {
        "stage": (str(plan.stage), str(options.stage)),
        "precision": (_precision(plan.precision), _precision(options.precision.compute)),
        "products in fp8": (plan.fp8 or "none", options.precision.fp8 or "none"),
        "micro-batches": (str(plan.num_micro_batches), _micro_batches(options, plan)),
        "order": (_order(plan), _order_in_options(options, plan)),
        "wire": (plan.wire, options.wire),
        "saved": (plan.saved or "None", options.saved or "None"),
        "max_grad_norm": (str(plan.max_grad_norm), str(options.max_grad_norm)),
        "grad_norms": (str(plan.grad_norms), str(options.grad_norms)),
        "keep_gradients": (str(bool(plan.kept_gradients)), str(bool(options.keep_gradients))),
        "loss": (_loss(plan.loss_scaled), _loss(options.loss_scale is not None)),
        "ranks": (str(plan.num_ranks), str(control.num_ranks)),
        "mesh": (plan.mesh.axes_text, _axes(plan, options, control.num_ranks)),
        "part on the axis 'pipe'": (str(plan.pipe_stage + 1), str(control.rank // num_stage_ranks + 1)),
        "machine": (plan.machine.removesuffix(MEASURED), machine.name.removesuffix(MEASURED)),
    }
    _refuse(_differences(settings), "Give the options that the plan was made with, or leave plan out to have one made.")
    check_budget(plan, options, machine)
    for option, expected, what in _contradictions(plan, options):
        raise UsageError(
            f"expected {option}={expected} with a plan that {what}, found {option}={getattr(options, option)!r}: give "
            f"it so, or leave plan out to have another made"
        )


def _axes(plan: Plan, options: CompileOptions, num_ranks: int) -> str:
    """The axes that are asked for: the plan's where the best are."""
    return plan.mesh.axes_text if options.mesh == AUTO else mesh_for(options.mesh, num_ranks).axes_text


def _contradictions(plan: Plan, options: CompileOptions) -> Iterator[tuple[str, str, str]]:
    """Options that are at odds with a plan: the name of each, what it should be, and what the plan does."""
    planned = "mesh" if plan.has_parts else "shard"
    if options.states_over not in ("auto", planned) and plan.mesh.replicate > 1:
        yield "states_over", repr(planned), "has optimizer states so"
    if options.recompute == "none" and plan.recomputes:
        yield "recompute", "'auto'", f"computes {len(plan.recomputes)} values again"
    if options.offload == "none" and (plan.offloads or plan.states or plan.parameters or plan.gradients):
        yield (
            "offload",
            "'auto'",
            (
                f"has {len(plan.offloads)} values, the states of {len(plan.states)} buckets, the parameters of "
                f"{len(plan.parameters)} and the gradients of {len(plan.gradients)} off the device"
            ),
        )
    tiers = sorted({decision.tier for decision in plan.gradients})
    if isinstance(options.offload, Mapping) and plan.num_micro_batches > 1 and tiers != [options.offload[GRADIENTS]]:
        where = f"on {' and '.join(tiers)}" if tiers else "on the device"
        yield "offload", "'auto'", f"has gradients wait {where} between micro-batches"
    delayed = [decision for decision in plan.states if decision.delayed]
    # Updates of whole parameters are not delayed, and none of a plan may be.
    if (delayed and options.delayed_update is None) or (not plan.states and options.delayed_update is not None):
        number = "a number of steps" if delayed else "None"
        yield "delayed_update", number, f"delays the updates of {len(delayed)} buckets"


def check_budget(plan: Plan, options: CompileOptions, machine: Machine) -> None:
    """Check the predicted peak of a plan that was given, if it has one, against the budget.

    Raises:
        MemoryBudgetError: says both.
    """
    budget = budget_bytes(options.memory_budget, machine)
    if budget is None or plan.prediction is None:
        return
    peak = plan.peak_bytes["device"]
    if peak > budget:
        raise MemoryBudgetError(
            f"expected a plan within memory_budget={format_bytes(budget)} ({budget} bytes), found one whose peak is "
            f"{format_bytes(peak)} ({peak} bytes): allow as much, or leave plan out to have one made within the budget"
        )


def check_host_budget(lowered: LoweredStep, options: CompileOptions, machine: Machine) -> None:
    """Check what a step takes of the host's pool against the budget for it, which no search has held to where the plan
    was given, or where there is no ``memory_budget`` and options say what is on the host.

    Raises:
        MemoryBudgetError: says both.
    """
    budget = host_budget_bytes(options.host_budget, machine)
    needed = lowered.simulation.live.host_block_bytes
    if budget is not None and needed > budget:
        remedy = "have less there (delayed_update=, offload=)"
        if options.plan is not None:
            remedy = "leave plan out to have one made within the budget"
        raise MemoryBudgetError(
            f"expected a plan within host_budget={format_bytes(budget)} ({budget} bytes), found one that takes "
            f"{format_bytes(needed)} ({needed} bytes) of host memory: allow as much, or {remedy}"
        )


def check_graph(plan: Plan, captured: StepGraph, layout: BucketLayout) -> None:
    """Check that a plan was made for this captured graph and these buckets.

    Raises:
        PlanError: names what differs: tensors by shape, operators by number, buckets by size.
    """
    differences = list(_graph_differences(plan, captured))
    differences += list(_bucket_differences(plan.buckets, tuple(summarise(bucket) for bucket in layout.buckets)))
    differences = differences or list(_decision_differences(plan, layout))
    _refuse(differences, "Make the plan anew for this model, batch and optimizer.")


@dataclass(frozen=True)
class _Difference:
    what: str
    expected: str
    given: str

    def __str__(self) -> str:
        return f"  {self.what}: expected {self.expected}, found {self.given}"


def _refuse(differences: list[_Difference], hint: str) -> None:
    if differences:
        lines = "\n".join(map(str, differences))
        raise PlanError(f"expected what the plan was made for, found something else:\n{lines}\n{hint}")


def _graph_differences(plan: Plan, captured: StepGraph) -> Iterator[_Difference]:
    fingerprint = captured.fingerprint()
    if plan.graph == fingerprint:
        return
    yield _Difference("graph", plan.graph[:12], fingerprint[:12])
    before, after = plan.summary, summarise_graph(captured)
    if before is None:
        return
    tensors = _compare_by_name(before.placeholders, after.placeholders, str)
    operators = _compare_by_name(
        before.operators, after.operators, lambda number: f"{number} call{'s' if number > 1 else ''}"
    )
    yield from _few(tensors, "tensors")
    yield from _few(operators, "operators")
    if not tensors and not operators:
        yield _Difference("nodes", "these operators with their arguments", "the same ones with others, or elsewhere")


def _bucket_differences(before: tuple[BucketSummary, ...], after: tuple[BucketSummary, ...]) -> Iterator[_Difference]:
    known = [{f"bucket {b.name}{_label(b)}": _describe(b) for b in buckets} for buckets in (before, after)]
    yield from _few(_compare_by_name(known[0], known[1], str), "buckets")


def _decision_differences(plan: Plan, layout: BucketLayout) -> Iterator[_Difference]:
    """Buckets that are not decided about as often as they have to be: a step would leave their update out, say."""
    counts = Counter(decision.bucket for decision in plan.reduces)
    for index, bucket in enumerate(layout.buckets):
        wanted = int(bucket.trainable)
        if counts.pop(index, 0) != wanted:
            yield _Difference(f"reductions of bucket {bucket.name}", str(wanted), "another number")
    for kind in ("states", "parameters", "gradients"):
        decided = Counter(decision.bucket for decision in getattr(plan, kind))
        counts.update({index: 1 for index in decided if index not in range(len(layout.buckets))})
        yield from (
            _Difference(f"decisions about the {kind} of bucket {index}", "one at the most", str(number))
            for index, number in decided.items()
            if number > 1
        )
    counts.update({d.bucket: 1 for d in plan.gathers if d.bucket not in range(len(layout.buckets))})
    yield from (
        _Difference(f"bucket {index}", f"numbers below {len(layout.buckets)}", "decisions about it") for index in counts
    )


def _compare_by_name(before: Mapping[str, T], after: Mapping[str, T], text: Callable[[T], str]) -> list[_Difference]:
    return _differences({
        name: (text(before[name]) if name in before else "none", text(after[name]) if name in after else "none")
        for name in dict.fromkeys([*before, *after])
    })  # fmt: skip


def _differences(pairs: Mapping[str, tuple[str, str]]) -> list[_Difference]:
    return [_Difference(what, expected, given) for what, (expected, given) in pairs.items() if expected != given]


def _few(differences: list[_Difference], kind: str) -> Iterator[_Difference]:
    yield from differences[:_SHOWN]
    left = len(differences) - _SHOWN
    if left > 0:
        yield _Difference(f"{left} more {kind}", "as in the plan", "others")


def _label(bucket: BucketSummary) -> str:
    """Tells buckets of one name apart: parameters of one layer in two param groups, say."""
    return f" ({'frozen' if bucket.group is None else f'group {bucket.group}'}, {dtype_name(bucket.dtype)})"


def _describe(bucket: BucketSummary) -> str:
    dtypes = {
        "computed in": bucket.compute_dtype, "reduced in": bucket.reduce_dtype, "with states in": bucket.state_dtype
    }  # fmt: skip
    words = [f"{word} {dtype_name(dtype)}" for word, dtype in dtypes.items() if dtype is not None]
    return (
        f"{format_count(bucket.num_parameters)} parameters ({bucket.num_parameters}), slices of {bucket.shard_numel} "
        f"elements, {', '.join(words)}"
    )


def _micro_batches(options: CompileOptions, plan: Plan) -> str:
    """The number that is asked for; 1 is what compile has where nothing is."""
    return str(plan.num_micro_batches if options.accumulate in (1, "auto") else options.accumulate)


def _order(plan: Plan) -> str:
    if plan.by_layer:
        return "layer" if plan.num_chunks == 1 else "round-robin"
    if plan.num_chunks > 1:
        return "interleaved"
    return "micro-batch" if plan.weights_lag is None else "zero-bubble"


def _order_in_options(options: CompileOptions, plan: Plan) -> str:
    # Not every stage can compute weight gradients apart.
    is_first = plan.pipe > 1 and _order(plan) == "micro-batch" and options.order == "zero-bubble"
    return _order(plan) if options.order == "auto" or is_first else options.order


def _loss(scaled: bool) -> str:
    return "scaled" if scaled else "as it is"


def _precision(precision: str | None) -> str:
    return precision or "that of the model"
