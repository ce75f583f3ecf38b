"""Casts to fp8 of one rank's slice of a bucket of matrices, which have the bits of casts of the whole.

Each matrix has one scale, or one for each of its rows, or of its columns. A slice has runs of elements of some of them,
which may begin and end inside a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from zerofx.ir.buckets import Bucket, Slot

Scaled = Literal["whole", "rows", "columns"]
"""What of a matrix has a scale of its own."""

_AT_A_TIME = 2**20  # elements, in float32, that are there next to the slice and its cast


def num_scales(slot: Slot, scaled: Scaled) -> int:
    """The scales of a matrix."""
    return {"whole": 1, "rows": slot.shape[0], "columns": slot.shape[1]}[scaled]


def first_scale(slots: Sequence[Slot], name: str, scaled: Scaled) -> int:
    """The place of the first scale of a matrix among those of all in its bucket."""
    names = [slot.name for slot in slots]
    return sum(num_scales(slot, scaled) for slot in slots[: names.index(name)])


def largest(shard: Tensor, bucket: Bucket, place: int, scaled: Scaled) -> Tensor:
    """The largest magnitudes of what has one scale in the slice of the rank at ``place``, float32, shape ``[n, 1]``;
    zero of what the slice has nothing of."""
    result = shard.new_zeros(sum(num_scales(slot, scaled) for slot in bucket.slots), dtype=torch.float32)
    for block, scales in _blocks(shard, result, bucket, place, scaled):
        dims = {"whole": (0, 1), "rows": 1, "columns": 0}[scaled]
        magnitudes = torch.linalg.vector_norm(block, math.inf, dim=dims).to(torch.float32)
        torch.maximum(scales.view(magnitudes.shape), magnitudes, out=scales.view(magnitudes.shape))
    return result.view(-1, 1)


def cast(shard: Tensor, scales: Tensor, bucket: Bucket, place: int, scaled: Scaled) -> Tensor:
    """The slice times the ``scales`` of all ranks, float32, shape ``[n, 1]``, in float8_e4m3fn; padding is zero."""
    low = torch.zeros(shard.shape, dtype=torch.float8_e4m3fn, device=shard.device)
    most = torch.finfo(low.dtype).max
    given, into = (_blocks(flat, scales, bucket, place, scaled) for flat in (shard, low))
    for (block, of_block), (of_low, _) in zip(given, into, strict=True):
        of_low.copy_(block.to(torch.float32, copy=True).mul_(of_block).clamp_(-most, most))
    return low


def cast_inside(shard: Tensor, *_: object, **__: object) -> int:
    """The most bytes that ``cast`` holds beyond what it is given and gives."""
    return 4 * min(shard.numel(), _AT_A_TIME)


def _blocks(
    flat: Tensor, scales: Tensor, bucket: Bucket, place: int, scaled: Scaled
) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs of rows in a slice, as matrices, each with its scales, of a shape that broadcasts: views of both."""
    begin, scales = place * bucket.shard_numel, scales.view(-1)
    for slot in bucket.slots:
        columns, first = slot.shape[1], first_scale(bucket.slots, slot.name, scaled)
        at, end = (min(max(begin, slot.offset), slot.offset + slot.numel) - slot.offset, 0)
        end = max(min(begin + bucket.shard_numel, slot.offset + slot.numel) - slot.offset, at)
        while at < end:
            row, column = divmod(at, columns)
            rows = min((end - at) // columns, max(_AT_A_TIME // columns, 1)) if column == 0 else 0
            length = rows * columns if rows else min(columns - column, end - at)
            start = slot.offset + at - begin
            block = flat[start : start + length].view(max(rows, 1), -1)
            if scaled == "whole":
                of_block = scales[first]
            elif scaled == "rows":
                of_block = scales[first + row : first + row + max(rows, 1), None]
            else:
                of_block = scales[first + column : first + column + block.shape[1]]
            yield block, of_block
            at += length
