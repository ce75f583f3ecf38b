"""Activations in 8 bits: what is restored is within the bound of its block and laid out as it was, in any shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.train.runtime.test_quantise import bound
from zerofx.ir import ops
from zerofx.ir.op_kernels import saved
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.scheduler.cost.cpu.peaks import CpuPeak

ENCODINGS = ("int8", "fp8")
DTYPES = sorted(saved.DTYPES, key=str)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-3, 3, shape[:1] + (1,) * (len(shape) - 1))
    return given.to(dtype)


def order_of(given: torch.Tensor) -> list[int]:
    return saved.memory_order(given.shape, given.stride())


def round_trip(given: torch.Tensor, encoding: str) -> torch.Tensor:
    codes, scales = ops.quantise_saved(given, encoding, order_of(given))
    assert codes.nbytes + scales.nbytes == saved.num_bytes_kept(given.numel())
    restored: torch.Tensor = ops.restore_saved(codes, scales, encoding, given.shape, given.stride(), given.dtype)
    return restored


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [5, BLOCK, 7 * BLOCK + 100, 2**15 + 3 * BLOCK + 1])
def test_what_is_restored_is_within_the_bound_of_its_block(numel: int, dtype: torch.dtype, encoding: str) -> None:
    given = values(numel, dtype=dtype)
    error = (round_trip(given, encoding).double() - given.double()).abs()
    padded = torch.nn.functional.pad(given, (0, -numel % BLOCK))
    assert (error <= bound(padded, encoding)[:numel]).all()
    assert numel < BLOCK or (error > 0.5 * bound(padded, encoding)[:numel]).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_documented_bounds_hold(encoding: str) -> None:
    given = values(1000 * BLOCK)
    error = (round_trip(given, encoding) - given).abs().view(-1, BLOCK)
    largest = given.abs().view(-1, BLOCK).amax(1, keepdim=True)
    if encoding == "int8":
        assert (error <= largest / 254 * (1 + 1e-5)).all()
    else:
        of_itself = torch.where(given.abs().view(-1, BLOCK) < largest / 28672, 0, given.abs().view(-1, BLOCK) / 16)
        assert (error <= torch.maximum(of_itself, largest / 458752) * (1 + 1e-5)).all()


def _layouts() -> dict[str, torch.Tensor]:
    images = values(4, 6, 10, 10)
    return {
        "rows": values(6, 500),
        "transposed": values(6, 500).t(),
        "channels last": images.to(memory_format=torch.channels_last),
        "heads": values(2, 16, 4, 8).transpose(1, 2),
        "one place": values(300, 1, 4),
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layout", _layouts())
def test_values_come_back_as_they_lay_in_memory(layout: str, encoding: str) -> None:
    given = _layouts()[layout]
    restored = round_trip(given, encoding)
    assert restored.stride() == given.stride()
    flat = given.as_strided((given.numel(),), (1,)).clone()
    assert torch.equal(restored.as_strided((given.numel(),), (1,)), round_trip(flat, encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layout", _layouts())
def test_what_compilers_have_has_the_same_bits(layout: str, encoding: str) -> None:
    for dtype in DTYPES:
        given = _layouts()[layout].to(dtype)
        codes, scales = ops.quantise_saved(given, encoding, order_of(given))
        fused = saved.quantise_at_once(given, encoding, order_of(given))
        assert torch.equal(fused[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(fused[1], scales)
        like: Any = (encoding, given.shape, given.stride(), dtype)
        restored = saved.restore_at_once(codes, scales, *like)
        assert torch.equal(restored, ops.restore_saved(codes, scales, *like)) and restored.stride() == given.stride()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_laid_out_otherwise_than_a_plan_has_them_are_the_same(encoding: str) -> None:
    planned = _layouts()["channels last"]
    codes, scales = ops.quantise_saved(planned.contiguous(), encoding, order_of(planned))
    restored = ops.restore_saved(codes, scales, encoding, planned.shape, planned.stride(), planned.dtype)
    assert torch.equal(restored, round_trip(planned, encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_block_that_overflowed_has_no_finite_value(encoding: str) -> None:
    given = torch.ones(3 * BLOCK)
    given[BLOCK + 5] = float("inf")
    back = round_trip(given, encoding).view(3, BLOCK)
    assert not back[1].isfinite().any() and back[0].eq(1).all() and back[2].eq(1).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_they_hold_inside_is_as_said(dtype: torch.dtype, encoding: str) -> None:
    for numel in (BLOCK, 9 * BLOCK + 10, 2**15 + 700, 2**22 + 5):
        given = values(numel, dtype=dtype)
        with CpuPeak() as peak:
            codes, scales = ops.quantise_saved(given, encoding, [0])
        assert peak.num_bytes == codes.nbytes + scales.nbytes + saved.quantise_saved_inside(given, encoding, [0])
        like: Any = (encoding, given.shape, given.stride(), dtype)
        with CpuPeak() as peak:
            restored = ops.restore_saved(codes, scales, *like)
        assert peak.num_bytes == restored.nbytes + saved.restore_saved_inside(codes, scales, *like)
        assert peak.num_bytes <= 2 * max(given.nbytes, 2**20)
