"""Memory of the host tier: blocks in size classes, kept for reuse.

On a machine with an accelerator blocks are pinned, so that copies run beside computation. On a CPU machine, where the
device's memory is the host's too, they come from the operating system and not from torch's allocator: what torch counts
there is the device's alone.
"""

from __future__ import annotations

import mmap

import torch

PAGE = 4096  # bytes; direct I/O needs buffers, lengths and offsets in multiples of it


class HostMemory:
    """Hands out blocks of bytes. Blocks that are given back are used again, and freed by ``clear``."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """A page-aligned block of at least ``num_bytes``: uint8, shape ``[size_class(num_bytes)]``, on the CPU."""
        size = size_class(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Take back a block that nothing reads or writes any more."""
        self._free.setdefault(block.numel(), []).append(block)

    def clear(self) -> None:
        """Free all blocks that are not in use."""
        self._free.clear()


def size_class(num_bytes: int) -> int:
    """Bytes of the block for ``num_bytes``: whole pages, four sizes to each doubling, so at most a quarter is waste."""
    step = max(PAGE, 1 << max(num_bytes.bit_length() - 3, 0))
    return max(-(-num_bytes // step), 1) * step
