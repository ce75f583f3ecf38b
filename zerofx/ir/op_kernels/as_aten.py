"""Kernels of operators that do what one of ATen's does, in a form that a step graph can hold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def mm_into(into: Tensor, a: Tensor, b: Tensor) -> None:
    """``mm`` over a tensor."""
    torch.mm(a, b, out=into)


def bernoulli_into(into: Tensor, chances: Tensor | None, p: float) -> None:
    """``bernoulli_``, with one chance or one for each element."""
    into.bernoulli_(p if chances is None else chances)


def check_linalg(value: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """Copy a result of linear algebra.

    Raises:
        RuntimeError: ``info`` says that it failed.
    """
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return value.clone()


def assert_holds(value: Tensor, holds: Tensor, text: str) -> Tensor:
    """Copy a tensor for which a check holds.

    Raises:
        RuntimeError: with ``text``, if it does not hold.
    """
    if not holds:
        raise RuntimeError(text)
    return value.clone()


def embedding_gradient(grad: Tensor, *args: Any) -> Tensor:
    """``embedding_dense_backward``."""
    gradient: Tensor = torch.ops.aten.embedding_dense_backward(grad, *args)
    return gradient


def part(whole: Tensor, size: list[int], stride: list[int], offset: int) -> Tensor:
    """A view of some elements."""
    return whole.as_strided(size, stride, whole.storage_offset() + offset)


def sum_where(values: torch.Tensor, mask: torch.Tensor, size: list[int]) -> torch.Tensor:
    """``values[mask].sum_to_size(size)``.

    Takes as much memory on a CPU whatever the values are: what the worst of them take is taken and given back at once,
    so that a step's peak is the planned one in each step.
    """
    # What a mask that names all rows takes, with the result: the rows, next to their places and then to the result.
    rows = values.numel() * values.itemsize
    _take(values, rows + max(8 * mask.dim() * mask.numel(), math.prod(size) * values.itemsize))
    return values[mask].sum_to_size(size)


def prod_gradient(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, dim: int | None, keepdim: bool
) -> torch.Tensor:
    """The gradient of ``x`` for that of ``result = x.prod(dim, keepdim)``, or of ``x.prod()``.

    As torch's (``prod_backward`` in FunctionsManual.cpp): a quotient where no value is zero, and products of all others
    where one is. In as much memory for any values, as ``sum_where``.
    """
    # Products of those before, of those after in two orders, and ones: with the result five times the values.
    _take(x, 5 * x.numel() * x.itemsize)
    if x.dim() == 0:
        return gradient.clone()
    if dim is not None and not keepdim:
        gradient, result = gradient.unsqueeze(dim), result.unsqueeze(dim)
    num_zeros = int((x == 0).sum())
    if num_zeros == 0:
        return (gradient * (result / x).conj()).contiguous()
    if dim is not None:
        return _product_of_others(gradient, x, dim).contiguous()
    return (
        x.new_zeros(x.shape) if num_zeros > 1 else _product_of_others(gradient, x.contiguous().view(-1), 0).view_as(x)
    )


def _product_of_others(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    if size == 1:
        return gradient.clone()
    ones = torch.ones_like(x.narrow(dim, 0, 1), memory_format=torch.contiguous_format)
    before = torch.cat([ones, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([ones, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    others = before * after
    del before, after, ones
    return gradient * others.conj()


def _take(like: torch.Tensor, num_bytes: int) -> None:
    if like.device.type == "cpu":
        torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
