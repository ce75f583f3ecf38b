"""Short stable texts of what nodes call and give, as graphs, plans and reports show them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def target_name(node: fx.Node) -> str:
    """A short stable name of what a call node calls: ``aten.mm.default``, ``zerofx.wait.default``, ``getitem``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def type_text(fake: Any) -> str:
    """Dtype and shape of a fake value in short: ``float32[8, 4]``."""
    if isinstance(fake, torch.Tensor):
        return f"{str(fake.dtype).removeprefix('torch.')}{list(fake.shape)}"
    if isinstance(fake, list | tuple):
        return "(" + ", ".join(type_text(item) for item in fake) + ")"
    return type(fake).__name__
