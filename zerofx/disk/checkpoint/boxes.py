"""Boxes of tensors: the boxes of a contiguous part of a flat tensor, and the intersection of two boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its first element and its size along each dimension. Both are empty for a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The intersection of both; None if it is empty."""
        first = tuple(map(max, self.offsets, other.offsets))
        last = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return Box(first, sizes) if all(size > 0 for size in sizes) else None

    def halves(self) -> tuple[Box, ...]:
        """The two halves of the box, along its first dimension that can be divided; none for a single element."""
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if dim is None:
            return ()
        size = self.sizes[dim]

        def part(begin: int, end: int) -> Box:
            offsets = (*self.offsets[:dim], self.offsets[dim] + begin, *self.offsets[dim + 1 :])
            return Box(offsets, (*self.sizes[:dim], end - begin, *self.sizes[dim + 1 :]))

        return part(0, size // 2), part(size // 2, size)

    def select(self, tensor: torch.Tensor, outer: Box) -> torch.Tensor:
        """This box as a view of ``tensor``, which is the box ``outer``."""
        for dim, (begin, size, start) in enumerate(zip(self.offsets, self.sizes, outer.offsets, strict=True)):
            tensor = tensor.narrow(dim, begin - start, size)
        return tensor

    def span(self, outer: Box) -> tuple[int, int]:
        """The elements of ``outer``, in row-major order, from the first of this box to after the last."""
        first = last = 0
        for begin, size, start, length in zip(self.offsets, self.sizes, outer.offsets, outer.sizes, strict=True):
            first = first * length + begin - start
            last = last * length + begin - start + size - 1
        return first, last + 1


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements ``start`` to ``stop`` of a tensor in row-major order, in this order.

    For ``d`` dimensions there are at most ``2 d - 1``: a part of a row, whole rows, and a part of a row, and so on
    inside the parts.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row_numel = math.prod(shape[1:])
    boxes: list[Box] = []

    def part_of_row(first: int, last: int) -> None:
        row = first // row_numel
        inner = boxes_of_range(shape[1:], first - row * row_numel, last - row * row_numel)
        boxes.extend(Box((row, *box.offsets), (1, *box.sizes)) for box in inner)

    if start % row_numel:
        end = min(stop, (start // row_numel + 1) * row_numel)
        part_of_row(start, end)
        start = end
    num_rows = (stop - start) // row_numel
    if num_rows:
        boxes.append(Box((start // row_numel, *(0 for _ in shape[1:])), (num_rows, *shape[1:])))
        start += num_rows * row_numel
    if start < stop:
        part_of_row(start, stop)
    return boxes
