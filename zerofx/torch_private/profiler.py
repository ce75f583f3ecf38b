"""Torch's profilers."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.autograd import profiler as _autograd_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME

from zerofx.errors import InternalError

_MEMORY = "[memory]"  # what events of allocations are called
_PROBE_BYTES = 12_352


def probe() -> None:
    """Allocate and free the block that ``allocations`` looks for: to be called first while a profiler records."""
    torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cpu")


def allocations(profiler: torch.profiler.profile) -> list[tuple[int, int]]:
    """Allocations and frees on CPU, in order: nanoseconds, and bytes, negative for frees.

    Raises:
        InternalError: the probe was not recorded, and so other records cannot be trusted.
    """
    changes = [(event.start_ns(), event.nbytes()) for event in _events(profiler, _MEMORY)]
    for sign in (1, -1):
        at = next((at for at, (_, num_bytes) in enumerate(changes) if num_bytes == sign * _PROBE_BYTES), None)
        if at is None:
            raise InternalError(
                f"expected torch's profiler to record allocations as torch 2.13's does, found that it misses one of "
                f"{_PROBE_BYTES} bytes with torch {torch.__version__}: a peak that is measured so would be too low. "
                f"Please report it"
            )
        del changes[at]
    return changes


def spans(profiler: torch.profiler.profile, name: str) -> list[tuple[int, int]]:
    """Begins and ends of blocks of ``torch.profiler.record_function(name)``, in nanoseconds, in order."""
    return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in _events(profiler, name)]


def _events(profiler: torch.profiler.profile, name: str) -> list[Any]:
    inner = profiler.profiler
    assert inner is not None and inner.kineto_results is not None
    on_cpu = torch._C._autograd.DeviceType.CPU
    events = [
        entry for entry in inner.kineto_results.events() if entry.name() == name and entry.device_type() == on_cpu
    ]
    return sorted(events, key=lambda event: event.start_ns())


def is_profiling() -> bool:
    """True if one of torch's profilers records in this process, or is warming up by its schedule.

    In either state a second one discards the records of the first; after a warm-up the process then crashes (torch
    2.13). While objects are frozen (``gc.freeze``), every open ``torch.profiler.profile`` block counts.
    """
    if _autograd_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    if PROFILER_STEP_NAME not in _autograd_profiler.KinetoStepTracker._step_dict:
        return False
    # Of those that warm up torch keeps no list, but an object refers to its class.
    if gc.get_freeze_count():
        return True  # what is frozen is not found
    profilers = (
        referrer
        for referrer in gc.get_referrers(torch.profiler.profile)
        if isinstance(referrer, torch.profiler.profile)
    )
    warming_up = torch.profiler.ProfilerAction.WARMUP
    return any(profiler.current_action is warming_up and profiler.step_rec_fn is not None for profiler in profilers)
