"""Fake tensors to compile regions for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.torch_private.capture import FakeTensorMode


def fake_like(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A fake tensor to compile for."""
    with FakeTensorMode():
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
