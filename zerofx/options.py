"""What the user asked of ``compile``, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import nn

from zerofx.capture.checks import check_forward_function, check_loss_function
from zerofx.capture.objective.counted import LossTerms
from zerofx.capture.objective.loss import ForwardFunction, LossFunction, Objective
from zerofx.choices import (
    AccumulateOption,
    Backend,
    CudaGraphs,
    OffloadOption,
    OnNonfinite,
    OutputsOption,
    Precision,
    RecomputeOption,
    ReduceDtype,
    ReduceOption,
    StateDtype,
    StatesOver,
    Tiling,
    WireOption,
)
from zerofx.ir.casts import Casts, ComputeDtype, Fp32Module
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.ladder import Ladder, LengthsOption, checked_lengths
from zerofx.mesh_option import MeshLike
from zerofx.option_checks import (
    check_accumulate,
    check_count,
    check_cuda_graphs,
    check_delayed,
    check_grad_norms,
    check_kind,
    check_lengths,
    check_loss_terms,
    check_max_grad_norm,
    check_offload,
    check_on_nonfinite,
    check_outputs,
    check_reduce,
    check_stage,
    check_texts,
    check_tile,
    check_wire,
    check_words,
    checked_budget,
    checked_mesh,
    checked_shardings,
    warn_without_budget,
)
from zerofx.precision import LossScale, check_kept, dtype_of, loss_scale_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.residency import PolicyOptions
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan

# What options are compared for: between ranks before anything else, and with those of a kept plan or a kept step.
Purpose = Literal["ranks", "plan", "step"]
_LEFT_OUT = "left out of"


def _left_out_of(*purposes: Purpose) -> dict[str, tuple[Purpose, ...]]:
    return {_LEFT_OUT: purposes}


class TuneOptions(TypedDict, total=False):
    """Keywords that ``tune``, ``plan`` and ``compile`` have in common."""

    loss_fn: LossFunction | None
    forward: ForwardFunction | None
    constant: Collection[str]
    outputs: OutputsOption
    memory_budget: int | float | str | None
    recompute: RecomputeOption
    offload: OffloadOption
    accumulate: AccumulateOption
    reduce: ReduceOption
    loss_terms: LossTerms | None
    precision: Precision | None
    backend: Backend
    prefetch: int
    keep_gathered: Collection[str] | Literal["all"]
    wire: WireOption
    max_grad_norm: float | None
    grad_norms: bool
    keep_gradients: Collection[str]
    loss_scale: LossScale | float | None
    keep_fp32: Collection[Fp32Module]
    reduce_dtype: ReduceDtype | None
    state_dtype: StateDtype | None
    mesh: MeshLike | None
    states_over: StatesOver
    shardings: Mapping[str, str]


class PlanOptions(TuneOptions, total=False):
    """Keywords that ``plan`` and ``compile`` have in common."""

    machine: Machine | str | None
    host_budget: int | float | str | None
    tile: Tiling
    delayed_update: int | None


def check_names(given: Mapping[str, object], kind: type, function: str) -> None:
    """Check that a function was given no other keywords than those of ``kind``.

    Raises:
        TypeError: it was, as Python says it of keywords that a signature spells out.
    """
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True)
class CompileOptions:
    """All options of one compiled step. ``plan`` is one that was given, or the file that it is in.

    Every option is part of every comparison (see ``Purpose``) unless its metadata leaves it out: because it has no
    consequence there, or because the consequence itself is compared.
    """

    stage: int
    objective: Objective = field(metadata=_left_out_of("ranks", "plan", "step"))  # the captured graph has it
    precision: Precision | None
    backend: Backend
    machine: Machine | None = field(metadata=_left_out_of("ranks", "plan", "step"))  # None for the one at hand
    plan: Plan | Path | None = field(metadata=_left_out_of("ranks", "plan", "step"))  # by its decisions
    policy: PolicyOptions = field(metadata=_left_out_of("ranks"))  # rank 0 makes the plan
    max_shapes: int = field(metadata=_left_out_of("plan", "step"))
    memory_budget: int | float | None = None
    recompute: RecomputeOption = "auto"
    offload: OffloadOption = "auto"
    accumulate: AccumulateOption = field(
        default=1, metadata=_left_out_of("plan")
    )  # its graph has as many micro-batches
    reduce: ReduceOption = "auto"
    loss_terms: LossTerms | None = field(
        default=None, metadata=_left_out_of("ranks", "plan", "step")
    )  # its graph has it
    tile: Tiling = "auto"
    host_budget: int | float | None = None
    weights: Path | None = field(default=None, metadata=_left_out_of("ranks", "plan", "step"))
    delayed_update: int | None = None
    wire: WireOption = "exact"
    cuda_graphs: CudaGraphs = field(default=False, metadata=_left_out_of("ranks", "plan", "step"))
    max_grad_norm: float | None = None
    grad_norms: bool = False
    keep_gradients: tuple[str, ...] = ()
    on_nonfinite: OnNonfinite | None = None
    constant: tuple[str, ...] = field(default=(), metadata=_left_out_of("plan", "step"))  # the batch has their values
    outputs: OutputsOption = field(
        default="numbers", metadata=_left_out_of("plan", "step")
    )  # the captured graph has it
    loss_scale: LossScale | None = None
    keep_fp32: tuple[Fp32Module, ...] = ()
    reduce_dtype: ReduceDtype | None = None
    state_dtype: StateDtype | None = None
    mesh: Mesh | Literal["auto"] | None = None
    states_over: StatesOver = "auto"
    shardings: Mapping[str, str] = field(default_factory=dict)
    lengths: Ladder | int | Literal["auto"] | None = field(default=None, metadata=_left_out_of("plan", "step"))

    def texts(self, purpose: Purpose) -> list[str]:
        """The options that are compared for ``purpose``, a line each."""
        return [
            f"{option.name}: {_text(getattr(self, option.name))}"
            for option in fields(self)
            if purpose not in option.metadata.get(_LEFT_OUT, ())
        ]

    @property
    def block(self) -> int:
        """Elements that a slice of a bucket is a multiple of: what is quantised together is one rank's."""
        return 1 if self.wire == "exact" else BLOCK

    @property
    def compiles_regions(self) -> bool:
        """Whether regions are compiled, which then hold less inside, and updates run torch's fused kernels."""
        return self.backend == "inductor"

    @property
    def compute_dtype(self) -> torch.dtype | None:
        return None if self.precision is None else dtype_of(self.precision)

    @property
    def reduced_in(self) -> torch.dtype | None:
        """What gradients are reduced in, None for what they are computed in."""
        return None if self.reduce_dtype is None else dtype_of(self.reduce_dtype)

    @property
    def states_in(self) -> torch.dtype | None:
        """What optimizer states are stored in, None for what the optimizer has them in."""
        return None if self.state_dtype is None else dtype_of(self.state_dtype)

    def casts(self, model: nn.Module) -> ComputeDtype:
        """What a model computes in, and which of its modules keep float32.

        Raises:
            UsageError: it has none of those that are to.
        """
        return Casts.of(model, self.compute_dtype, self.keep_fp32)


