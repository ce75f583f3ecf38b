"""What the launches of all kernels share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one that the memory is on."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
