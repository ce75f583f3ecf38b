"""Memory of the host tier: blocks in size classes, kept for reuse, within a budget.

On a machine with an accelerator blocks are pinned, so that copies run beside computation. On a CPU machine, where the
device's memory is the host's too, they come from the operating system and not from torch's allocator: what torch counts
there is the device's alone.
"""

from __future__ import annotations

import mmap

import torch

from zerofx.errors import TierError
from zerofx.report.units import format_bytes
from zerofx.scheduler.blocks import size_class


class HostMemory:
    """Hands out blocks of bytes. Blocks that are given back are used again, and freed by ``clear``.

    ``num_bytes`` are those of all blocks, those that wait for reuse among them: never more than ``budget``, where there
    is one. Blocks of other sizes that wait are freed first.
    """

    def __init__(self, pinned: bool, budget: int | None = None) -> None:
        self.num_bytes = 0
        self._pinned = pinned
        self._budget = budget
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """A page-aligned block of at least ``num_bytes``: uint8, shape ``[size_class(num_bytes)]``, on the CPU.

        Raises:
            TierError: blocks that are in use leave no room for it in the budget.
        """
        size = size_class(num_bytes)
        free = self._free.get(size)
        if free:
            return free.pop()
        self._make_room(size)
        if self._pinned:
            block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.num_bytes += size
        return block

    def give_back(self, block: torch.Tensor) -> None:
        """Take back a block that nothing reads or writes any more."""
        self._free.setdefault(block.numel(), []).append(block)

    def clear(self) -> None:
        """Free all blocks that are not in use."""
        self.num_bytes -= sum(size * len(blocks) for size, blocks in self._free.items())
        self._free.clear()

    def _make_room(self, num_bytes: int) -> None:
        budget = self._budget
        if budget is None:
            return
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self.num_bytes + num_bytes > budget:
                self._free[size].pop()
                self.num_bytes -= size
        if self.num_bytes + num_bytes > budget:
            raise TierError(
                f"expected {format_bytes(num_bytes)} more of host memory within host_budget={format_bytes(budget)}, "
                f"found {format_bytes(self.num_bytes)} in use: raise host_budget"
            )
