"""Modules that compute in float32 while others do not: the casts around them when a model runs or is traced.

y = layer_norm(x, w, b)                        x_wide = _to_copy(x, dtype=float32)
...                                     ->     y_wide = layer_norm(x_wide, w, b)
                                               y = _to_copy(y_wide, dtype=float16)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zerofx.ir.casts import Casts, ComputeDtype
from zerofx.torch_private.operators import pytree


@contextlib.contextmanager
def compute_in_float32(compute_dtype: ComputeDtype) -> Iterator[None]:
    """While open, the modules that keep float32 get their inputs in it, and return their results in the others' dtype.

    Scalars that they return stay in float32: a loss, say.
    """
    if not isinstance(compute_dtype, Casts):
        yield
        return
    low = compute_dtype.dtype

    def widen(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(lambda leaf: leaf.float() if _is_of(leaf, low) else leaf, (args, kwargs))

    def narrow(_module: nn.Module, _args: Any, output: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf.to(low) if _is_of(leaf, torch.float32) and leaf.dim() else leaf, output
        )

    handles: list[Any] = []
    try:
        for module in compute_dtype.modules:
            handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            handles.append(module.register_forward_hook(narrow, prepend=True))  # inside of the module's layer
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_of(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is dtype
