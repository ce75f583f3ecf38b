"""Which boxes of which parameters a part of a bucket's flat buffer is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerofx.disk.checkpoint.boxes import Box, boxes_of_range
from zerofx.ir.buckets import Bucket, Slot


@dataclass(frozen=True)
class Piece:
    """Elements of a bucket's flat buffer, from number ``start`` on, that are a box of the model's parameter ``source``.

    They lie in the row-major order of the box with its dimensions in the order ``dims``. A complex parameter is one of
    real numbers with a last dimension of 2.
    """

    source: str
    start: int
    box: Box
    dims: tuple[int, ...]

    def view(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """The box as a view of ``flat``, which holds the bucket's elements from number ``first`` on."""
        begin = self.start - first
        lying = flat[begin : begin + self.box.numel].view([self.box.sizes[dim] for dim in self.dims])
        return lying.permute([self.dims.index(dim) for dim in range(len(self.dims))])


def pieces_of(bucket: Bucket, first: int, last: int) -> Iterator[Piece]:
    """The pieces of elements ``first`` to ``last`` of a bucket, in the order in which they lie there."""
    for slot in bucket.slots:
        begin, end = max(first - slot.offset, 0), min(last - slot.offset, slot.numel)
        dims = _order(slot)
        start = slot.offset + begin
        for box in boxes_of_range([slot.shape[dim] for dim in dims], begin, end):
            offsets = [box.offsets[dims.index(dim)] for dim in range(len(dims))]
            if slot.whole is not None:
                offsets[0] += slot.first_row
            sizes = tuple(box.sizes[dims.index(dim)] for dim in range(len(dims)))
            yield Piece(slot.source, start, Box(tuple(offsets), sizes), dims)
            start += box.numel


def _order(slot: Slot) -> tuple[int, ...]:
    """The dimensions of a parameter from that with the longest stride to that with the shortest."""
    plain = tuple(range(len(slot.shape)))
    if slot.stride == tuple(torch.empty(slot.shape, device="meta").stride()):
        return plain
    return tuple(sorted(plain, key=lambda dim: -slot.stride[dim]))
