"""Helpers for examples on one process or many: ranks, devices, and means over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: where this process computes.
    """

    rank: int
    size: int
    device: torch.device

    def print(self, *values: object) -> None:
        """Print once, not once per process."""
        if self.rank == 0:
            print(*values, flush=True)

    def mean(self, value: float) -> float:
        """Mean of `value` over the processes; all of them must call this together."""
        total = torch.tensor(value, dtype=torch.float32, device=self.device)
        if self.size > 1:
            dist.all_reduce(total)
        return total.item() / self.size


@contextmanager
def join_world() -> Iterator[World]:
    """Join the other processes when started by torchrun (NCCL on GPUs, gloo on CPUs), and leave them at the end.

    Started as plain `python`, this process is a world of its own and needs no process group.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_torchelastic_launched():
        yield World(rank=0, size=1, device=device)
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
