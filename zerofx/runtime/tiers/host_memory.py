"""Memory of the host tier: blocks in size classes, kept for reuse, within a budget.

Blocks come from the operating system and not from torch's allocator. On a CPU machine, where the device's memory is the
host's too, what torch counts is then the device's alone. On a machine with an accelerator blocks are pinned, so that
copies overlap with computation.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from zerofx.errors import TierError
from zerofx.runtime.tiers.copies import Copy
from zerofx.runtime.tiers.pinned import pin
from zerofx.scheduler.cost.transfers import size_class
from zerofx.units import format_bytes

_HUGE_PAGE = 2 << 20


class HostMemory:
    """Hands out blocks of bytes. Blocks that are given back are used again, and freed by ``clear``.

    ``num_bytes`` are those of all blocks, those that wait for reuse among them: never more than ``budget``, where there
    is one. Blocks of other sizes that wait are freed first. A block that copies still read or write when it is given
    back is used again, or freed, once they have landed.
    """

    def __init__(self, pinned: bool, budget: int | None = None) -> None:
        self.num_bytes = 0
        self._pinned = pinned
        self._budget = budget
        self._free: dict[int, list[tuple[torch.Tensor, tuple[Copy, ...]]]] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """A page-aligned block of at least ``num_bytes``: uint8, shape ``[size_class(num_bytes)]``, on the CPU.

        Raises:
            TierError: blocks that are in use leave no room for it in the budget.
        """
        size = size_class(num_bytes)
        free = self._free.get(size)
        if free:
            # The one that has waited longest where a copy of each may be under way.
            idle = next((n for n, (_, copies) in enumerate(free) if not any(c.is_busy for c in copies)), 0)
            return _wait_for_copies(*free.pop(idle))
        self._make_room(size)
        pages = _pages(size)
        block = torch.frombuffer(pages, dtype=torch.uint8)
        if self._pinned:
            # A process that is forked, as workers of a loader are, would have a copy of each pinned page.
            pages.madvise(mmap.MADV_DONTFORK)
            pin(block)
        self.num_bytes += size
        return block

    def give_back(self, block: torch.Tensor, copies: Sequence[Copy] = ()) -> None:
        """Take back a block that nothing but ``copies`` reads or writes any more."""
        busy = tuple(copy for copy in copies if copy.is_busy)
        self._free.setdefault(block.numel(), []).append((block, busy))

    def clear(self) -> None:
        """Free all blocks that are not in use."""
        for size, blocks in self._free.items():
            for block, copies in blocks:
                _wait_for_copies(block, copies)
                self.num_bytes -= size
        self._free.clear()

    def has_space(self, num_bytes: int) -> bool:
        """True if ``take`` would give a block for so many bytes."""
        waiting = sum(size * len(blocks) for size, blocks in self._free.items())
        return self._budget is None or self.num_bytes - waiting + size_class(num_bytes) <= self._budget

    def shrink(self, num_bytes: int) -> None:
        """Free blocks that are not in use until all take no more than ``num_bytes``.

        What is freed here is pinned again where it is asked for next: no more goes than has to, the smallest block that
        is enough, or else the largest ones.
        """
        while (excess := self.num_bytes - num_bytes) > 0:
            sizes = sorted(size for size, blocks in self._free.items() if blocks)
            if not sizes:
                return
            size = next((size for size in sizes if size >= excess), sizes[-1])
            _wait_for_copies(*self._free[size].pop(0))
            self.num_bytes -= size

    def _make_room(self, num_bytes: int) -> None:
        budget = self._budget
        if budget is None:
            return
        self.shrink(budget - num_bytes)
        if self.num_bytes + num_bytes > budget:
            raise TierError(
                f"expected {format_bytes(num_bytes)} more of host memory within host_budget={format_bytes(budget)}, "
                f"found {format_bytes(self.num_bytes)} in use: raise host_budget"
            )


def _wait_for_copies(block: torch.Tensor, copies: Sequence[Copy]) -> torch.Tensor:
    """The block, once nothing reads or writes it."""
    for copy in copies:
        if copy.is_busy:
            copy.join()
    return block


def _pages(num_bytes: int) -> mmap.mmap:
    """Memory of the operating system's, in huge pages where it has them.

    A drive that reads or writes past the page cache has every page of a block pinned: with pages of 4 KiB that takes
    three times the CPU time.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
