"""Values in blocks of 256 with one scale each, for the wire: the arithmetic of the operators in ``zerofx/ops.py``.

A block's scale is its largest magnitude over ``LEVELS[bits]``, in float32, and a value is stored as the nearest whole
multiple of it: in 8 bits from -127 to 127, in 4 bits from -7 to 7, two to a byte. So

    |stored - value| <= scale / 2 = max |block| / (2 LEVELS[bits])

but for float32's own rounding. A block in which a value is not finite comes back without a finite value, since its
scale is not finite: an overflow is not lost on the way.

Packed values are a row of bytes for each part, so that a part can be sent: its codes, then its scales.
"""

from __future__ import annotations

import torch

BLOCK = 256
LEVELS = {8: 127, 4: 7}
_SCALE_BYTES = 4
_SMALLEST = torch.finfo(torch.float32).tiny


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` values, a whole number of blocks, with their scales."""
    return numel * bits // 8 + numel // BLOCK * _SCALE_BYTES


def unpacked_numel(num_bytes: int, bits: int) -> int:
    """How many values ``packed_bytes`` gives ``num_bytes`` for."""
    return num_bytes // (BLOCK * bits // 8 + _SCALE_BYTES) * BLOCK


def in_blocks(values: torch.Tensor, num_parts: int, interleave: int) -> torch.Tensor:
    """Flat values as a view of shape ``[num_parts, interleave, blocks, BLOCK]``.

    Of ``interleave * num_parts`` equal slices, part p has every ``num_parts``-th from slice p on.
    """
    return values.view(interleave, num_parts, -1, BLOCK).transpose(0, 1)


def pack(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """Blocks of shape ``[parts, ..., BLOCK]`` as bytes of shape ``[parts, bytes of a part]``."""
    largest = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = (largest.to(torch.float32) / LEVELS[bits]).clamp_min(_SMALLEST)
    codes = torch.round(blocks / scales)
    if bits == 4:
        codes = codes + 8
        low, high = codes.chunk(2, -1)
        stored = (low + 16 * high).to(torch.uint8)
    else:
        stored = codes.to(torch.int8).view(torch.uint8)
    num_parts = blocks.shape[0]
    return torch.cat([stored.reshape(num_parts, -1), scales.reshape(num_parts, -1).view(torch.uint8)], 1)


def unpack(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """What ``pack`` has made, as float32 of shape ``[parts, values of a part]``."""
    num_parts, numel = rows.shape[0], unpacked_numel(rows.shape[1], bits)
    num_stored = numel * bits // 8
    scales = rows[:, num_stored:].view(torch.float32).unsqueeze(-1)
    stored = rows[:, :num_stored].view(num_parts, -1, BLOCK * bits // 8)
    if bits == 4:
        codes = torch.cat([stored & 15, stored >> 4], -1).to(torch.float32) - 8
    else:
        codes = stored.view(torch.int8).to(torch.float32)
    return (codes * scales).view(num_parts, numel)


def quantise(values: torch.Tensor, num_parts: int, bits: int, interleave: int = 1) -> torch.Tensor:
    """``zerofx.quantise``: flat values to flat bytes, a part at a time, which holds one part's intermediate values."""
    blocks = in_blocks(values, num_parts, interleave)
    packed = values.new_empty(num_parts, packed_bytes(values.numel() // num_parts, bits), dtype=torch.uint8)
    for part in range(num_parts):
        packed[part].copy_(pack(blocks[part : part + 1], bits)[0])
    return packed.view(-1)


def dequantise(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.dequantise``: the values of all parts, in order."""
    rows = packed.view(num_parts, -1)
    values = packed.new_empty(num_parts, unpacked_numel(rows.shape[1], bits), dtype=dtype)
    for part in range(num_parts):
        values[part].copy_(unpack(rows[part : part + 1], bits)[0])
    return values.view(-1)


def dequantise_sum(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.dequantise_sum``: the sum of the parts, taken in their order in float32."""
    rows = packed.view(num_parts, -1)
    total = unpack(rows[:1], bits)[0]
    for part in range(1, num_parts):
        total.add_(unpack(rows[part : part + 1], bits)[0])
    return total.to(dtype)


def quantise_at_once(values: torch.Tensor, num_parts: int, bits: int, interleave: int = 1) -> torch.Tensor:
    """``quantise`` for a compiler that fuses it: all parts in the same operators."""
    return pack(in_blocks(values, num_parts, interleave), bits).view(-1)


def dequantise_at_once(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``dequantise`` for a compiler that fuses it."""
    return unpack(packed.view(num_parts, -1), bits).to(dtype).view(-1)


def dequantise_sum_at_once(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``dequantise_sum`` for a compiler that fuses it; it may add in another order."""
    return unpack(packed.view(num_parts, -1), bits).sum(0).to(dtype)
