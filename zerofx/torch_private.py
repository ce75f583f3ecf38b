"""What is taken from torch's private modules beside capture and Inductor: one place to look at when torch changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch._prims_common import suggest_memory_format as suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

without_modes = _disable_current_modes
"""A context in which no dispatch mode sees what is called: it computes, on real tensors."""


@contextlib.contextmanager
def without_log_of_fakes() -> Iterator[None]:
    """What an operator has against its arguments is in the error that it raises: torch logs it too, with all stacks."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


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
