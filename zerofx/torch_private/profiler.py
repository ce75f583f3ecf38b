"""Torch's profilers."""

from __future__ import annotations

import gc

import torch
from torch.autograd import profiler as _autograd_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME

ON_CPU = torch._C._autograd.DeviceType.CPU
"""The device of an event."""


def is_profiling() -> bool:
    """Whether one of torch's profilers records in this process, or its schedule has it warm up to.

    In either state a second one takes away what the first has recorded; after a warm-up the process then crashes
    (torch 2.13). While objects are frozen (``gc.freeze``), every ``torch.profiler.profile`` counts whose block is open.
    """
    if _autograd_profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
        return True
    if PROFILER_STEP_NAME not in _autograd_profiler.KinetoStepTracker._step_dict:
        return False
    # Of those that warm up torch keeps no list, but an object refers to its class.
    if gc.get_freeze_count():
        return True  # what is frozen is not found
    profilers = (one for one in gc.get_referrers(torch.profiler.profile) if isinstance(one, torch.profiler.profile))
    warming_up = torch.profiler.ProfilerAction.WARMUP
    return any(one.current_action is warming_up and one.step_rec_fn is not None for one in profilers)
