"""zerofx's kernels compared with those of torch and Inductor for the same work, in one run.

    python -m benchmarks.kernels                    # those for CUDA
    python -m benchmarks.kernels --device cpu       # those for CPUs, with this process's threads
    python -m benchmarks.kernels --groups update    # one of them

- **attention**, on a CPU: forward and backward in float32, of some shapes, causal, under a mask and without:
  ATen's operator and the kernel.
- **products**, on a CPU: a layer, the gradient of its input and that of its weight, in float32, of some sizes: ATen's
  BLAS, and what is taken from it. Operands go round, so that they come from memory.
- **update**: AdamW on one bucket with float32 masters and states, gradient and parameters in bfloat16: unscale, cast,
  update, copy. ATen's four kernels, the same arithmetic written out under ``torch.compile``, and the kernel.
- **quantise**, **sum**: a bucket in bfloat16 to 8 bits and the sum of 8 such parts back: ATen's operators, the same
  under ``torch.compile``, and the kernel.
- **norms**: the sum of the squares of a bucket's gradients in bfloat16: torch's norms of rows, the squares written out
  under ``torch.compile``, and the kernel.
- **loss**: an output layer with its cross-entropy, forward and backward, in bfloat16: whole logits under
  ``torch.compile``, torch's chunked ``linear_cross_entropy`` where torch has it, and tiles of classes.

Rounds alternate between the contenders of a group; times are of CUDA events, or of the clock on a CPU. Ratios are to
the group's first, of medians and of minima: a kernel is worth having below 1. "Of copy" is the share of a plain copy's
bytes a second, where all contenders are given the bytes that one pass has to move. Peak is what the allocator holds
beyond the inputs.

Writes ``benchmarks/results/kernels_<device>.json`` and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import kernel_groups_cpu, kernel_groups_cuda
from benchmarks.kernel_groups import Group
from benchmarks.kernel_names import CPU, CUDA
from benchmarks.memory_kept import keep_freed_memory
from benchmarks.processes import device_name
from zerofx.scheduler.cost.cpu.peaks import CpuPeak

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Measured:
    """Seconds by round, and bytes held beyond the inputs."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(group: Group, num_rounds: int, device: torch.device) -> dict[str, Measured]:
    """All contenders of a group, round by round in turn."""
    measured = {name: Measured() for name in group.contenders}
    for name, run in group.contenders.items():
        for _ in range(3):  # the first compiles
            run()
        measured[name].peak_bytes = peak_bytes(run, device)
    for _ in range(num_rounds):
        for name, run in group.contenders.items():
            measured[name].seconds.append(seconds(run, device))
    return measured


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that one call holds beyond what is there before it."""
    if device.type == "cpu":
        with CpuPeak() as peak:
            run()
        return peak.num_bytes
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    if device.type == "cpu":
        begun_seconds = time.perf_counter()
        run()
        return time.perf_counter() - begun_seconds
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    run()
    done.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(done)) / 1e3


def copy_bandwidth(numel: int, device: torch.device, num_rounds: int) -> float:
    """Bytes a second that a copy of ``numel`` float32 reads and writes."""
    source, destination = torch.empty(2, numel, device=device).unbind()
    measured = measure(Group("copy", {"copy": lambda: destination.copy_(source)}), num_rounds, device)
    return 8 * numel / statistics.median(measured["copy"].seconds)


def rows(group: Group, measured: Mapping[str, Measured], copy_bandwidth: float) -> list[dict[str, Any]]:
    """A row for each contender; ``copy_bandwidth`` in bytes a second."""
    first = next(iter(measured.values()))
    listed = []
    for name, contender in measured.items():
        median = statistics.median(contender.seconds)
        listed.append(
            {
                "group": group.name,
                "contender": name,
                "median_seconds": median,
                "min_seconds": min(contender.seconds),
                "ratio": median / statistics.median(first.seconds),
                "min_ratio": min(contender.seconds) / min(first.seconds),
                "of_copy": group.num_bytes / median / copy_bandwidth if group.num_bytes else None,
                "peak_bytes": contender.peak_bytes,
            }
        )
    return listed


def table(listed: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown."""
    headers = ["", "contender", "median, ms", "min, ms", "ratio", "of minima", "of copy", "peak, MiB"]
    lines = [
        [
            row["group"], row["contender"], f"{row['median_seconds'] * 1e3:.3f}", f"{row['min_seconds'] * 1e3:.3f}",
            f"{row['ratio']:.2f}", f"{row['min_ratio']:.2f}",
            "" if row["of_copy"] is None else f"{row['of_copy']:.0%}", f"{row['peak_bytes'] / 2**20:.1f}",
        ]
        for row in listed
    ]  # fmt: skip
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--millions", type=int, default=128, help="elements of a bucket, in units of 2**20")
    parser.add_argument("--rows", type=int, default=8192, help="of the loss")
    parser.add_argument("--dim", type=int, default=4096, help="of the output layer's input")
    parser.add_argument("--classes", type=int, default=128_256)
    parser.add_argument("--groups", nargs="+", choices=(*CUDA, *CPU), help="(default: all of the device's)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device, numel = torch.device(options.device), options.millions << 20
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA GPU, found none: give --device cpu; nothing was measured, nothing written")
    if device.type == "cuda":
        name = device_name("cuda")
        makers = kernel_groups_cuda.groups(numel, options.rows, options.dim, options.classes, device)
    else:
        name = f"{device_name('cpu')}, {torch.get_num_threads()} threads"
        makers = kernel_groups_cpu.groups()
        keep_freed_memory()  # for all contenders alike: page faults are not what is compared
    names = options.groups or list(makers)
    if others := set(names) - set(makers):
        parser.error(f"expected groups of {', '.join(makers)} on {device}, found {', '.join(others)}")
    bandwidth = copy_bandwidth(numel, device, options.rounds)
    listed: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for make in (make for group in names for make in makers[group]):
        group = make()
        listed += rows(group, measure(group, options.rounds, device), bandwidth)
        print(table(listed[-len(group.contenders) :]), flush=True)
        del group
        torch.cuda.empty_cache()
        data = {"device": name, "torch": torch.__version__, "copy_bytes_per_second": bandwidth, "rows": listed}
        (options.out / f"kernels_{device.type}.json").write_text(json.dumps(data, indent=1))
    (options.out / f"kernels_{device.type}.md").write_text(f"{name}, torch {torch.__version__}\n\n{table(listed)}\n")


if __name__ == "__main__":
    main()
