"""Activations in 8 bits between forward and backward: codes, and a scale in float32 for each block of 256 values.

Blocks are those of ``quantise.py``, whose bounds hold, in the order in which the values lie in memory; the last one may
be shorter. A block in which a value is not finite comes back without a finite value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS, decode, encode, quantise_inside

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_LEAST_AT_A_TIME = 2**15  # elements, of which there are quotients in float32 next to the codes; or a 64th of all


def num_bytes_kept(numel: int) -> int:
    """Bytes of so many values with their scales."""
    return numel + 4 * _num_blocks(numel)


def memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions in the order in which they lie in memory, the one with the largest stride first."""
    return sorted(range(len(size)), key=lambda dim: (-stride[dim], size[dim] == 1, dim))


def empty_saved(values: Tensor, encoding: str, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The fake of ``quantise_saved``."""
    codes = values.new_empty(values.numel(), dtype=ENCODINGS[encoding].dtype)
    return codes, values.new_empty(_num_blocks(values.numel()), dtype=torch.float32)


def empty_restored(
    codes: Tensor, scales: Tensor, encoding: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The fake of ``restore_saved``."""
    return codes.new_empty_strided(size, stride, dtype=dtype)


def quantise_saved(values: Tensor, encoding: str, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``zerofx.quantise_saved``: codes and scales, some blocks at a time; ``order`` as ``memory_order`` gives it."""
    codes, scales = empty_saved(values, encoding, order)
    flat = values.permute(*order).reshape(-1)
    for first, last, width in _runs(values.numel(), _num_at_a_time(values.numel())):
        stored, of_blocks = encode(flat[first:last].view(-1, width), encoding)
        codes[first:last].view(-1, width).copy_(stored)
        scales[first // BLOCK : _num_blocks(last)].copy_(of_blocks.view(-1))
        del stored, of_blocks
    return codes, scales


def restore_saved(
    codes: Tensor, scales: Tensor, encoding: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``zerofx.restore_saved``: the values, laid out as they were."""
    values = empty_restored(codes, scales, encoding, size, stride, dtype)
    flat = values.as_strided((values.numel(),), (1,))
    for first, last, _ in _runs(values.numel(), _num_at_a_time(values.numel())):
        part = flat[first:last]
        wide = part if dtype == torch.float32 else part.to(torch.float32)
        of_blocks = scales[first // BLOCK : _num_blocks(last)].view(-1, 1)
        wide.copy_(codes[first:last]).view(of_blocks.numel(), -1).mul_(of_blocks)
        if wide is not part:
            part.copy_(wide)
        del wide
    return values


def quantise_at_once(values: Tensor, encoding: str, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``quantise_saved`` for a compiler that fuses it."""
    numel = values.numel()
    flat = values.permute(*order).reshape(-1)
    parts = [encode(flat[first:last].reshape(-1, width), encoding) for first, last, width in _runs(numel, numel)]
    codes, scales = ([part[place].reshape(-1) for part in parts] for place in (0, 1))
    return (codes[0], scales[0]) if len(parts) == 1 else (torch.cat(codes), torch.cat(scales))


def restore_at_once(
    codes: Tensor, scales: Tensor, encoding: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``restore_saved`` for a compiler that fuses it."""
    parts = [
        decode(codes[first:last].reshape(-1, width), scales[first // BLOCK : _num_blocks(last)].reshape(-1, 1))
        for first, last, width in _runs(codes.numel(), codes.numel())
    ]
    values = [part.to(dtype).reshape(-1) for part in parts]
    flat = values[0] if len(values) == 1 else torch.cat(values)
    order = memory_order(size, stride)
    return flat.reshape([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(size))])


def quantise_saved_inside(values: Tensor, encoding: str, _order: Sequence[int]) -> int:
    """Bytes that ``quantise_saved`` holds on a CPU beyond its results, at the largest run of blocks."""
    return quantise_inside(values.new_empty(_most_at_once(values.numel()), device="meta"), 1, encoding)


def restore_saved_inside(
    codes: Tensor, scales: Tensor, encoding: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> int:
    """The same of ``restore_saved``: values of one run in float32, where the results are not."""
    return 0 if dtype == torch.float32 else _most_at_once(codes.numel()) * 4


def _most_at_once(numel: int) -> int:
    """Values of the largest run; of less than a block, those of a block."""
    return max(min(numel, _num_at_a_time(numel)) // BLOCK, 1) * BLOCK


def _num_at_a_time(numel: int) -> int:
    return max(_LEAST_AT_A_TIME, numel // 64)


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _runs(numel: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Runs of at most ``most`` values from a first to a last one, with the width of their blocks."""
    whole = numel // BLOCK * BLOCK
    for first in range(0, whole, max(most // BLOCK, 1) * BLOCK):
        yield first, min(first + max(most // BLOCK, 1) * BLOCK, whole), BLOCK
    if whole < numel:
        yield whole, numel, numel - whole
