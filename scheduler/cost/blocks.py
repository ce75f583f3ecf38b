"""Bytes that the host's pool takes for a tensor: blocks of whole pages, in size classes.

The pool (``zerofx/runtime/tiers/host_memory.py``) hands out such blocks, and plans count them where they are held to a
``host_budget``.
"""

from __future__ import annotations

PAGE = 4096  # bytes; direct I/O needs buffers, lengths and offsets in multiples of it


def whole_pages(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def size_class(num_bytes: int) -> int:
    """Bytes of the block for ``num_bytes``: whole pages, sixteen sizes to each doubling, so at most 1/16 is waste."""
    step = max(PAGE, 1 << max(num_bytes.bit_length() - 5, 0))
    return max(-(-num_bytes // step), 1) * step
