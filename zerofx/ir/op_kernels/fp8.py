"""Matrices as factors of products in fp8: scales, casts, and products that are scaled afterwards.

A scale is the largest value of the dtype over the largest magnitude of a matrix, or of each of its rows or columns, in
float64, then in float32, and down to a power of two where a recipe has it so. Values times their scale are clamped,
since a cast of what is out of range is no number. Step by step as torchao's ``Float8Linear`` does it, with its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-12  # of a largest magnitude: a matrix of zeros has a scale too


def largest(values: Tensor, dim: int | None) -> Tensor:
    """The largest magnitude of all ``values``, shape ``[]``, or of those along ``dim``, which stays with a size of 1.

    In float32, of which the scale is the same: ranks that have parts of the values compare theirs.
    """
    magnitudes = values.abs()
    return (magnitudes.max() if dim is None else magnitudes.amax(dim, keepdim=True)).to(torch.float32)


def scale(values: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> Tensor:
    """The float32 scale of all ``values``, or of those along ``dim``, of the shape of their ``largest``."""
    magnitude = largest(values, dim).to(torch.float64).clamp(min=_SMALLEST)
    scales: Tensor = (torch.finfo(dtype).max / magnitude).to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scales))) if power_of_two else scales


def empty_scale(values: Tensor, *given: torch.dtype | int | bool | None) -> Tensor:
    """The fake of ``largest``, of which ``given`` is the dimension alone, and of ``scale``."""
    dim = given[0] if len(given) == 1 else given[1]
    shape = [] if dim is None else [1 if place == dim else size for place, size in enumerate(values.shape)]
    return values.new_empty(shape, dtype=torch.float32)


def cast(values: Tensor, scales: Tensor, dtype: torch.dtype, by_columns: bool) -> Tensor:
    """A matrix times its scales in ``dtype``, laid out row by row or column by column."""
    largest = torch.finfo(dtype).max
    low = (values.to(torch.float32) * scales).clamp(min=-largest, max=largest).to(dtype)
    return low.t().contiguous().t() if by_columns else low.contiguous()


def empty_cast(values: Tensor, scales: Tensor, dtype: torch.dtype, by_columns: bool) -> Tensor:
    """The fake of ``cast``."""
    rows, columns = values.shape
    return (
        values.new_empty((columns, rows), dtype=dtype).t()
        if by_columns
        else values.new_empty(values.shape, dtype=dtype)
    )


def unscale(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A product of two casts, divided by their scales and rounded once more."""
    return (product * (left.reciprocal() * right.reciprocal())).to(product.dtype)


def empty_unscale(product: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The fake of ``unscale``."""
    return product.new_empty(product.shape)
