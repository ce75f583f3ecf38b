"""Sums of squares whose error does not grow with how many there are."""

from __future__ import annotations

import math

import pytest
import torch

from zerofx.ir.op_kernels.norms import ROW, square_sum


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
