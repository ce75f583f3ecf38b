"""Rounding for the wire in one kernel: the bits of ``op_kernels/quantise.py``, for any layout of the parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compiled.kernels.conftest import Interpret
from tests.compiled.kernels.interpreted import launch
from zerofx.ir.op_kernels import quantise
from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=6, deadline=None)
@given(
    encoding=st.sampled_from(list(ENCODINGS)),
    parts=st.integers(1, 4),
    interleave=st.integers(1, 3),
    blocks=st.integers(1, 5),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_codes_and_scales_are_those_of_aten(
    interpret: Interpret, encoding: str, parts: int, interleave: int, blocks: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(parts * interleave * blocks * BLOCK, generator=generator)
    sizes = torch.randint(-12, 12, (values.numel() // BLOCK, 1), generator=generator).exp2()
    values *= sizes.expand(-1, BLOCK).flatten()
    values = values.to(dtype)
    packed, _ = interpret(launch, "wire", "quantise", values, parts, encoding, interleave)
    assert torch.equal(packed, quantise.quantise(values, parts, encoding, interleave))


def test_every_code_of_fp8_and_what_lies_between_two_is_as_in_aten(interpret: Interpret) -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    beside = (halves.nextafter(torch.tensor(limit)) for limit in (0.0, torch.inf))
    edges = torch.cat([codes, halves, *beside])
    rows = torch.nn.functional.pad(torch.cat([edges, -edges]), (0, 10)).view(-1, BLOCK - 1)
    values = torch.nn.functional.pad(rows, (0, 1), value=448.0).flatten()  # the scale of each block is 1
    packed, _ = interpret(launch, "wire", "quantise", values, 1, "fp8")
    assert torch.equal(packed, quantise.quantise(values, 1, "fp8"))
    found, _ = interpret(launch, "wire", "dequantise", packed, 1, "fp8", torch.float32)
    expected = quantise.dequantise(packed, 1, "fp8", torch.float32)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))  # signs of zeros too


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", ["dequantise", "dequantise_sum"])
def test_values_and_sums_are_those_of_aten(interpret: Interpret, name: str, num_parts: int, encoding: str) -> None:
    packed = quantise.quantise(torch.randn(num_parts * 11 * BLOCK), num_parts, encoding)
    for dtype in (torch.float32, torch.float16):
        found, _ = interpret(launch, "wire", name, packed, num_parts, encoding, dtype)
        assert torch.equal(found, getattr(quantise, name)(packed, num_parts, encoding, dtype))
    found, _ = interpret(launch, "wire", name, packed, num_parts, encoding, torch.bfloat16)
    expected = getattr(quantise, name)(packed, num_parts, encoding, torch.bfloat16)
    # The interpreter cuts bfloat16 off where a GPU rounds it.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_that_overflowed_has_no_finite_value(interpret: Interpret, bad: float, encoding: str) -> None:
    values = torch.randn(3 * BLOCK)
    values[BLOCK + 7] = bad
    packed, _ = interpret(launch, "wire", "quantise", values, 1, encoding)
    found, _ = interpret(launch, "wire", "dequantise", packed, 1, encoding, torch.float32)
    assert not found[BLOCK : 2 * BLOCK].isfinite().any()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()


def test_zeros_stay_zeros(interpret: Interpret) -> None:
    packed, _ = interpret(launch, "wire", "quantise", torch.zeros(BLOCK), 1, "int8")
    assert torch.equal(packed, quantise.quantise(torch.zeros(BLOCK), 1, "int8"))
