"""Train a GPT whose weights, gradients and optimizer states are several times the memory that it is given.

ZEROFX_NVME_DIR=/path/on/a/local/drive python examples/train_infinity.py
ZEROFX_NVME_DIR=/path/on/a/local/drive python examples/train_infinity.py --size 125M --cap 1.0GiB

The model never exists whole: `zerofx.empty_init()` builds it without memory, and its values are made a parameter at a
time and written to the drive. Parameters and optimizer states come from there for each use, and go back. It is trained
on one batch again and again, whose loss falls from step to step: a few steps on other text each would not show that.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import math
import resource
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tabulate import tabulate

import zerofx
from gpt import GPT
from text import VOCAB, Batches, load_source
from zerofx.units import format_bytes, parse_bytes


class Size(NamedTuple):
    """Width, layers, heads, and a learning rate far below what makes first steps without warm-up overshoot."""

    dim: int
    depth: int
    heads: int
    learning_rate: float

    def build(self) -> GPT:
        """A model of this size."""
        return GPT(VOCAB, self.dim, self.depth, self.heads, BLOCK)

    def optimizer(self, model: GPT) -> torch.optim.Optimizer:
        """AdamW over the model, with the kernel that needs no temporaries."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, fused=True)


SIZES = {"1B": Size(1792, 26, 14, 1e-6), "125M": Size(768, 18, 12, 1e-5), "tiny": Size(64, 3, 4, 1e-4)}
PREDICTED = "predicted from zerofx's own graph: tensors alone"
BLOCK = 128  # bytes of text in a sequence; a batch is one
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h


def main(args: argparse.Namespace) -> None:
    give_back_freed_memory()
    with capped(args.cap):
        print(f"before the model: {format_bytes(resident_bytes())} resident (Python, torch and their libraries)")
        trained = train_plainly(args) if args.plain else train(args)
        peak = peak_resident_bytes()
        if args.table and isinstance(trained, zerofx.Step):
            print(f"\n{table(args.size, trained, peak)}")
    if args.digest:
        print(f"parameters {digest(trained)}")


def train(args: argparse.Namespace) -> zerofx.Step:
    """Build, compile and train."""
    started = time.perf_counter()
    torch.manual_seed(0)
    with zerofx.empty_init():
        model = SIZES[args.size].build()
    optimizer = SIZES[args.size].optimizer(model)
    batch = one_batch()
    step = zerofx.compile(model, optimizer, stage=3, memory_budget=args.budget, offload=args.offload, backend="eager")
    step.prepare(*batch)
    print(f"{step}\n\nbetween steps: {', '.join(f'{format_bytes(n)} on {tier}' for tier, n in step.tiers().items())}")
    print(f"ready after {time.perf_counter() - started:.0f} s, {format_bytes(peak_resident_bytes())} resident at most")
    for number in range(args.steps):
        began = time.perf_counter()
        report(number, float(step(*batch)), began)
    return step


def train_plainly(args: argparse.Namespace) -> GPT:
    """The same without zerofx."""
    torch.manual_seed(0)
    model = SIZES[args.size].build()
    optimizer = SIZES[args.size].optimizer(model)
    batch = one_batch()
    for number in range(args.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        report(number, float(loss), began)
    return model


def one_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The text that every step trains on: tokens and targets, each int64 [1, BLOCK]."""
    return next(Batches(load_source()[0], BLOCK, 1))


def report(number: int, loss: float, began: float) -> None:
    """Print a line for a step that has been done."""
    if not math.isfinite(loss):
        raise ValueError(f"the loss of step {number + 1} is {loss}")
    print(
        f"step {number + 1}  loss {loss:.4f} ({loss.hex()})  {time.perf_counter() - began:.1f} s  "
        f"{format_bytes(peak_resident_bytes())} resident at most",
        flush=True,
    )


def table(size: str, step: zerofx.Step, peak_bytes: int) -> str:
    """What training takes plainly, and sharded without a budget (parameters, gradients and states, as by FSDP2), and
    here."""
    with torch.device("meta"):
        model = SIZES[size].build()
        batch = (torch.zeros(1, BLOCK, dtype=torch.long),) * 2
    numel = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    rows = []
    for name, stage, num_ranks in (("plain AdamW", 0, 1), ("sharded as by FSDP2, 2 processes together", 3, 2)):
        planned = zerofx.plan(
            model, optimizer, batch, stage, world_size=num_ranks, machine="cpu", backend="eager", offload="none"
        )
        rows.append([name, format_bytes(num_ranks * planned.plan.peak_bytes["device"]), "", PREDICTED])
    planned_bytes = sum(step.plan.peak_bytes.get(tier, 0) for tier in ("device", "host"))
    stored = format_bytes(step.plan.peak_bytes.get("nvme", 0))
    rows.append(["zerofx", format_bytes(planned_bytes), stored, PREDICTED])
    rows.append(
        ["zerofx", format_bytes(peak_bytes), stored, "measured: all that was ever resident, Python and torch too"]
    )
    return tabulate(rows, [f"{numel / 1e6:,.0f} M parameters, fp32", "memory", "drive", ""], disable_numparse=True)


@contextlib.contextmanager
def capped(cap: str | None) -> Iterator[None]:
    """While open, this process may have so much address space beyond what it has now: every mapping counts."""
    if cap is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status_bytes("VmSize") + parse_bytes(cap), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def give_back_freed_memory() -> None:
    """Have the C library give large blocks back to the system when they are freed, and keep all others in one place.

    By itself glibc keeps blocks of up to 32 MiB for later, and reserves 64 MiB of addresses for each thread.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)
    libc.mallopt(M_ARENA_MAX, 1)


def resident_bytes() -> int:
    """Bytes of this process in memory now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most bytes of this process that were ever in memory."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def digest(trained: zerofx.Step | GPT) -> str:
    """SHA-256 of all parameters: whole, so this needs memory for them."""
    sha = hashlib.sha256()
    whole = trained.full_parameters() if isinstance(trained, zerofx.Step) else contextlib.nullcontext(trained)
    with whole as model:
        for name, parameter in model.named_parameters():
            sha.update(name.encode())
            sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1B", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--budget", default="1.5GiB", help="memory_budget of the plan (default: %(default)s)")
    parser.add_argument("--offload", choices=["nvme", "host", "none"], default="nvme", help="default: %(default)s")
    parser.add_argument("--cap", help="address space beyond what Python and torch take: what needs more fails")
    parser.add_argument("--table", action="store_true", help="compare with plain AdamW and with FSDP2")
    parser.add_argument("--plain", action="store_true", help="train without zerofx, for comparison")
    parser.add_argument("--digest", action="store_true", help="print a hash of all parameters, without the cap")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
