"""Quantised blocks of 256 values with one scale each: the arithmetic of the operators in ``zerofx/ir/ops.py``.

A block's scale is its largest magnitude over ``Encoding.largest``, in float32, and of the quotient of value and scale a
code is stored. In ``int8`` and ``int4`` it is the nearest whole number, from -127 to 127, or from -7 to 7 with two to a
byte. In ``fp8`` it is the nearest float8_e4m3fn, which has 3 bits of mantissa down to 2^-6 and steps of 2^-9 below. So

    |stored - value| <= scale / 2 = max |block| / (2 largest)                 int8, int4
    |stored - value| <= max(|value| / 16, max |block| / (2^10 largest))     fp8

but for float32's own rounding. A block in which a value is not finite comes back without a finite value, since its
scale is not finite: an overflow is not lost on the way.

Packed values are a row of bytes for each part, so that a part can be sent: its codes, then its scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256


@dataclass(frozen=True)
class Encoding:
    """Format of quantised values: ``bits`` of each, and ``largest``, the code of the largest magnitude in a block.

    ``dtype`` is that of a code. ``gathers`` names the encoding that parameters are gathered in where gradients are
    reduced in this one.
    """

    bits: int
    largest: int
    dtype: torch.dtype
    gathers: str


ENCODINGS = {
    "int8": Encoding(8, 127, torch.int8, "int8"),
    "int4": Encoding(4, 7, torch.uint8, "int8"),
    "fp8": Encoding(8, 448, torch.float8_e4m3fn, "fp8"),
}
_SCALE_BYTES = 4
_SMALLEST = torch.finfo(torch.float32).tiny


def bytes_of_values(numel: int, encoding: str) -> int:
    """Bytes of ``numel`` values, a whole number of blocks, with their scales."""
    return numel * ENCODINGS[encoding].bits // 8 + numel // BLOCK * _SCALE_BYTES


def value_numel(num_bytes: int, encoding: str) -> int:
    """The number of values that ``num_bytes`` hold; the inverse of ``bytes_of_values``."""
    return num_bytes // bytes_of_values(BLOCK, encoding) * BLOCK


def split_blocks(values: torch.Tensor, num_parts: int, interleave: int) -> torch.Tensor:
    """Flat values as a view of shape ``[num_parts, interleave, blocks, BLOCK]``.

    Of ``interleave * num_parts`` equal slices, part p has every ``num_parts``-th from slice p on.
    """
    return values.view(interleave, num_parts, -1, BLOCK).transpose(0, 1)


def pack(blocks: torch.Tensor, encoding: str) -> torch.Tensor:
    """Blocks of shape ``[parts, ..., BLOCK]`` as bytes of shape ``[parts, bytes of a part]``."""
    stored, scales = encode(blocks, encoding)
    num_parts = blocks.shape[0]
    codes = stored.view(torch.uint8).reshape(num_parts, -1)
    return torch.cat([codes, scales.reshape(num_parts, -1).view(torch.uint8)], 1)


def encode(blocks: torch.Tensor, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of blocks, which are the last dimension, and the scale of each, in float32, with a last dimension of 1."""
    kind = ENCODINGS[encoding]
    largest = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = (largest.to(torch.float32) / kind.largest).clamp_min(_SMALLEST)
    if kind.dtype.is_floating_point:
        stored = (blocks / scales).to(kind.dtype)
    elif kind.bits == 4:
        low, high = (torch.round(blocks / scales) + 8).chunk(2, -1)
        stored = (low + 16 * high).to(kind.dtype)
    else:
        stored = torch.round(blocks / scales).to(kind.dtype)
    return stored, scales


def unpack(rows: torch.Tensor, encoding: str) -> torch.Tensor:
    """The values of packed rows, as float32 of shape ``[parts, values of a part]``."""
    kind = ENCODINGS[encoding]
    num_parts, numel = rows.shape[0], value_numel(rows.shape[1], encoding)
    num_stored = numel * kind.bits // 8
    scales = rows[:, num_stored:].view(torch.float32).unsqueeze(-1)
    stored = rows[:, :num_stored].view(num_parts, -1, BLOCK * kind.bits // 8)
    if kind.bits == 4:
        return ((torch.cat([stored & 15, stored >> 4], -1).to(torch.float32) - 8) * scales).view(num_parts, numel)
    return decode(stored.view(kind.dtype), scales).view(num_parts, numel)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of blocks of codes of 8 bits, in float32."""
    return codes.to(torch.float32) * scales


def quantise(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> torch.Tensor:
    """``zerofx.quantise``: flat values to flat bytes, a part at a time, which holds one part's intermediate values."""
    blocks = split_blocks(values, num_parts, interleave)
    packed = values.new_empty(num_parts, bytes_of_values(values.numel() // num_parts, encoding), dtype=torch.uint8)
    for part in range(num_parts):
        packed[part].copy_(pack(blocks[part : part + 1], encoding)[0])
    return packed.view(-1)


def dequantise(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.dequantise``: the values of all parts, in order."""
    rows = packed.view(num_parts, -1)
    values = packed.new_empty(num_parts, value_numel(rows.shape[1], encoding), dtype=dtype)
    for part in range(num_parts):
        values[part].copy_(unpack(rows[part : part + 1], encoding)[0])
    return values.view(-1)


def dequantise_sum(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.dequantise_sum``: the sum of the parts, taken in their order in float32."""
    rows = packed.view(num_parts, -1)
    total = unpack(rows[:1], encoding)[0]
    for part in range(1, num_parts):
        total.add_(unpack(rows[part : part + 1], encoding)[0])
    return total.to(dtype)


def quantise_at_once(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> torch.Tensor:
    """``quantise`` for a compiler that fuses it: all parts in the same operators."""
    return pack(split_blocks(values, num_parts, interleave), encoding).view(-1)


def dequantise_at_once(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``dequantise`` for a compiler that fuses it."""
    return unpack(packed.view(num_parts, -1), encoding).to(dtype).view(-1)


def dequantise_sum_at_once(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``dequantise_sum`` for a compiler that fuses it; it may add in another order."""
    return unpack(packed.view(num_parts, -1), encoding).sum(0).to(dtype)


def quantise_inside(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> int:
    """Bytes that ``quantise`` holds on a CPU beyond its result: of one part, quotients (in float64 for values in that)
    next to the values in float32 or to their rounded values, scales, and the inputs of these."""
    numel, dtype = values.numel() // num_parts, ENCODINGS[encoding].dtype
    wide = torch.promote_types(values.dtype, torch.float32)
    rounded = dtype if dtype.is_floating_point and values.dtype == wide else wide
    return (
        numel * (wide.itemsize + rounded.itemsize)
        + numel // BLOCK * (4 + values.element_size())
        + _offset_bytes(encoding, wide)
    )


def dequantise_inside(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> int:
    """The same of ``dequantise``: codes and values of one part in float32."""
    return value_numel(packed.numel() // num_parts, encoding) * 8 + _offset_bytes(encoding)


def dequantise_sum_inside(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> int:
    """The same next to the sum in float32; the result is made when they are gone."""
    numel = value_numel(packed.numel() // num_parts, encoding)
    return dequantise_inside(packed, num_parts, encoding, dtype) + numel * (4 - dtype.itemsize)


def _offset_bytes(encoding: str, dtype: torch.dtype = torch.float32) -> int:
    """Of the number that is added to 4-bit codes, as a tensor in float64 and in their dtype."""
    return 8 + dtype.itemsize if ENCODINGS[encoding].bits == 4 else 0
