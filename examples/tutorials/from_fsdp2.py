"""The same training by FSDP2 and by zerofx: one loop, and the lines that differ.

torchrun --nproc-per-node 2 examples/tutorials/from_fsdp2.py --with fsdp2
torchrun --nproc-per-node 2 examples/tutorials/from_fsdp2.py --with zerofx
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zerofx
from small_llama import make_small_llama


def train_with_fsdp2(model: nn.Module, batches: list[Tensor]) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_with_zerofx(model: nn.Module, batches: list[Tensor], **options: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = zerofx.compile(
        model,
        optimizer,
        stage=3,
        precision=zerofx.Precision("bf16", reduce_dtype="fp32"),
        max_grad_norm=1.0,
        **options,
    )
    losses = []
    for tokens in batches:
        loss = step(input_ids=tokens, labels=tokens)
        losses.append(loss.item())
    return losses


def make_batches(rank: int, num_steps: int) -> list[Tensor]:
    """Tokens of this rank, (2, 32) for each step."""
    draws = torch.Generator().manual_seed(rank)
    return [torch.randint(512, (2, 32), generator=draws) for _ in range(num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--with", dest="system", default="zerofx", choices=["fsdp2", "zerofx"], help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    model: nn.Module = make_small_llama()
    model.to(device)
    batches = [tokens.to(device) for tokens in make_batches(rank, args.steps)]
    if args.system == "fsdp2":
        losses = train_with_fsdp2(model, batches)
    else:
        losses = train_with_zerofx(model, batches, backend="eager")
    if rank == 0:
        print(args.system, " ".join(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
