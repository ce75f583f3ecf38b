"""Boxes of parameters that make up a part of a bucket's flat buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerofx.disk.checkpoint.boxes import Box, boxes_of_range
from zerofx.ir.buckets import Bucket, Slot


@dataclass(frozen=True)
class Piece:
    """Elements of a bucket's flat buffer, from ``start`` on, that are a box of the model's parameter ``source``.

    ``stride`` is their layout there; other pieces may be in between. A complex parameter is one of real numbers with a
    last dimension of 2.
    """

    source: str
    start: int
    box: Box
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """The element of the buffer after the last."""
        if not self.box.numel:
            return self.start
        return self.start + 1 + sum((n - 1) * each for n, each in zip(self.box.sizes, self.stride, strict=True))

    def view(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """The box as a view of ``flat``, which holds the bucket's elements from number ``first`` on."""
        return flat[self.start - first : self.end - first].as_strided(self.box.sizes, self.stride)


def pieces_of(bucket: Bucket, first: int, last: int) -> Iterator[Piece]:
    """The pieces of elements ``first`` to ``last`` of a bucket, by parameters in their order in the buffer."""
    for slot in bucket.slots:
        begin, end = max(first - slot.offset, 0), min(last - slot.offset, slot.numel)
        shape, stride = _split_groups(slot)
        order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
        start = slot.offset + begin
        for lying in boxes_of_range([shape[dim] for dim in order], begin, end):
            places = [order.index(dim) for dim in range(len(shape))]
            box = Box(tuple(lying.offsets[i] for i in places), tuple(lying.sizes[i] for i in places))
            for skipped, of_model in _translate_to_model(slot, box):
                yield Piece(slot.source, start + skipped, of_model, slot.stride)
            start += box.numel


def _split_groups(slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and stride of a slot; with a dimension of groups, for a part on the model axis."""
    shape, stride = slot.shape, slot.stride
    if slot.part is None:
        return shape, stride
    dim, groups = slot.part.dim, slot.part.groups
    each = shape[dim] // groups
    return (*shape[:dim], groups, each, *shape[dim + 1 :]), (*stride[:dim], each * stride[dim], *stride[dim:])


def _translate_to_model(slot: Slot, box: Box) -> Iterator[tuple[int, Box]]:
    """Translate a box of a slot (as ``_split_groups`` has it) to boxes of the whole parameter, one a group.

    Each comes with its offset, in elements, from the first of the slot's box.
    """
    if slot.part is None:
        yield 0, _rows_of_whole(slot, box)
        return
    dim, each = slot.part.dim, slot.shape[slot.part.dim] // slot.part.groups
    offsets, sizes = list(box.offsets), list(box.sizes)
    first, num_groups = offsets.pop(dim), sizes.pop(dim)
    within = offsets[dim]
    for group in range(first, first + num_groups):
        offsets[dim] = (group * slot.num_parts + slot.part_index) * each + within
        yield (group - first) * each * slot.stride[dim], _rows_of_whole(slot, Box(tuple(offsets), tuple(sizes)))


def _rows_of_whole(slot: Slot, box: Box) -> Box:
    """Translate a box of a slot, which may be some rows of a parameter, to a box of the parameter."""
    return box if slot.whole is None else Box((box.offsets[0] + slot.first_row, *box.offsets[1:]), box.sizes)
