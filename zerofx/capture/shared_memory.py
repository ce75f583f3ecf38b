"""Find tensors that share memory, of which a step changes one: the other would keep its old values."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn


def find_overlap(model: nn.Module, changed: Collection[str]) -> tuple[str, str] | None:
    """The names of two parameters or buffers that share memory, of which one is among those that are ``changed``.

    A tensor that is both counts as two.
    """
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data) is torch.Tensor and not tensor.is_meta and tensor.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size(), name, tensor))
    last = last_changed = (0, 0, "", torch.empty(0, device="cpu"))  # of those that begin before, what ends last
    for span in sorted(spans, key=lambda span: span[:3]):
        start, end, name, tensor = span
        _, other_end, other_name, other = last if name in changed else last_changed
        if start < other_end and _share_elements(tensor, other):
            return other_name, name
        last = span if end > last[1] else last
        last_changed = span if name in changed and end > last_changed[1] else last_changed
    return None


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if tensors that overlap have bytes in common; columns of one matrix have none."""
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr():
        return True
    marks = torch.zeros(storage.nbytes(), dtype=torch.bool, device="cpu")

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = (*(size * stride for stride in tensor.stride()), 1)
        return marks.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - storage.data_ptr())

    bytes_of(a).fill_(True)
    return bool(bytes_of(b).any())
