"""Values in blocks for the wire, rounded and brought back in one pass each: the arithmetic of ``zerofx/quantise.py``.

ATen takes a part at a time through eight kernels and a concatenation of codes and scales. Here each program reads some
blocks, and writes their codes and scales to where they are sent from. The bits are ATen's: quotients are rounded as
IEEE 754 has it, halves to even, sums are taken in the order of the parts, and nothing is contracted to fused
multiply-adds. Only codes in a block with a value that is not finite may differ, whose scale is not finite either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerofx.quantise import BLOCK, LEVELS, packed_bytes, unpacked_numel
from zerofx.runtime.current_device import on_device

ROWS = 4  # blocks that a program works on
NUM_WARPS = 4


@triton.jit
def _codes(values, scales, LEVEL: tl.constexpr):
    """The nearest whole multiple of the scale: adding 1.5 * 2**23 leaves no bits for a fraction."""
    codes = tl.div_rn(values, scales[:, None]) + 12582912.0 - 12582912.0
    # What is not finite has a scale that is not: its code only has to be one that an integer can hold.
    return tl.where(tl.abs(codes) <= LEVEL, codes, 0.0)


@triton.jit
def quantise_kernel(
    values, packed, scales, num_blocks, blocks_of_part, blocks_of_slice, num_parts, row_bytes,
    BITS: tl.constexpr, LEVEL: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks, in the order in which they are stored, to codes and scales."""
    stored = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (stored < num_blocks)[:, None]
    part, place = stored // blocks_of_part, stored % blocks_of_part
    block = (place // blocks_of_slice * num_parts + part) * blocks_of_slice + place % blocks_of_slice
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)[None, :]
    low = tl.load(values + block[:, None] * BLOCK + lanes, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(values + block[:, None] * BLOCK + half + lanes, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    # A maximum leaves out what is no number.
    lost = tl.sum((low != low).to(tl.int32) + (high != high).to(tl.int32), 1) > 0
    scale = tl.maximum(tl.div_rn(largest, LEVEL), SMALLEST)
    scale = tl.where(lost, float("nan"), scale)
    low, high = _codes(low, scale, LEVEL), _codes(high, scale, LEVEL)
    codes = packed + part[:, None] * row_bytes + place[:, None] * (BLOCK * BITS // 8)
    if BITS == 4:
        pair = low + 8.0 + 16.0 * (high + 8.0)
        tl.store(codes + lanes, pair.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        tl.store(codes + lanes, low.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
        tl.store(codes + half + lanes, high.to(tl.int8).to(tl.uint8, bitcast=True), mask=inside)
    first_scale = (part * row_bytes + blocks_of_part * (BLOCK * BITS // 8)) // 4
    tl.store(scales + first_scale + place, scale, mask=stored < num_blocks)


@triton.jit
def dequantise_kernel(
    packed, scales, values, blocks_of_part, row_bytes, num_summed,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks of one part, or summed over ``num_summed`` parts in their order."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64)
    inside = (place < blocks_of_part)[:, None]
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)[None, :]
    low = tl.zeros((ROWS, half), tl.float32)
    high = tl.zeros((ROWS, half), tl.float32)
    for number in range(num_summed):
        start = (first + number) * row_bytes
        codes = packed + start + place[:, None] * (BLOCK * BITS // 8)
        at = (start + blocks_of_part * (BLOCK * BITS // 8)) // 4 + place
        scale = tl.load(scales + at, mask=place < blocks_of_part, other=0.0)[:, None]
        if BITS == 4:
            pair = tl.load(codes + lanes, mask=inside, other=0).to(tl.int32)
            low += ((pair & 15) - 8).to(tl.float32) * scale
            high += ((pair >> 4) - 8).to(tl.float32) * scale
        else:
            one = tl.load(codes + lanes, mask=inside, other=0).to(tl.int8, bitcast=True)
            other = tl.load(codes + half + lanes, mask=inside, other=0).to(tl.int8, bitcast=True)
            low += one.to(tl.float32) * scale
            high += other.to(tl.float32) * scale
    into = values + (first * blocks_of_part + place)[:, None] * BLOCK
    tl.store(into + lanes, low, mask=inside)
    tl.store(into + half + lanes, high, mask=inside)


def quantise(values: torch.Tensor, num_parts: int, bits: int, interleave: int = 1) -> torch.Tensor:
    """``zerofx.quantise.quantise`` in one kernel."""
    num_blocks = values.numel() // BLOCK
    blocks_of_part = num_blocks // num_parts
    row_bytes = packed_bytes(blocks_of_part * BLOCK, bits)
    packed = values.new_empty(num_parts * row_bytes, dtype=torch.uint8)
    if num_blocks:
        with on_device(values.device):
            quantise_kernel[(triton.cdiv(num_blocks, ROWS),)](
                values, packed, packed.view(torch.float32), num_blocks, blocks_of_part, blocks_of_part // interleave,
                num_parts, row_bytes, BITS=bits, LEVEL=LEVELS[bits], SMALLEST=torch.finfo(torch.float32).tiny,
                BLOCK=BLOCK, ROWS=ROWS, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return packed


def dequantise(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.quantise.dequantise`` in one kernel."""
    return _dequantised(packed, num_parts, bits, dtype, num_summed=1)


def dequantise_sum(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.quantise.dequantise_sum`` in one kernel."""
    return _dequantised(packed, num_parts, bits, dtype, num_summed=num_parts)


def _dequantised(packed: torch.Tensor, num_parts: int, bits: int, dtype: torch.dtype, num_summed: int) -> torch.Tensor:
    row_bytes = packed.numel() // num_parts
    numel = unpacked_numel(row_bytes, bits)
    num_values = num_parts // num_summed
    values = packed.new_empty(num_values * numel, dtype=dtype)
    if numel:
        with on_device(packed.device):
            dequantise_kernel[(triton.cdiv(numel // BLOCK, ROWS), num_values)](
                packed, packed.view(torch.float32), values, numel // BLOCK, row_bytes, num_summed,
                BITS=bits, BLOCK=BLOCK, ROWS=ROWS, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return values
