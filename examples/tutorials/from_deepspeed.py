"""Train by the JSON file of a DeepSpeed run: each key that zerofx knows becomes an option, others are named.

python examples/tutorials/from_deepspeed.py
torchrun --nproc-per-node 2 examples/tutorials/from_deepspeed.py --config ds_config.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofx
from small_llama import make_small_llama

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
}
DECIDED_BY_THE_PLAN = {
    "allgather_bucket_size",
    "allgather_partitions",
    "contiguous_gradients",
    "overlap_comm",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
    "sub_group_size",
}


def read_options(config: dict[str, Any]) -> dict[str, Any]:
    """Keywords of ``zerofx.compile`` for a config; ``ValueError`` with the keys that have none."""
    rest = dict(config)
    options: dict[str, Any] = {"accumulate": rest.pop("gradient_accumulation_steps", 1)}
    if clipping := rest.pop("gradient_clipping", 0.0):
        options["max_grad_norm"] = clipping
    if rest.pop("bf16", {}).get("enabled"):
        options["precision"] = "bf16"
    fp16 = rest.pop("fp16", {})
    if fp16.get("enabled"):
        scale: zerofx.LossScale | float = fp16.get("loss_scale", 0) or zerofx.LossScale(
            init_scale=2.0 ** fp16.get("initial_scale_power", 16), growth_interval=fp16.get("loss_scale_window", 1000)
        )
        options["precision"] = zerofx.Precision("fp16", loss_scale=scale)
    zero = dict(rest.pop("zero_optimization", {}))
    options["stage"] = zero.pop("stage", 0)
    tiers = {zero.pop(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param")} - {"none"}
    if tiers:
        options["offload"] = "auto" if "nvme" in tiers else "host"  # within memory_budget=, what does not fit leaves
    if zero.pop("zero_quantized_gradients", False):
        options["wire"] = "int8"
    for key in DECIDED_BY_THE_PLAN:
        zero.pop(key, None)
    for key in ("train_micro_batch_size_per_gpu", "train_batch_size", "optimizer", "scheduler"):
        rest.pop(key, None)  # the data loader's, and torch's own classes
    if unknown := sorted([*rest, *(f"zero_optimization.{key}" for key in zero)]):
        raise ValueError(f"no option of zerofx.compile for {', '.join(unknown)}: see docs/tutorials/from_deepspeed.md")
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a DeepSpeed config (default: one in this file)")
    parser.add_argument("--memory-budget", help="the most bytes on the device, such as 22GiB")
    parser.add_argument("--steps", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    config = json.loads(args.config.read_text()) if args.config else CONFIG
    options = read_options(config)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if on_gpu else "gloo")

    model: nn.Module = make_small_llama()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **config.get("optimizer", {}).get("params", {}))
    step = zerofx.compile(model, optimizer, memory_budget=args.memory_budget, backend="eager", **options)
    samples = config.get("train_micro_batch_size_per_gpu", 1) * options["accumulate"]
    for number in range(args.steps):
        tokens = torch.randint(512, (samples, 32), device=device)  # all micro-batches of a step at once
        loss = step(input_ids=tokens, labels=tokens)
        print(f"step {number}: loss {loss.item():.3f}", flush=True)
    print(step.plan)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
