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
        model: any ``nn.Module``, unmodified; on ``meta`` or built inside ``zerofx.empty_init()`` it gets its values
            when the first step is built. Its parameters move into flat buckets then.
        optimizer: an elementwise ``torch.optim`` optimizer over the model's parameters. ``param_groups`` are read at
            every step; ``state_dict()`` and ``load_state_dict()`` have whole states, ``optimizer.state`` is empty.
        stage: 0 replicate, 1 shard optimizer states, 2 and gradients, 3 and parameters (ZeRO, 1910.02054).
        loss_fn: ``loss_fn(outputs, *rest)`` for a model that does not return its loss; ``rest`` is what its forward
            does not take: ``loss_fn=nn.CrossEntropyLoss()`` and ``step(images, labels)``.
        example_batch: a batch (tuple, or dict of keywords) to capture and plan with now, not at the first call.
        memory_budget: the most bytes on the device at any moment of a step: ``"24GiB"``, bytes, or a fraction of the
            device; None for no limit. What no plan meets is refused before the first step.
        host_budget: the most bytes of host memory that a rank's pool may take; None for its share of the host.
        recompute: ``"auto"`` as the budget asks, ``"none"``, or ``"full"`` for as many activations as possible.
        offload: ``"auto"`` as the budget asks (not on a CPU), ``"none"``, ``"host"``, ``"nvme"``, or
            ``{"gradients": "host"}`` for gradients between micro-batches alone.
        tile: what may run a few rows at a time: ``"auto"`` where no other plan fits, ``"none"``, or numbers of tiles by
            names of modules or parameters. Sums are then taken in another order.
        precision: None for the model's dtypes; ``"bf16"`` computes, gathers and reduces so, with float32 masters.
        backend: ``"inductor"`` compiles each distinct region once; ``"eager"`` has DistributedDataParallel's bits.
        machine: what predictions are for: a ``Machine``, a built-in one's name, or None for the machine at hand.
        plan: a plan made earlier, or the path of one; refused where it was made for something else.
        prefetch: how many units ahead of their use to issue gathers.
        keep_gathered: names of buckets that stay gathered from forward to backward, or ``"all"``.
        max_shapes: how many batch shapes may be captured before another is an error.
        accumulate: how many equal micro-batches each batch is divided into along the first dimension, whose losses are
            averaged; ``"auto"`` for the number whose plan is fastest within the budget.
        weights: where to read parameters and persistent buffers from: ``.safetensors`` files, their index, or a folder
            of ``torch.distributed.checkpoint``. Each rank reads its own slices.
        delayed_update: None, or how many steps to train exactly before updates run on the host next to the following
            step, one step late (ZeRO-Offload, 2101.06840, section 5).
        wire: ``"exact"``, or ``"int8"``, ``"int4"`` (ZeRO++, 2306.10209) or ``"fp8"`` for buckets with which rounded
            values make the step faster.
        cuda_graphs: whether kernels are launched as CUDA graphs: ``False``, ``"auto"`` where they can be, or ``True``.
        max_grad_norm: what the 2-norm of all gradients is clipped to, as ``clip_grad_norm_`` does;
            ``step.grad_norm`` is that norm.
        forward: ``forward(model, *batch, **kwargs)`` in the place of calling the model, with whatever a step computes;
            it gives the loss, or ``(loss, extras)``.
        on_nonfinite: for a loss that is NaN or infinite on any rank: None or ``"warn"`` goes on, ``"skip"`` leaves all
            as it was, ``"raise"`` raises ``NonFiniteLossError`` on all ranks.
        constant: names of arguments with the same values in every step, which a forward may read: ``("edge_index",)``.

    docs/options.md says more of each.

    Returns:
        A ``Step``; ``loss = step(*batch, **kwargs)``, or ``loss, extras`` where ``forward`` gives a pair. Ranks are
        those of the default process group, or this process alone. Until ``step.close()`` the model belongs to the
        step: it is not compiled again.

    Raises:
        ZeroFXError: see its subclasses; nothing has been changed then.
    """
    options = check_options(
        stage=stage, loss_fn=loss_fn, precision=precision, backend=backend, machine=machine, plan=plan,
        prefetch=prefetch, keep_gathered=keep_gathered, max_shapes=max_shapes, memory_budget=memory_budget,
        recompute=recompute, offload=offload, accumulate=accumulate, tile=tile, host_budget=host_budget,
        weights=weights, delayed_update=delayed_update, wire=wire, cuda_graphs=cuda_graphs,
        max_grad_norm=max_grad_norm, forward=forward, on_nonfinite=on_nonfinite, constant=constant,
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