def _text(given: object) -> str:
    """A text that does not depend on the order of names; that of a mapping counts."""
    if isinstance(given, PolicyOptions):
        return ", ".join(f"{option.name} {_text(getattr(given, option.name))}" for option in fields(given))
    if isinstance(given, Mapping):
        return repr(list(given.items()))
    if isinstance(given, type):
        return f"{given.__module__}.{given.__qualname__}"
    return (
        repr(sorted(map(_text, given))) if isinstance(given, Collection) and not isinstance(given, str) else str(given)
    )


def check_options(
    *,
    stage: int,
    loss_fn: LossFunction | None = None,
    precision: Precision | None = None,
    backend: Backend = "inductor",
    machine: Machine | str | None = None,
    plan: Plan | str | Path | None = None,
    prefetch: int = 1,
    keep_gathered: Collection[str] | Literal["all"] = (),
    max_shapes: int = 1,
    memory_budget: int | float | str | None = None,
    recompute: RecomputeOption = "auto",
    offload: OffloadOption = "auto",
    accumulate: AccumulateOption = 1,
    reduce: ReduceOption = "auto",
    loss_terms: LossTerms | None = None,
    tile: Tiling = "auto",
    host_budget: int | float | str | None = None,
    weights: str | Path | None = None,
    delayed_update: int | None = None,
    wire: WireOption = "exact",
    cuda_graphs: CudaGraphs = False,
    max_grad_norm: float | None = None,
    grad_norms: bool = False,
    keep_gradients: Collection[str] = (),
    forward: ForwardFunction | None = None,
    on_nonfinite: OnNonfinite | None = None,
    constant: Collection[str] = (),
    outputs: OutputsOption = "numbers",
    loss_scale: LossScale | float | None = None,
    keep_fp32: Collection[Fp32Module] = (),
    reduce_dtype: ReduceDtype | None = None,
    state_dtype: StateDtype | None = None,
    mesh: MeshLike | None = None,
    states_over: StatesOver = "auto",
    shardings: Mapping[str, str] | None = None,
    lengths: LengthsOption | None = None,
) -> CompileOptions:
    """The options as one object.

    Raises:
        UsageError: one of them cannot be; the message says what it can be.
    """
    check_stage(stage)
    check_words(
        backend=backend, precision=precision, recompute=recompute, reduce=reduce, wire=wire, on_nonfinite=on_nonfinite,
        outputs=outputs, reduce_dtype=reduce_dtype, state_dtype=state_dtype, states_over=states_over,
    )  # fmt: skip
    check_count("prefetch", prefetch, 0, "to be a number of gathers to issue ahead, 0 or more")
    if keep_gathered != "all":
        check_texts("keep_gathered", keep_gathered, "buckets, or 'all'")
    check_count("max_shapes", max_shapes, 1, "to be at least 1")
    check_kind("plan", plan, (Plan, str, Path), "a Plan or the path of a file with one")
    check_kind("machine", machine, (str, Machine), "a Machine or the name of one")
    check_loss_function(loss_fn)
    check_forward_function(forward, loss_fn)
    check_offload(offload, accumulate, given=plan is not None, budget=memory_budget is not None)
    check_accumulate(accumulate, plan)
    check_reduce(reduce, stage, offload)
    check_loss_terms(loss_terms)
    check_tile(tile)
    check_delayed(delayed_update, offload)
    check_wire(wire, stage)
    check_cuda_graphs(cuda_graphs)
    check_max_grad_norm(max_grad_norm, delayed_update)
    check_grad_norms(grad_norms)
    check_on_nonfinite(on_nonfinite, delayed_update)
    check_outputs(outputs, forward)
    check_kept(keep_fp32, precision)
    check_texts("keep_gradients", keep_gradients, "trained parameters, such as ('layers.0.weight', '*.bias')")
    scaling = loss_scale_of(loss_scale, precision, delayed_update)
    check_texts("constant", constant, "arguments, such as ('edge_index',)")
    budget = checked_budget("memory_budget", memory_budget, "the device")
    limit = checked_budget("host_budget", host_budget, "a rank's share of the host's memory")
    if budget is None and delayed_update is None:
        warn_without_budget(offload, limit, given=plan is not None)
    check_kind("weights", weights, (str, Path), "the path of a file or folder")
    check_lengths(lengths, given=plan is not None)
    planned_for = Machine.named(machine) if isinstance(machine, str) else machine
    # Containers are copied: what their owner does with them later changes no options.
    if isinstance(keep_gathered, Mapping):
        keep_gathered = dict(keep_gathered)
    elif not isinstance(keep_gathered, str):
        keep_gathered = tuple(keep_gathered)
    policy = PolicyOptions(prefetch, keep_gathered)
    given = Path(plan) if isinstance(plan, str) else plan
    mesh_asked = checked_mesh(mesh, wire)
    return CompileOptions(
        stage=stage,
        objective=Objective(loss_fn, forward, outputs),
        outputs=outputs,
        precision=precision,
        backend=backend,
        machine=planned_for,
        plan=given,
        policy=policy,
        max_shapes=max_shapes,
        memory_budget=budget,
        recompute=recompute,
        offload=dict(offload) if isinstance(offload, Mapping) else offload,
        accumulate=accumulate,
        reduce=reduce,
        loss_terms=loss_terms,
        tile=dict(tile) if isinstance(tile, Mapping) else tile,
        host_budget=limit,
        weights=None if weights is None else Path(weights),
        delayed_update=delayed_update,
        wire=wire,
        cuda_graphs=cuda_graphs,
        max_grad_norm=None if max_grad_norm is None else float(max_grad_norm),
        grad_norms=grad_norms,
        keep_gradients=tuple(keep_gradients),
        on_nonfinite=on_nonfinite,
        constant=tuple(constant),
        loss_scale=scaling,
        keep_fp32=tuple(keep_fp32),
        reduce_dtype=reduce_dtype,
        state_dtype=state_dtype,
        mesh=mesh_asked,
        states_over=states_over,
        shardings=checked_shardings(shardings, mesh_asked),
        lengths=checked_lengths(lengths),
    )
