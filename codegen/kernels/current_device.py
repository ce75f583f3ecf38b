"""The device that torch uses where none is named, or only a kind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Inside, ``device`` is the current one of its kind; it need not be outside.

    Triton launches on the current device, graphs are captured there, and ``torch.device("cuda")`` in an emitted step
    stands for it.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
