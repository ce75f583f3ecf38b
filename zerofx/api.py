"""``zerofx.compile``: checks what it is given and makes a ``Step`` of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zerofx.capture.objective.counted import LossTerms
from zerofx.capture.objective.loss import ForwardFunction, LossFunction
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
from zerofx.driver.check_training import check_training
from zerofx.errors import UsageError
from zerofx.ir.casts import Fp32Module
from zerofx.ladder import LengthsOption
from zerofx.mesh_option import MeshLike
from zerofx.options import check_options
from zerofx.precision import LossScale
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.session.step import Step


def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage: int = 3,
    *,
    loss_fn: LossFunction | None = None,
    example_batch: tuple[Any, ...] | Mapping[str, Any] | None = None,
    memory_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    recompute: RecomputeOption = "auto",
    offload: OffloadOption = "auto",
    tile: Tiling = "auto",
    precision: Precision | None = None,
    backend: Backend = "inductor",
    machine: Machine | str | None = None,
    plan: Plan | str | Path | None = None,
    prefetch: int = 1,
    keep_gathered: Collection[str] | Literal["all"] = (),
    max_shapes: int = 8,
    accumulate: AccumulateOption = 1,
    reduce: ReduceOption = "auto",
    loss_terms: LossTerms | None = None,
    weights: str | Path | None = None,
    delayed_update: int | None = None,
    wire: WireOption = "exact",
    cuda_graphs: CudaGraphs = False,
    max_grad_norm: float | None = None,
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
    grad_norms: bool = False,
    keep_gradients: Collection[str] = (),
    lengths: LengthsOption | None = None,
) -> Step:
    """Compile a model's training step: forward, loss, backward, reductions and update as one planned graph.

    docs/options.md has each option in full.

    Args:
        model: any ``nn.Module``, unmodified, also on ``meta`` or made inside ``zerofx.empty_init()``. Its parameters
            move into flat buckets when the first step is built.
        optimizer: an elementwise ``torch.optim`` optimizer over the model's parameters. Its state is sharded:
            ``state_dict()`` and ``load_state_dict()`` have it whole; ``optimizer.state`` is empty.
        stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters (ZeRO, 1910.02054).
        loss_fn: ``loss_fn(outputs, *rest)`` for a model that does not return its loss. Forward gets as many leading
            positional arguments as it requires, and the keywords that it names; ``loss_fn`` gets the other positional
            ones, and the keywords that it names.
        example_batch: a batch, as a tuple or a dict of keywords, to capture and plan with now, not at the first call.
        memory_budget: the most bytes on the device at any moment of a step: ``"24GiB"``, a number, or a fraction of
            the device; None for no limit. A budget that no plan meets is refused.
        host_budget: the most bytes of host memory that a rank's pool may take; None for the rank's share of the host.
        recompute: ``"auto"`` as the budget asks, ``"none"``, or ``"full"`` for as many activations as possible.
        offload: ``"auto"`` as the budget asks, ``"none"``, ``"host"``, ``"nvme"``, or ``{"gradients": "host"}`` for
            gradients between micro-batches alone.
        tile: what runs a few rows at a time: ``"auto"`` where no other plan fits, ``"none"``, or numbers of tiles by
            names of modules or parameters. Sums are then taken in another order.
        precision: None for the model's dtypes; ``"bf16"`` or ``"fp16"`` computes and communicates so, with
            float32 masters.
        backend: ``"inductor"`` compiles each distinct region once; ``"eager"`` has DistributedDataParallel's bits.
        machine: what predictions are for: a ``Machine``, the name of a built-in one, or None for the machine at hand.
        plan: a plan made earlier, or the path of one; refused where it was made for something else.
        prefetch: how many units ahead of their use gathers are issued.
        keep_gathered: names of buckets that stay gathered from forward to backward, or ``"all"``.
        max_shapes: how many batch shapes may be captured before another is an error; with ``lengths`` those that differ
            in numbers of tokens and samples count once.
        accumulate: how many equal micro-batches a batch is divided into, whose losses are averaged; ``"auto"`` for the
            number whose plan is fastest within the budget.
        reduce: ``"each"`` reduces the gradients of each micro-batch and adds up slices, ``"once"`` adds up whole ones
            and reduces those; ``"auto"`` is the first at stages 2 and 3, and with a budget what that has room for.
        loss_terms: ``loss_terms(*batch)`` gives how many terms of the loss (valid tokens, say) each sample has: the
            step's loss is then the mean over those of all micro-batches and ranks.
        weights: ``.safetensors`` files, their index, or a folder of ``torch.distributed.checkpoint`` to read
            parameters and persistent buffers from.
        delayed_update: None, or how many exact steps come before updates that run on the host next to the following
            step, one step late (ZeRO-Offload, 2101.06840, section 5).
        wire: ``"exact"``, or ``"int8"``, ``"int4"`` (ZeRO++, 2306.10209) or ``"fp8"`` for buckets with which rounded
            values make the step faster.
        cuda_graphs: whether kernels are launched as CUDA graphs: False, ``"auto"`` where they can be, or True.
        max_grad_norm: the 2-norm that gradients are clipped to, as by ``clip_grad_norm_``; see ``step.grad_norm``.
        grad_norms: whether ``step.metrics`` has the norm of each layer's gradients, as ``"grad_norm/layers.0"``.
        keep_gradients: names of parameters, or patterns of names, whose reduced gradients ``step.full(name, "grad")``
            reads after each step.
        forward: ``forward(model, *batch, **kwargs)`` that is called instead of the model; it returns the loss, or
            ``(loss, extras)``.
        on_nonfinite: what a loss that is NaN or infinite on any rank does: None or ``"warn"`` goes on, ``"skip"``
            leaves the state as it was, ``"raise"`` raises ``NonFiniteLossError`` on all ranks.
        constant: names of arguments with the same values in every step, which a forward may read.
        outputs: what ``step.outputs`` has of what the model, or ``loss_fn``, returns with its loss: its ``"numbers"``,
            ``"all"`` of it, or ``"none"``.
        loss_scale: what the loss is multiplied by before backward: a ``LossScale``, as ``torch.amp.GradScaler`` has it,
            or a number that stays; None for the defaults of the former with ``precision="fp16"``, and else for none.
        keep_fp32: modules that compute in float32 with a ``precision``, by type, name or pattern of names.
        reduce_dtype: ``"fp32"`` or ``"bf16"`` for what gradients are summed over ranks and micro-batches in; None for
            what they are computed in.
        state_dtype: ``"bf16"`` stores the optimizer's states so between steps, and computes with them in the dtype of
            the masters; None stores them as the optimizer has them.
        mesh: the axes that ranks lie along, outer to inner ``replicate``, ``shard`` and ``model``, by numbers of ranks
            (``{"replicate": 2, "shard": 4}``) or a ``DeviceMesh`` with these names; None for all along ``shard``,
            ``"auto"`` for the mesh that is fastest for a sample, of those that fit, where a batch is one of all ranks
            along ``model``.
        states_over: ``"mesh"`` for optimizer states in parts of slices, one on each replica, ``"shard"`` for slices
            that every replica has, ``"auto"`` for what is faster.
        shardings: how modules or parameters lie on the axis ``model``, by names or patterns of names: ``"column"``,
            ``"row"``, ``"sequence"`` or ``"replicated"``, or a ``tp_plan`` of ``transformers``; the rest is the plan's.
        lengths: the numbers of tokens that batches of any length are padded to; for each, a step is built:
            ``(128, 256, 512)``, ``{128: 32, 512: 8}`` with the samples of a batch of each, ``512`` for a ladder up to
            it, or ``"auto"`` for one up to the first batch's length; None for batches as they are.

    Returns:
        A ``Step``: ``loss = step(*batch, **kwargs)``, or ``loss, extras`` where ``forward`` returns a pair. Its ranks
        are those of the default process group, or this process alone. The model belongs to it until ``step.close()``.

    Raises:
        ZeroFXError: see its subclasses; nothing has been changed then.
    """
    options = check_options(
        stage=stage, loss_fn=loss_fn, precision=precision, backend=backend, machine=machine, plan=plan,
        prefetch=prefetch, keep_gathered=keep_gathered, max_shapes=max_shapes, memory_budget=memory_budget,
        recompute=recompute, offload=offload, accumulate=accumulate, reduce=reduce, loss_terms=loss_terms,
        tile=tile, host_budget=host_budget,
        weights=weights, delayed_update=delayed_update, wire=wire, cuda_graphs=cuda_graphs,
        max_grad_norm=max_grad_norm, forward=forward, on_nonfinite=on_nonfinite, constant=constant,
        outputs=outputs, loss_scale=loss_scale, keep_fp32=keep_fp32, reduce_dtype=reduce_dtype, state_dtype=state_dtype,
        mesh=mesh, states_over=states_over, shardings=shardings, grad_norms=grad_norms,
        keep_gradients=keep_gradients, lengths=lengths,
    )  # fmt: skip
    check_training(model, optimizer, options, on_meta=True)
    if not isinstance(example_batch, tuple | list | Mapping | None):
        raise UsageError(
            f"expected example_batch to be a tuple of what step() is called with, or a dict of its keywords, found "
            f"{type(example_batch).__name__}: give (batch,) for a single argument"
        )
    step = Step(model, optimizer, options)
    if example_batch is None:
        return step
    try:
        if isinstance(example_batch, Mapping):
            step.prepare(**example_batch)
        else:
            step.prepare(*example_batch)
    except BaseException:
        step.abandon()
        raise
    return step
