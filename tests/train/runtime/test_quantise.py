"""Values in blocks with a scale each: what comes back is near what went in, and what is packed is as long as said."""

from __future__ import annotations

import pytest
import torch

from zerofx.ir import ops
from zerofx.ir.op_kernels.quantise import (
    BLOCK,
    ENCODINGS,
    bytes_of_values,
    dequantise_at_once,
    dequantise_sum_at_once,
    quantise_at_once,
    value_numel,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Blocks of very different sizes, one of them zero."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel // BLOCK, BLOCK, generator=generator)
    found *= 10.0 ** torch.randint(-3, 3, (numel // BLOCK, 1), generator=generator)
    found[0] = 0
    return found.view(-1).to(dtype)


def bound(given: torch.Tensor, encoding: str) -> torch.Tensor:
    """Half of each value's step, and what float32 and the result's dtype round."""
    kind, dtype = ENCODINGS[encoding], torch.finfo(given.dtype)
    blocks = given.double().view(-1, BLOCK).abs()
    scales = blocks.amax(1, keepdim=True).expand_as(blocks) / kind.largest
    halves = torch.maximum(blocks / 16, scales / 2**10) if kind.dtype.is_floating_point else scales / 2
    return (halves + (blocks + halves) * (1e-6 + dtype.eps) + dtype.eps * dtype.tiny).view(-1)


def stored_values(encoding: str) -> torch.Tensor:
    """All that is stored as it is in a block whose largest magnitude is ``Encoding.largest``, ``BLOCK`` values."""
    kind = ENCODINGS[encoding]
    if kind.dtype.is_floating_point:
        return torch.arange(BLOCK, dtype=torch.uint8).view(kind.dtype).float().nan_to_num()
    return (torch.arange(BLOCK) % (2 * kind.largest + 1) - kind.largest).float()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_within_half_a_step_of_their_block(dtype: torch.dtype, encoding: str) -> None:
    given = values(12 * BLOCK, dtype)
    packed = ops.quantise(given, 3, encoding)
    assert packed.dtype == torch.uint8 and packed.numel() == 3 * bytes_of_values(4 * BLOCK, encoding)
    back = ops.dequantise(packed, 3, encoding, dtype)
    error = (back.double() - given.double()).abs()
    assert (error <= bound(given, encoding)).all()
    assert not back[:BLOCK].any()  # a block of zeros
    if dtype == torch.float32:  # no finer bound would hold: somewhere nearly half a step is lost
        assert (error > 0.9 * bound(given, encoding)).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_largest_of_a_block_and_whole_steps_are_exact(encoding: str) -> None:
    given = stored_values(encoding) * 0.25
    assert torch.equal(ops.dequantise(ops.quantise(given, 1, encoding), 1, encoding, torch.float32), given)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nothing_that_can_be_stored_is_nearer(encoding: str) -> None:
    possible, largest = stored_values(encoding), ENCODINGS[encoding].largest
    given = values(4 * BLOCK)[BLOCK:]
    given *= largest / given.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    back = ops.dequantise(ops.quantise(given, 1, encoding), 1, encoding, torch.float32)
    nearest = (given.unsqueeze(1) - possible).abs().amin(1)
    assert ((back - given).abs() <= nearest + 1e-6 * given.abs()).all()


def test_fp8_keeps_small_values_beside_a_large_one_and_int8_those_of_one_size() -> None:
    flat, tailed = torch.rand(64 * BLOCK) + 0.5, torch.randn(64 * BLOCK)
    tailed[::BLOCK] = 300.0
    errors = {}
    for encoding in ("int8", "fp8"):
        for name, given in (("flat", flat), ("tailed", tailed)):
            back = ops.dequantise(ops.quantise(given, 1, encoding), 1, encoding, torch.float32)
            errors[name, encoding] = float((back - given).norm() / given.norm())
            lost = (back == 0).float().mean()
            assert (lost > 0.5) == ((name, encoding) == ("tailed", "int8")) and (lost < 0.01 or lost > 0.5)
    assert 5 * errors["flat", "int8"] < errors["flat", "fp8"]
    assert 5 * errors["tailed", "fp8"] < errors["tailed", "int8"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_part_has_every_other_slice_where_slices_are_interleaved(encoding: str) -> None:
    given = values(6 * 2 * BLOCK)  # 2 nodes of 3 ranks: 6 slices
    packed = ops.quantise(given, 3, encoding, 2)
    back = ops.dequantise(packed, 3, encoding, torch.float32).view(3, 2, -1)
    straight = ops.dequantise(ops.quantise(given, 6, encoding), 6, encoding, torch.float32).view(2, 3, -1)
    assert torch.equal(back, straight.transpose(0, 1))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_sum_of_parts_is_within_the_sum_of_their_bounds(encoding: str) -> None:
    given = values(4 * 3 * BLOCK)
    total = ops.dequantise_sum(ops.quantise(given, 4, encoding), 4, encoding, torch.float32)
    error = (total.double() - given.double().view(4, -1).sum(0)).abs()
    assert (error <= bound(given, encoding).view(4, -1).sum(0)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_overflowed_has_no_finite_value(bad: float, encoding: str) -> None:
    given = torch.ones(3 * BLOCK)
    given[BLOCK + 5] = bad
    back = ops.dequantise(ops.quantise(given, 1, encoding), 1, encoding, torch.float32).view(3, BLOCK)
    assert not back[1].isfinite().any()
    assert back[0].eq(1).all() and back[2].eq(1).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_smallest_and_largest_numbers_survive(encoding: str) -> None:
    for magnitude in (1e-45, 1e-38, 3e38):
        given = torch.full((BLOCK,), magnitude)
        back = ops.dequantise(ops.quantise(given, 1, encoding), 1, encoding, torch.float32)
        assert back.isfinite().all()
        assert ((back - given).abs() <= max(magnitude * 1e-6, torch.finfo(torch.float32).tiny)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_packed_is_as_long_as_fake_tensors_say(encoding: str) -> None:
    for num_parts, interleave in ((1, 1), (2, 3)):
        given = values(6 * BLOCK)
        packed = ops.quantise(given, num_parts, encoding, interleave)
        fake = ops.quantise(given.to("meta"), num_parts, encoding, interleave)
        assert (fake.shape, fake.dtype) == (packed.shape, packed.dtype)
        assert num_parts * value_numel(packed.numel() // num_parts, encoding) == given.numel()
        for op in (ops.dequantise, ops.dequantise_sum):
            shape = op(packed, num_parts, encoding, torch.bfloat16).shape
            assert op(fake, num_parts, encoding, torch.bfloat16).shape == shape


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_compiled_gives_the_same_bytes_and_values(dtype: torch.dtype, encoding: str) -> None:
    given = values(8 * BLOCK, dtype)
    packed = ops.quantise(given, 4, encoding, 2)
    assert torch.equal(quantise_at_once(given, 4, encoding, 2), packed)
    assert torch.equal(dequantise_at_once(packed, 4, encoding, dtype), ops.dequantise(packed, 4, encoding, dtype))
    total = ops.dequantise_sum(packed, 4, encoding, dtype)
    torch.testing.assert_close(dequantise_sum_at_once(packed, 4, encoding, dtype), total)
