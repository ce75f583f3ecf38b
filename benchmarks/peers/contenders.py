"""The contenders of ``benchmarks/peers/``: training steps of one model, each as its library's users write it.

All train with AdamW on torch's fused kernels. A request is what a worker is told: a family and its options.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from benchmarks.lib.memory_kept import keep_freed_memory
from benchmarks.lib.models import Workload


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step on the workload's batch; returns the loss.

    ``hidden_bytes`` is memory that it holds between steps and that no Python object names; ``sent_bytes`` runs a step
    and says what the rank sent, where that is not written to connections; ``facts`` are what else there is to say.
    ``trained`` is what is saved of it: model and optimizer, or its library's own object for both.
    """

    run: Callable[[], Tensor]
    hidden_bytes: int = 0
    sent_bytes: Callable[[], int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    trained: Any = None


def build(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    """The step of the family that ``request`` names, ready to run."""
    builders = {
        "torch": _torch, "ddp": _ddp, "fsdp2": _fsdp2, "deepspeed": _deepspeed, "dtensor": _dtensor, "zerofx": _zerofx,
    }  # fmt: skip
    builder = builders.get(request["family"])
    if request.get("keep_freed"):
        keep_freed_memory()
    return _matmul(device) if builder is None else builder(request, work, device)


def ranks_per_batch(request: dict[str, Any], num_ranks: int) -> int:
    """How many of ``num_ranks`` compute one batch together: what ``shared`` says, where True is all of them."""
    shared = request.get("shared", 1)
    return num_ranks if shared is True else int(shared)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain(
    work: Workload,
    called: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    hidden_bytes: int = 0,
    accumulate: int = 1,
    *,
    first: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    evaluates: bool = False,
) -> TrainStep:
    """``accumulate``: how often the batch is trained on before an update, each time with its own reductions, unless
    all but the last run in ``first``. ``evaluates``: the step is a forward in evaluation mode."""
    if evaluates:
        return TrainStep(partial(_evaluated, work, called), hidden_bytes, trained=(work.model, optimizer))

    def run() -> Tensor:
        total = None
        for number in range(accumulate):
            with first() if number + 1 < accumulate else contextlib.nullcontext():
                loss = work.loss(called) / accumulate
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return TrainStep(run, hidden_bytes, trained=(work.model, optimizer))


@torch.no_grad()
def _evaluated(work: Workload, called: Callable[..., Any]) -> Tensor:
    work.model.eval()
    return work.loss(called)


def _torch(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    called = torch.compile(work.model, mode=request.get("mode")) if request.get("compile") else work.model
    return _plain(work, called, _adamw(work.model))


def _ddp(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    from torch.nn.parallel import DistributedDataParallel

    # Gradients as views of the buckets: the less memory of DDP's two ways.
    model = DistributedDataParallel(
        work.model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    called = torch.compile(model) if request.get("compile") else model
    buckets = sum(p.numel() * p.element_size() for p in work.model.parameters())
    return _plain(work, called, _adamw(work.model), buckets, request.get("accumulate", 1), first=model.no_sync)


class Checkpointed(nn.Module):
    """A block of which only the inputs are kept for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def _fsdp2(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    """Blocks are wrapped as torchtitan wraps them: checkpointed, then compiled, then sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    num_ranks, shard = dist.get_world_size(), request.get("shard")
    mesh = init_device_mesh(device.type, (num_ranks // shard, shard) if shard else (num_ranks,))
    policies: dict[str, Any] = {}
    if request.get("offload"):
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if request.get("mixed"):
        policies["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    blocks = work.blocks
    for index, block in enumerate(blocks):
        wrapped = Checkpointed(block) if request.get("checkpoint") else block
        if request.get("compile"):
            wrapped.compile()
        fully_shard(wrapped, mesh=mesh, **policies)
        blocks[index] = wrapped
    fully_shard(work.model, mesh=mesh, **policies)
    accumulate, evaluates = request.get("accumulate", 1), request.get("evaluate", False)
    return _plain(work, work.model, _adamw(work.model), accumulate=accumulate, evaluates=evaluates)


def _dtensor(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    """Blocks are wrapped as torchtitan wraps them: shared among ranks, then compiled, then sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from benchmarks.peers.tensor_parallel import parallelize, parameter_groups

    num_ranks = dist.get_world_size()
    num_model = ranks_per_batch(request, num_ranks)
    mesh = init_device_mesh(device.type, (num_ranks // num_model, num_model), mesh_dim_names=("shard", "model"))
    parallelize(work, mesh["model"])
    for block in work.blocks:
        if request.get("compile"):
            block.compile()
        if num_model < num_ranks:
            fully_shard(block, mesh=mesh["shard"])
    if num_model < num_ranks:
        fully_shard(work.model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(parameter_groups(work.model), lr=1e-4, fused=True)

    def run() -> Tensor:
        with loss_parallel():
            loss = work.loss(work.model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        whole = loss.detach()
        return whole.full_tensor() if isinstance(whole, DTensor) else whole

    return TrainStep(run, trained=(work.model, optimizer))


def _deepspeed(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    warnings.simplefilter("ignore")
    import deepspeed

    blocks = work.blocks
    if request.get("checkpoint"):
        for index, layer in enumerate(blocks):
            blocks[index] = Checkpointed(layer)
    block = sum(p.numel() for p in blocks[0].parameters())
    largest = max(block, *(p.numel() for p in work.model.parameters()))
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    offload: dict[str, Any] = {"offload_optimizer": host} if request.get("offload") else {}
    if offload and request["stage"] == 3:
        offload["offload_param"] = host
    config = {
        "train_micro_batch_size_per_gpu": next(iter(work.batch.values())).shape[0],
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its own default is to clip
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": request.get("mixed", next(work.model.parameters()).dtype is torch.bfloat16)},
        "zero_optimization": {
            "stage": request["stage"],
            "contiguous_gradients": True,
            "overlap_comm": True,
            # By default DeepSpeed takes buffers of 2 GB for these.
            "reduce_bucket_size": largest,
            "allgather_bucket_size": largest,
            # What is gathered goes again between forward and backward, with a block gathered ahead: with DeepSpeed's
            # defaults a model of this size is gathered once and kept.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_prefetch_bucket_size": block,
            **offload,
        },
    }
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # what it updates states on the host with

        optimizer: Any = DeepSpeedCPUAdam(work.model.parameters(), lr=1e-4, adamw_mode=True)
    else:
        optimizer = _adamw(work.model)
    engine, *_ = deepspeed.initialize(model=work.model, optimizer=optimizer, config=config)

    def run() -> Tensor:
        loss = work.loss(engine)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return TrainStep(run, trained=engine)


def _zerofx(request: dict[str, Any], work: Workload, device: torch.device) -> TrainStep:
    accumulate = request.get("accumulate", 1)
    batch = {name: torch.cat([tensor] * accumulate) for name, tensor in work.batch.items()}
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    num_model = ranks_per_batch(request, num_ranks)
    step = zerofx.compile(
        work.model,
        _adamw(work.model),
        stage=request.get("stage", 3),
        mesh=request.get("mesh") or ({"shard": num_ranks // num_model, "model": num_model} if num_model > 1 else None),
        wire=request.get("wire", "exact"),
        machine=zerofx.Machine.measure(device) if request.get("measures") else None,
        memory_budget=request.get("budget"),
        offload=request.get("offload", "auto"),
        precision="bf16" if request.get("mixed") else None,
        cuda_graphs=request.get("cuda_graphs", False),
        accumulate=accumulate,
        reduce=request.get("reduce", "auto"),
        backend=request.get("backend", "inductor"),
        example_batch=batch,
    )
    if request.get("evaluate"):
        step.evaluate(**batch)
    plan = step.evaluation.plan if request.get("evaluate") else step.plan
    facts = {
        "predicted_peak_bytes": plan.peak_bytes["device"],
        "predicted_seconds": plan.step_seconds,
        "predicted_wire_bytes": plan.wire_bytes,
        "recomputed": len(plan.recomputes),
        "link_bytes": plan.link_bytes,
        "mesh": str(plan.mesh),
        "num_batches": plan.mesh.num_batches,
    }
    if request.get("evaluate"):
        return TrainStep(
            lambda: work.loss(step.evaluate),
            sent_bytes=lambda: step.measure_evaluation(num_steps=1, **batch).wire_bytes,
            facts=facts,
        )
    return TrainStep(
        lambda: step(**batch),
        sent_bytes=lambda: step.measure(num_steps=1, **batch).wire_bytes,
        facts=facts,
    )


def _matmul(device: torch.device, size: int = 1024, repeats: int = 8) -> TrainStep:
    """Not a contender but the measure of all: square matrix products, as fast as this machine does them."""
    size = size if device.type == "cpu" else 8 * size
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> Tensor:
        for _ in range(repeats):
            torch.mm(a, b, out=out)
        return out

    return TrainStep(run, facts={"flops": 2 * size**3 * repeats})
