"""The most that was allocated while a block ran: the profiler's record on a CPU, the allocator's on CUDA."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch.profiler import record_function

from zerofx.errors import UsageError
from zerofx.torch_private.profiler import allocations, is_profiling, probe, spans

_PART = "zerofx part"  # the name of an event


class CpuPeak:
    """``num_bytes``: the most that was allocated inside the block on CPU, counted from its begin; ``parts``: the same
    of each block of ``part()`` inside, counted from the begin of that.

    There can be one profiler at a time: while another runs this raises ``UsageError``; none may start inside.
    Leaving it raises ``InternalError`` where the profiler records nothing of what is allocated.
    Python's collector rests meanwhile: garbage that it frees, of an earlier block, would be counted as memory returned.
    """

    num_bytes = 0

    def __init__(self) -> None:
        self.parts: list[int] = []

    def part(self) -> AbstractContextManager[object]:
        """A part of the block."""
        return record_function(_PART)

    def __enter__(self) -> CpuPeak:
        refuse_profilers([is_profiling()])
        self._collects = gc.isenabled()
        gc.disable()
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        with _quiet():
            self._profiler.__enter__()
        probe()
        return self

    def __exit__(self, *_: object) -> None:
        with _quiet():
            self._profiler.__exit__(None, None, None)
        if self._collects:
            gc.enable()
        changes = allocations(self._profiler)
        self.num_bytes = _most(change for _, change in changes)
        for begin, end in spans(self._profiler, _PART):
            self.parts.append(_most(change for at, change in changes if begin <= at <= end))


def _most(changes: Iterable[int]) -> int:
    """The most that changes of what is allocated, in order, add up to."""
    return max(accumulate(changes, initial=0))


class CudaPeak:
    """``num_bytes``: the most that was allocated inside the block on a CUDA device, counted from its begin."""

    num_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> CudaPeak:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = torch.cuda.max_memory_allocated(self._device) - self._before


def refuse_profilers(profiling: Sequence[bool]) -> None:
    """Refuse to measure memory on CPUs where a profiler runs: whether one does, by rank.

    Raises:
        UsageError: one does.
    """
    if any(profiling):
        ranks = ", ".join(str(rank) for rank, runs in enumerate(profiling) if runs)
        where = f" on rank {ranks}" if len(profiling) > 1 else ""
        raise UsageError(
            f"expected no profiler to run, since memory on a CPU is measured by torch's, which can run once at a time, "
            f"found one that runs or warms up{where}: measure before it starts or after it has ended; in it, call "
            f"step(batch)"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's profiler writes to stderr when it starts and stops (torch 2.13); no log level turns it off."""
    sys.stderr.flush()
    saved = os.dup(2)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
