"""The front door: ``zerofx.compile``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zerofx.capture.loss import ForwardFunction, LossFunction
from zerofx.driver.check_training import check_training
from zerofx.errors import UsageError
from zerofx.options import (
    Accumulate,
    Backend,
    CudaGraphs,
    Offload,
    OnNonfinite,
    Precision,
    Recompute,
    Tiling,
    Wire,
    check_options,
)
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
    recompute: Recompute = "auto",
    offload: Offload = "auto",
    tile: Tiling = "auto",
    precision: Precision | None = None,
    backend: Backend = "inductor",
    machine: Machine | str | None = None,
    plan: Plan | str | Path | None = None,
    prefetch: int = 1,
    keep_gathered: Collection[str] | Literal["all"] = (),
    max_shapes: int = 8,
    accumulate: Accumulate = 1,
    weights: str | Path | None = None,
    delayed_update: int | None = None,
    wire: Wire = "exact",
    cuda_graphs: CudaGraphs = False,
    max_grad_norm: float | None = None,
    forward: ForwardFunction | None = None,
    on_nonfinite: OnNonfinite | None = None,
    constant: Collection[str] = (),
) -> Step:
    """Make one planned training step of a plain module and its optimizer.

    Args:
        model: any ``nn.Module``, unmodified. Its parameters move into flat buckets when the first step is built, with
            rank 0's values on every rank. It need not have values: one that was built inside ``zerofx.empty_init()``,
            or on ``meta``, gets them then, a parameter at a time.
        optimizer: an elementwise ``torch.optim`` optimizer over the model's parameters. Its ``param_groups`` are read
            at every step. Its states are in slices: ``state_dict()`` and ``load_state_dict()`` have them whole, and
            ``optimizer.state`` is empty.
        stage: 0 replicate, 1 shard optimizer states, 2 and gradients, 3 and parameters (ZeRO, 1910.02054).
        loss_fn: ``loss_fn(outputs, *rest)`` for a model that does not return its loss, with ``rest`` what its forward
            does not take: ``loss_fn=nn.CrossEntropyLoss()`` and ``step(images, labels)``. Forward takes as many leading
            positional arguments as it requires (one at least) and the keywords that it names; others, such as a mask,
            are given to it by name. ``loss_fn`` gets the positional arguments that are left, and each keyword that it
            names; one that cannot be called so, ``lambda outputs, images, labels: ...``, gets the whole batch.
        example_batch: a batch (tuple, or dict of keywords) to capture and plan with now; otherwise the first call does.
        memory_budget: the most bytes on the device at any moment of the step: ``"24GiB"``, a number of bytes, or a
            fraction of the device; None for no limit. A budget that no plan meets is refused before the first step.
        host_budget: the most bytes of host memory that a rank's pool may take for what leaves the device, with what is
            on its way to and from NVMe: a size, a number of bytes, or a fraction of the rank's share of the host; None
            for all of that share. What operators hold inside while an update runs on the host is not in the pool.
        recompute: whether activations may be computed again in backward: ``"auto"`` as the budget asks, ``"none"``, or
            ``"full"`` for as many as possible.
        offload: whether activations, optimizer states, gradients between micro-batches and (at stage 3) parameters may
            leave the device: ``"auto"`` as the budget asks, to host memory and then to NVMe (not on a CPU, whose memory
            is the host's), ``"none"``, or only ``"host"`` or ``"nvme"``. ``{"gradients": "host"}``, or ``"nvme"``, has
            all gradients wait there between micro-batches, with a budget or without, and nothing else leave.
        tile: what may run a few rows at a time, so that it never exists whole: an output layer's logits with their
            loss, and chains of operators between which values are large (an MLP's inner values, queries, keys and
            values with their attention, the logits of attention that is not fused). ``"auto"`` where no other plan
            fits the budget, ``"none"``, or numbers of tiles by the names of modules: ``{"layers.0.mlp": 4}``, or
            ``{"": 2}`` for all. The name of a parameter asks for slices of it: ``{"layers.0.mlp.up.weight": 4}`` is
            gathered, multiplied, reduced and updated in four parts, one after the other; ``"auto"`` turns to that
            last, for what is huge. Sums over rows or slices are then taken in another order: of all that a plan can
            do, this alone does not give the same bits.
        precision: None keeps the model's dtypes; ``"bf16"`` computes, gathers and reduces in bfloat16 with fp32
            masters.
        backend: ``"inductor"`` compiles each distinct region once; ``"eager"`` runs the same file on ATen kernels, bit
            for bit like DistributedDataParallel with the same optimizer.
        machine: what the predictions are for: a ``Machine``, the name of a built-in one, or None for the machine at
            hand.
        plan: a plan made earlier, in place of a fresh one, or the path of a file with one (``plan.save``,
            ``zerofx.tune``, ``zerofx plan --save``), which rank 0 reads. It is refused where graph, ranks, stage,
            precision or machine are not those that it was made for.
        prefetch: how many units ahead of their use to issue gathers.
        keep_gathered: names of buckets that stay gathered from forward to backward, or ``"all"``.
        max_shapes: how many batch shapes may be captured before another is an error.
        accumulate: how many equal micro-batches each batch is divided into along the first dimension: they run one
            after the other, their gradients are summed, and there is one reduction and one update. Their losses are
            divided by the number, so that the step's loss and gradient are means. The first tensor of the batch says
            its size; tensors of another leading size are used whole by every micro-batch. ``"auto"`` with a memory
            budget takes the number whose plan is fastest among those that fit, and 1 without a budget.
        delayed_update: None for exact training, or how many steps to train exactly before updates are delayed by one
            step (ZeRO-Offload, 2101.06840, section 5). From then on the update with a step's gradient runs on the host
            beside the next step, which computes with the parameters from before it: step t's gradient is that of the
            parameters behind update t - 2. Optimizer states live on the host. Hyperparameters are those of the step
            whose gradient it is. The model has its values inside ``step.full_parameters()``, and checkpoints are those
            behind all updates (``step.flush``).
        max_grad_norm: what gradients are clipped to, as ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``
            does between ``backward()`` and ``optimizer.step()``: by the 2-norm of all reduced gradients.
            ``step.grad_norm`` is that norm; ``math.inf`` has it taken and nothing clipped. Where it is not finite,
            gradients become zero or NaN, as there by default. All updates are then behind the last reduction. None for
            gradients as they are.
        on_nonfinite: what becomes of a step whose loss is NaN or infinite on any rank: None or ``"warn"`` updates all
            the same and warns; ``"skip"`` leaves parameters, optimizer states and counters as they were, to the bit,
            on all ranks, warns, and counts it (``step.num_skipped``; the loss is returned as it is); ``"raise"`` ends
            it there with a ``NonFiniteLossError`` on all ranks, and training may go on. Buffers are as the forward
            left them. The host waits for the loss in each step, and ranks agree on it.
        weights: where to read the values of parameters and persistent buffers from, in the place of the model's own: a
            ``.safetensors`` file, a folder with such files, their ``.index.json``, or a folder that
            ``torch.distributed.checkpoint`` has saved to. Each rank reads its own slices. They are converted to the
            dtypes of the model as ``load_state_dict`` does, with a warning where that rounds. Names are those of
            ``model.state_dict()``: missing, additional and misshapen tensors are refused with their names.
        wire: what may be sent: ``"exact"`` values, or, for those buckets with which the step is faster so, ``"int8"``:
            parameters gathered in 8 bits at stage 3 (a scale for each block of 256), again for backward from a second
            shard within the node, and gradients reduced in 8 bits, first within nodes and then across; ``"int4"`` has
            gradients in 4 bits (ZeRO++, 2306.10209), and ``"fp8"`` both in float8_e4m3fn, which keeps a value's first
            digits however large others in its block are. Values are then rounded: a parameter by at most 1/254 of the
            largest in its block, gradients at most twice by 1/254, or 1/14, of that of a block of sums; in ``"fp8"``
            each by 1/16 of itself. Masters and updates stay exact. Nodes are consecutive ranks, ``LOCAL_WORLD_SIZE`` or
            ``machine.ranks_per_node`` each.
        cuda_graphs: whether kernels are launched as CUDA graphs, recorded behind the second step of a batch shape:
            ``False``, ``"auto"`` where nothing is in the way (``print(step)`` and ``step.launches`` say what is), or
            ``True`` to have an error there. Collectives and updates are calls between graphs, so that learning rates
            may change with every step. The memory of a step's values then stays with it between steps.
        constant: names of arguments whose tensors have the same values in every step, such as the edges of a graph:
            ``("edge_index",)``. A forward may read such values, and have shapes depend on them (self-loops that are
            left out). Parts are named as errors name them: ``batch[1]["edges"]``. Other values, by their hash, are
            another shape: captured anew, at most ``max_shapes`` of them, and refused where ranks have different ones.
        forward: ``forward(model, *batch, **kwargs)`` in the place of calling the model: whatever a step computes before
            it goes backward. It may call the model several times, draw noise, and use teachers and other tensors, which
            it reaches as any function does (closure, globals, attributes); these are read as they are at each step, and
            are not trained: a gradient for one is an error, and so is a change in place. They are used in their own
            dtype. It gives the loss, or ``(loss, extras)`` with tensors in tuples, lists, dicts or dataclasses; then
            ``loss, extras = step(*batch)``. Extras count in the plan's memory until the step's end; what of them is
            held after it is the caller's.

    Returns:
        A ``Step``; ``loss = step(*batch, **kwargs)``, or ``loss, extras`` where ``forward`` gives a pair. Ranks are
        those of the default process group, or this process alone. Until ``step.close()`` the model belongs to the
        step: it is not compiled again.

    Raises:
        ZeroFXError: see its subclasses; nothing has been changed then.
    """
    options = check_options(
        stage, loss_fn, precision, backend, machine, plan, prefetch, keep_gathered, max_shapes,
        memory_budget, recompute, offload, accumulate, tile, host_budget, weights, delayed_update, wire,
        cuda_graphs,
        max_grad_norm, forward, on_nonfinite=on_nonfinite, constant=constant,
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
