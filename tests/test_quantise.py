"""Values in blocks with a scale each: what comes back is near what went in, and what is packed is as long as said."""

from __future__ import annotations

import pytest
import torch

from zerofx import ops
from zerofx.quantise import (
    BLOCK,
    LEVELS,
    dequantise_at_once,
    dequantise_sum_at_once,
    packed_bytes,
    quantise_at_once,
    unpacked_numel,
)

BITS = (8, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Blocks of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel // BLOCK, BLOCK, generator=generator)
    found *= 10.0 ** torch.randint(-3, 3, (numel // BLOCK, 1), generator=generator)
    found[0] = 0
    return found.view(-1).to(dtype)


def bound(given: torch.Tensor, bits: int) -> torch.Tensor:
    """Half a step of each value's block, and what float32 and the result's dtype round."""
    blocks = given.double().view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)
    return largest * (0.5 / LEVELS[bits] + 1e-6 + torch.finfo(given.dtype).eps)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_within_half_a_step_of_their_block(dtype: torch.dtype, bits: int) -> None:
    given = values(12 * BLOCK, dtype)
    packed = ops.quantise(given, 3, bits)
    assert packed.dtype == torch.uint8 and packed.numel() == 3 * packed_bytes(4 * BLOCK, bits)
    back = ops.dequantise(packed, 3, bits, dtype)
    error = (back.double() - given.double()).abs()
    assert (error <= bound(given, bits)).all()
    assert not back[:BLOCK].any()  # a block of zeros
    if dtype == torch.float32:  # no finer bound would hold: somewhere nearly half a step is lost
        assert (error > 0.9 * bound(given, bits)).any()


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_of_a_block_and_whole_steps_are_exact(bits: int) -> None:
    levels = LEVELS[bits]
    given = (torch.arange(BLOCK) % (2 * levels + 1) - levels).float() * 0.25
    assert torch.equal(ops.dequantise(ops.quantise(given, 1, bits), 1, bits, torch.float32), given)


@pytest.mark.parametrize("bits", BITS)
def test_a_part_has_every_other_slice_where_slices_are_interleaved(bits: int) -> None:
    given = values(6 * 2 * BLOCK)  # 2 nodes of 3 ranks: 6 slices
    packed = ops.quantise(given, 3, bits, 2)
    back = ops.dequantise(packed, 3, bits, torch.float32).view(3, 2, -1)
    straight = ops.dequantise(ops.quantise(given, 6, bits), 6, bits, torch.float32).view(2, 3, -1)
    assert torch.equal(back, straight.transpose(0, 1))


@pytest.mark.parametrize("bits", BITS)
def test_a_sum_of_parts_is_within_the_sum_of_their_bounds(bits: int) -> None:
    given = values(4 * 3 * BLOCK)
    total = ops.dequantise_sum(ops.quantise(given, 4, bits), 4, bits, torch.float32)
    error = (total.double() - given.double().view(4, -1).sum(0)).abs()
    assert (error <= bound(given, bits).view(4, -1).sum(0)).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_overflowed_has_no_finite_value(bad: float, bits: int) -> None:
    given = torch.ones(3 * BLOCK)
    given[BLOCK + 5] = bad
    back = ops.dequantise(ops.quantise(given, 1, bits), 1, bits, torch.float32).view(3, BLOCK)
    assert not back[1].isfinite().any()
    assert back[0].eq(1).all() and back[2].eq(1).all()


@pytest.mark.parametrize("bits", BITS)
def test_the_smallest_and_largest_numbers_survive(bits: int) -> None:
    for magnitude in (1e-45, 1e-38, 3e38):
        given = torch.full((BLOCK,), magnitude)
        back = ops.dequantise(ops.quantise(given, 1, bits), 1, bits, torch.float32)
        assert back.isfinite().all()
        assert ((back - given).abs() <= max(magnitude * 1e-6, torch.finfo(torch.float32).tiny)).all()


@pytest.mark.parametrize("bits", BITS)
def test_what_is_packed_is_as_long_as_fake_tensors_say(bits: int) -> None:
    for num_parts, interleave in ((1, 1), (2, 3)):
        given = values(6 * BLOCK)
        packed = ops.quantise(given, num_parts, bits, interleave)
        fake = ops.quantise(given.to("meta"), num_parts, bits, interleave)
        assert (fake.shape, fake.dtype) == (packed.shape, packed.dtype)
        assert num_parts * unpacked_numel(packed.numel() // num_parts, bits) == given.numel()
        for op in (ops.dequantise, ops.dequantise_sum):
            shape = op(packed, num_parts, bits, torch.bfloat16).shape
            assert op(fake, num_parts, bits, torch.bfloat16).shape == shape


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_compiled_gives_the_same_bytes_and_values(dtype: torch.dtype, bits: int) -> None:
    given = values(8 * BLOCK, dtype)
    packed = ops.quantise(given, 4, bits, 2)
    assert torch.equal(quantise_at_once(given, 4, bits, 2), packed)
    assert torch.equal(dequantise_at_once(packed, 4, bits, dtype), ops.dequantise(packed, 4, bits, dtype))
    total = ops.dequantise_sum(packed, 4, bits, dtype)
    torch.testing.assert_close(dequantise_sum_at_once(packed, 4, bits, dtype), total)
