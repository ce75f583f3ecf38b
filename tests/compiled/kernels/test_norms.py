"""The sum of squares by a kernel: that of the reference, within what rows are rounded by."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compiled.kernels.conftest import Interpret
from tests.compiled.kernels.interpreted import launch
from zerofx.ir.op_kernels.norms import ROW, square_sum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("numel", [0, 1, ROW - 1, ROW, 3 * ROW + 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_of_the_reference(interpret: Interpret, numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel).to(dtype)
    found, _ = interpret(launch, "norms", "square_sum", values)
    assert found.shape == (1,) and found.dtype == torch.float64
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    exact = values.double().square().sum(0, keepdim=True)
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(found, square_sum(values), rtol=2 * tolerance, atol=0.0)


def test_rows_are_those_of_the_reference(interpret: Interpret) -> None:
    # In float32 a small square beside 2**24 is lost; in the next row it is not.
    values = torch.zeros(2 * ROW)
    values[[ROW - 1, ROW]] = torch.tensor([2.0**13, 0.5])
    found, _ = interpret(launch, "norms", "square_sum", values)
    assert float(found) == float(square_sum(values)) == 2.0**26 + 0.25


@pytest.mark.parametrize("worst", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(interpret: Interpret, worst: float) -> None:
    values = torch.ones(2 * ROW + 5)
    values[ROW + 3] = worst
    found, _ = interpret(launch, "norms", "square_sum", values)
    assert not found.isfinite().any()
