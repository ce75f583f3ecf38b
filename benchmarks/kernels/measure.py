"""Times and peaks of the contenders of a group, in turn, and their table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.kernels.groups import Group
from benchmarks.lib.turn import turn
from zerofx.scheduler.cost.cpu.peaks import CpuPeak


@dataclass
class Measured:
    """Seconds by round, and bytes held beyond the inputs."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(group: Group, num_rounds: int, device: torch.device) -> dict[str, Measured]:
    """All contenders of a group, round by round in turn."""
    measured = {name: Measured() for name in group.contenders}
    for run in group.contenders.values():
        run()  # compiles
    with turn():
        for name, run in group.contenders.items():
            for _ in range(2):
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
