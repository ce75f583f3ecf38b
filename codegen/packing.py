"""Pack blocks of known sizes and lifetimes into one pool: no two that are live at once overlap.

That is offset calculation for a static plan, an NP-hard problem (dynamic storage allocation) for which greedy orders
come within some per cent of the bound. Blocks are placed one by one, each in the smallest gap that it fits between
those that are live with it, as in "Greedy by Size for Offset Calculation" (Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", arXiv 2001.03288, section 5.2; TensorFlow Lite's planner). Several orders are
tried, and the smallest pool is taken: no order is the best for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 512  # bytes: what the CUDA caching allocator rounds sizes up to (``kMinBlockSize``), so kernels expect it


@dataclass(frozen=True)
class Block:
    """So many bytes that are live from ``start`` to before ``end``, in any unit of time."""

    num_bytes: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes that it takes of a pool."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Packing:
    """The offset of each block in a pool of ``num_bytes``; ``least_bytes`` of them are live at once at some time."""

    offsets: tuple[int, ...]
    num_bytes: int
    least_bytes: int


def pack(blocks: Sequence[Block]) -> Packing:
    """Place ``blocks``; the same for the same ones on every machine."""
    least, best = least_bytes(blocks), None
    for order in _ORDERS:
        numbers = sorted(range(len(blocks)), key=lambda number: (order(blocks[number]), number))
        packing = _place(blocks, numbers, least)
        if best is None or packing.num_bytes < best.num_bytes:
            best = packing
        if best.num_bytes == least:
            break
    assert best is not None
    return best


def least_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes that are live at once: no pool can be smaller."""
    changes = sorted([(b.start, b.size) for b in blocks] + [(b.end, -b.size) for b in blocks])
    live = most = 0
    for _, change in changes:  # what ends comes before what starts at the same time
        live += change
        most = max(most, live)
    return most


_ORDERS: tuple[Callable[[Block], tuple[int, ...]], ...] = (
    lambda block: (-block.size, block.start - block.end),
    lambda block: (block.start - block.end, -block.size),
    lambda block: (block.size * (block.start - block.end),),
)
"""The largest first; those that live longest; the largest products of both."""


def _place(blocks: Sequence[Block], numbers: Sequence[int], least: int) -> Packing:
    starts, ends, bottoms, tops = (torch.empty(len(blocks), dtype=torch.int64, device="cpu") for _ in range(4))
    offsets = [0] * len(blocks)
    for count, number in enumerate(numbers):
        block = blocks[number]
        meets = (starts[:count] < block.end) & (ends[:count] > block.start)
        offsets[number] = _best_gap(bottoms[:count][meets], tops[:count][meets], block.size)
        starts[count], ends[count] = block.start, block.end
        bottoms[count], tops[count] = offsets[number], offsets[number] + block.size
    return Packing(tuple(offsets), max(tops.tolist(), default=0), least)


def _best_gap(bottoms: torch.Tensor, tops: torch.Tensor, size: int) -> int:
    """Offset of the smallest gap of at least ``size`` between the placed blocks; above them all if there is none."""
    if not len(bottoms):
        return 0
    bottoms, order = bottoms.sort()
    reached = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), tops[order].cummax(0).values])
    gaps = bottoms - reached[:-1]
    fitting = torch.where(gaps >= size, gaps, torch.iinfo(torch.int64).max)
    smallest = int(fitting.argmin())
    return int(reached[smallest] if gaps[smallest] >= size else reached[-1])
