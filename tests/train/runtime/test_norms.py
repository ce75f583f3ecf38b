"""Sums of squares whose error does not grow with how many there are."""

from __future__ import annotations

import math

import pytest
import torch

from zerofx.ir.op_kernels.norms import ROW, largest, square_sum


@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, 5 * ROW + 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_is_within_rounding_of_the_sum_in_float64(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel).to(dtype)
    found = square_sum(values)
    assert found.shape == (1,) and found.dtype == torch.float64
    assert float(found) == pytest.approx(float(values.double().square().sum()), rel=2e-6)


def test_many_values_are_no_less_exact_than_few() -> None:
    values = torch.full((1100 * ROW,), 0.1)
    assert float(square_sum(values)) == pytest.approx(values.numel() * float(values[0].double() ** 2), rel=1e-5)


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(worst: float) -> None:
    values = torch.ones(2 * ROW)
    values[ROW + 3] = worst
    assert not torch.isfinite(square_sum(values)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_is_not_finite_exactly_where_a_value_is_not(dtype: torch.dtype) -> None:
    values = torch.randn(2 * ROW).to(dtype)
    values[ROW] = -torch.finfo(dtype).max
    found = largest(values)
    assert found.shape == (1,) and found.dtype == torch.float64 and float(found) == torch.finfo(dtype).max
    for worst in (math.inf, -math.inf, math.nan):
        for place in (0, 2 * ROW - 1):
            other = values.clone()
            other[place] = worst
            assert not largest(other).isfinite()
    assert float(largest(torch.zeros(1, dtype=dtype))) == 0.0
