"""Kernels of operators that do what one of ATen's does, in a form that a step graph can hold."""

from __future__ import annotations

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
