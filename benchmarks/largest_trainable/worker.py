"""One trial of ``benchmarks/largest_trainable/``, a process of its own: a GPT of a size, trained for some steps.

    python -m benchmarks.largest_trainable.worker '{"contender": "plain AdamW", "dim": 512, "depth": 4, ...}'

Writes a line of JSON when it is ready and after each step: what is resident, and the loss. Whoever started it holds it
to its cap; libraries are imported before the first line, so that this says what they take of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from gpt import GPT
from train_infinity import give_back_freed_memory, peak_resident_bytes, resident_bytes
from zerofx.units import format_bytes

VOCAB, TOKENS, HEAD = 256, 128, 64  # a batch is one sequence; HEAD is the width of an attention head
DEVICE_SHARE, HOST_SHARE = 0.40, 0.36  # of what is left of the cap, for zerofx; the rest is for Python and kernels

Batch = tuple[Tensor, Tensor]
Train = Callable[[], float]  # one step; returns the loss


def gpt(dim: int, depth: int) -> GPT:
    """The model of a trial."""
    return GPT(VOCAB, dim, depth, dim // HEAD, TOKENS)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Alike for all: the kernel without temporaries."""
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def one_batch() -> Batch:
    """Tokens and targets, each int64 [1, TOKENS]."""
    ids = torch.randint(VOCAB, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain(request: dict[str, Any], batch: Batch) -> Train:
    model = gpt(request["dim"], request["depth"])
    optimizer = adamw(model)

    def run() -> float:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return float(loss)

    return run


def in_backward(request: dict[str, Any], batch: Batch) -> Train:
    """Each parameter is updated as soon as its gradient is there, which is freed at once: an optimizer for each."""
    model = gpt(request["dim"], request["depth"])
    optimizers: dict[Tensor, torch.optim.Optimizer] = {
        parameter: torch.optim.AdamW([parameter], lr=1e-6, fused=True) for parameter in model.parameters()
    }

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def run() -> float:
        loss = model(*batch)
        loss.backward()
        return float(loss)

    return run


def deepspeed_zero3(request: dict[str, Any], batch: Batch) -> Train:
    """ZeRO-3 with parameters and states on the drive where DeepSpeed's operator for it can be built, else in memory."""
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder

    tier = "nvme" if AsyncIOBuilder().is_compatible(verbose=False) else "cpu"
    block = 12 * request["dim"] ** 2 + 13 * request["dim"]
    place = {"device": tier, **({"nvme_path": request["folder"]} if tier == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, "buffer_count": 5, "buffer_size": block},
            "offload_optimizer": {**place, "buffer_count": 4},
            "sub_group_size": block,
            "reduce_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * block,
            "stage3_prefetch_bucket_size": block,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = gpt(request["dim"], request["depth"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)

    def run() -> float:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return float(loss)

    return run


def zerofx_nvme(request: dict[str, Any], batch: Batch) -> Train:
    """Never whole in memory; parameters, states and what waits for backward are on the drive."""
    with zerofx.empty_init():
        model = gpt(request["dim"], request["depth"])
    device_bytes, host_bytes = budgets(request["cap_bytes"] - resident_bytes())
    step = zerofx.compile(
        model,
        adamw(model),
        stage=3,
        memory_budget=device_bytes,
        host_budget=host_bytes,
        offload="nvme",
        backend="eager",
        example_batch=batch,
    )
    planned = {tier: format_bytes(size) for tier, size in step.plan.peak_bytes.items()}
    print(f"planned: {planned}", file=sys.stderr)
    return lambda: float(step(*batch))


def budgets(room_bytes: int) -> tuple[int, int]:
    """zerofx's memory budget and host budget where so much is left of the cap."""
    return int(DEVICE_SHARE * room_bytes), int(HOST_SHARE * room_bytes)


CONTENDERS: dict[str, Callable[[dict[str, Any], Batch], Train]] = {
    "plain AdamW": plain,
    "AdamW in backward": in_backward,
    "DeepSpeed ZeRO-3": deepspeed_zero3,
    "zerofx": zerofx_nvme,
}


def main() -> None:
    # Libraries write to stdout what they like; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    give_back_freed_memory()
    request = json.loads(sys.argv[1])
    if request["contender"] == "DeepSpeed ZeRO-3":
        os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        import deepspeed  # noqa: F401  # what it takes belongs to the first line

        store = Path(request["folder"]) / f"store-{os.getpid()}"
        dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    answers.write(json.dumps({"imported_bytes": resident_bytes()}) + "\n")
    torch.manual_seed(0)
    train = CONTENDERS[request["contender"]](request, one_batch())
    answers.write(json.dumps({"ready_bytes": peak_resident_bytes()}) + "\n")
    for _ in range(request["num_steps"]):
        loss = train()
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}")
        answers.write(json.dumps({"loss": loss, "peak_bytes": peak_resident_bytes()}) + "\n")


if __name__ == "__main__":
    main()
