"""Quantise and dequantise blocks in one pass each: the arithmetic of ``zerofx/ir/op_kernels/quantise.py``.

ATen takes a part at a time through eight kernels and a concatenation of codes and scales. Here each program reads some
blocks, and writes their codes and scales to where they are sent from. The bits are ATen's: quotients are rounded as
IEEE 754 has it, halves to even, sums are taken in the order of the parts, and nothing is contracted to fused
multiply-adds. Only codes in a block with a value that is not finite may differ, whose scale is not finite either.

float8_e4m3fn is made and read by whole numbers: Triton has conversions of it for sm_89 and later only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from zerofx.codegen.kernels.current_device import on_device
from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS, packed_bytes, unpacked_numel

ROWS = 4  # blocks that a program works on
NUM_WARPS = 4


@triton.jit
def _nearest(quotients, LARGEST: tl.constexpr):
    """The nearest whole numbers: adding 1.5 * 2**23 leaves no bits for a fraction."""
    codes = quotients + 12582912.0 - 12582912.0
    # What is not finite has a scale that is not: its code only has to be one that an integer can hold.
    return tl.where(tl.abs(codes) <= LARGEST, codes, 0.0)


@triton.jit
def _to_bytes(quotients, LARGEST: tl.constexpr, IS_FLOAT: tl.constexpr):
    """The 8-bit codes of quotients, halves to even."""
    if IS_FLOAT:
        bits = quotients.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Of 23 bits of mantissa 3 stay, and exponents count from -7 in the place of -127.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2**-6 steps are of 2**-9: adding 2**14 leaves no bits for less.
        steps = (tl.abs(quotients) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = (((bits >> 24) & 0x80) | tl.where(tl.abs(quotients) < 0.015625, steps, normal)).to(tl.uint8)
    else:
        codes = _nearest(quotients, LARGEST).to(tl.int8).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def _from_bytes(stored, IS_FLOAT: tl.constexpr):
    """What 8-bit codes stand for, in float32."""
    if IS_FLOAT:
        magnitude = stored.to(tl.int32) & 0x7F
        steps = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < 8, steps, (magnitude << 20) + (120 << 23))
        codes = (bits | ((stored.to(tl.int32) & 0x80) << 24)).to(tl.float32, bitcast=True)
    else:
        codes = stored.to(tl.int8, bitcast=True).to(tl.float32)
    return codes


@triton.jit
def _code_bytes(num_blocks, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """The bytes of the codes of some blocks, which may be 2 GiB and more."""
    return tl.full([], BLOCK * BITS // 8, tl.int64) * num_blocks


@triton.jit
def quantise_kernel(
    values, packed, scales, num_blocks, blocks_of_part, blocks_of_slice, num_parts, row_bytes,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
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
    scale = tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST)
    scale = tl.where(lost, float("nan"), scale)
    low, high = tl.div_rn(low, scale[:, None]), tl.div_rn(high, scale[:, None])
    codes = packed + part[:, None] * row_bytes + place[:, None] * (BLOCK * BITS // 8)
    if BITS == 4:
        pair = _nearest(low, LARGEST) + 8.0 + 16.0 * (_nearest(high, LARGEST) + 8.0)
        tl.store(codes + lanes, pair.to(tl.int32).to(tl.uint8), mask=inside)
    else:
        tl.store(codes + lanes, _to_bytes(low, LARGEST, IS_FLOAT), mask=inside)
        tl.store(codes + half + lanes, _to_bytes(high, LARGEST, IS_FLOAT), mask=inside)
    first_scale = (part * row_bytes + _code_bytes(blocks_of_part, BLOCK, BITS)) // 4
    tl.store(scales + first_scale + place, scale, mask=stored < num_blocks)


@triton.jit
def _blocks(
    packed, scales, part, place, blocks_of_part, row_bytes,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The two halves of the blocks at ``place`` in a part, in float32."""
    inside = (place < blocks_of_part)[:, None]
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)[None, :]
    start = part * row_bytes
    codes = packed + start + place[:, None] * (BLOCK * BITS // 8)
    at = (start + _code_bytes(blocks_of_part, BLOCK, BITS)) // 4 + place
    scale = tl.load(scales + at, mask=place < blocks_of_part, other=0.0)[:, None]
    if BITS == 4:
        pair = tl.load(codes + lanes, mask=inside, other=0).to(tl.int32)
        low, high = ((pair & 15) - 8).to(tl.float32), ((pair >> 4) - 8).to(tl.float32)
    else:
        low = _from_bytes(tl.load(codes + lanes, mask=inside, other=0), IS_FLOAT)
        high = _from_bytes(tl.load(codes + half + lanes, mask=inside, other=0), IS_FLOAT)
    return low * scale, high * scale


@triton.jit
def dequantise_kernel(
    packed, scales, values, blocks_of_part, row_bytes, num_summed,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``ROWS`` blocks of one part, or summed over ``num_summed`` parts in their order."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64)
    inside = (place < blocks_of_part)[:, None]
    half: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, half)[None, :]
    low, high = _blocks(packed, scales, first, place, blocks_of_part, row_bytes, BITS, IS_FLOAT, BLOCK)
    for number in range(1, num_summed):
        block, other = _blocks(packed, scales, first + number, place, blocks_of_part, row_bytes, BITS, IS_FLOAT, BLOCK)
        low += block
        high += other
    into = values + (first * blocks_of_part + place)[:, None] * BLOCK
    tl.store(into + lanes, low, mask=inside)
    tl.store(into + half + lanes, high, mask=inside)


def options(encoding: str) -> dict[str, Any]:
    """What both kernels are built with for an encoding."""
    kind = ENCODINGS[encoding]
    return {
        "BITS": kind.bits, "IS_FLOAT": kind.dtype.is_floating_point, "BLOCK": BLOCK, "ROWS": ROWS,
        "num_warps": NUM_WARPS, "enable_fp_fusion": False,
    }  # fmt: skip


def quantise(values: torch.Tensor, num_parts: int, encoding: str, interleave: int = 1) -> torch.Tensor:
    """``zerofx.ir.op_kernels.quantise.quantise`` in one kernel."""
    num_blocks = values.numel() // BLOCK
    blocks_of_part = num_blocks // num_parts
    row_bytes = packed_bytes(blocks_of_part * BLOCK, encoding)
    packed = values.new_empty(num_parts * row_bytes, dtype=torch.uint8)
    if num_blocks:
        with on_device(values.device):
            quantise_kernel[(triton.cdiv(num_blocks, ROWS),)](
                values, packed, packed.view(torch.float32), num_blocks, blocks_of_part, blocks_of_part // interleave,
                num_parts, row_bytes, LARGEST=ENCODINGS[encoding].largest, SMALLEST=torch.finfo(torch.float32).tiny,
                **options(encoding),
            )  # fmt: skip
    return packed


def dequantise(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.ir.op_kernels.quantise.dequantise`` in one kernel."""
    return _dequantised(packed, num_parts, encoding, dtype, num_summed=1)


def dequantise_sum(packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> torch.Tensor:
    """``zerofx.ir.op_kernels.quantise.dequantise_sum`` in one kernel."""
    return _dequantised(packed, num_parts, encoding, dtype, num_summed=num_parts)


def _dequantised(
    packed: torch.Tensor, num_parts: int, encoding: str, dtype: torch.dtype, num_summed: int
) -> torch.Tensor:
    row_bytes = packed.numel() // num_parts
    numel = unpacked_numel(row_bytes, encoding)
    num_values = num_parts // num_summed
    values = packed.new_empty(num_values * numel, dtype=dtype)
    if numel:
        with on_device(packed.device):
            dequantise_kernel[(triton.cdiv(numel // BLOCK, ROWS), num_values)](
                packed, packed.view(torch.float32), values, numel // BLOCK, row_bytes, num_summed,
                **options(encoding),
            )  # fmt: skip
    return values
