"""What of torch's functions tells of a tensor's shape, dtype and place, and makes no node of a traced graph.

Torch asks for it a thousand times while it traces a small model: what watches calls lets it by.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

_ATTRIBUTES = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_quantized", "ndim")
_METHODS = ("dim", "numel", "size", "storage_offset", "stride", "untyped_storage")

METADATA_READS: Final[frozenset[Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES] + [getattr(Tensor, name) for name in _METHODS]
)
