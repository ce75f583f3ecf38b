"""What is taken from torch's private modules beside capture and Inductor: one place to look at when torch changes."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator

import torch
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.autograd import profiler as _autograd_profiler
from torch.profiler.profiler import PROFILER_STEP_NAME
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what is called: it computes, on real tensors."""


def elementwise_order(*operands: torch.Tensor) -> list[int]:
    """The dimensions of what an elementwise kernel makes of operands of one shape, the outermost in memory first."""
    order: list[int] = compute_elementwise_output_logical_to_physical_perm(*operands)[0]
    return order


@contextlib.contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """What an operator has against its arguments is in the error that it raises: torch logs it too, with all stacks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


without_python_dispatcher = torch._C._DisablePythonDispatcher
"""A context in which calls go to the kernels that eager mode runs: Python's dispatcher takes some of them apart."""


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """ATen's own steps for an LSTM: oneDNN's keeps what its backward needs only with autograd on, as in no step."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def is_profiling() -> bool:
    """Whether one of torch's profilers records in this process, or its schedule has it warm up to.

    In either state a second one takes away what the first has recorded; behind a warm-up the process then crashes
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


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.t() + bias`` by oneDNN, through the one operator that gives it dense matrices as they are.

    Args:
        x: ``[rows, inputs]`` in float32, on a CPU.
        weight: ``[outputs, inputs]``, laid out either way.
        bias: ``[outputs]``, or None.

    Returns:
        ``[rows, outputs]``.
    """
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
