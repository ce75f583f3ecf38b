"""Operators that Inductor gets wrong, written as others that it gets right; each with torch's issue.

Its patterns do not look at arguments by keyword that they do not name, and replace what has them by what has none. A
test goes through those patterns (``tests/graph/rules/test_inductor_mends.py``), and fails for what is missing here and
for what is needed no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.add.Tensor(x, _scale(x, y, alpha))


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return NotImplemented if alpha == 1 else aten.sub.Tensor(x, _scale(x, y, alpha))


def _scale(x: Any, y: Any, alpha: Any) -> Any:
    """``alpha * y`` in the dtype of ``x + y``: a sum rounds only once, and to that."""
    return y.to(torch.result_type(x, y)) * alpha if isinstance(y, torch.Tensor) else y * alpha


def _sum(x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dtype is None else aten.sum.dim_IntList(x.to(dtype), dim, keepdim).to(dtype)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return NotImplemented if dtype is None else aten.cumsum.default(x.to(dtype), dim).to(dtype)


def _randperm(n: int, *, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    return NotImplemented if dtype in (None, torch.int64) else aten.randperm.default(n, **rest).to(dtype)


def _full(size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **rest: Any) -> Any:
    is_cut = (
        isinstance(fill_value, float) and dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    )
    if not is_cut:
        return NotImplemented
    return aten.full.default(size, bool(fill_value) if dtype is torch.bool else int(fill_value), dtype=dtype, **rest)


def _avg_pool2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None = None,
) -> Any:
    """The gradient divided by what each window covers, where Inductor divides windows that overhang by their size."""
    if not ceil_mode or divisor is not None:
        return NotImplemented

    def covered(dim: int) -> torch.Tensor:
        size, num, stepped = x.shape[dim], grad.shape[dim], stride or kernel
        begin = torch.arange(num, device=grad.device) * stepped[dim % len(stepped)] - padding[dim % len(padding)]
        end = (begin + kernel[dim % len(kernel)]).clamp(max=size + padding[dim % len(padding)])
        return end - begin if count_include_pad else end.clamp(max=size) - begin.clamp(min=0)

    divided = grad / (covered(-2)[:, None] * covered(-1))
    return aten.avg_pool2d_backward.default(divided, x, kernel, stride, padding, ceil_mode, count_include_pad, 1)


MENDS: Mapping[Any, Callable[..., Any]] = {
    # alpha is lost in front of and after a product (https://github.com/pytorch/pytorch/issues/167313 is its like).
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,  # and in a softmax that is taken apart, on a GPU
    aten.sum.dim_IntList: _sum,  # there, too
    # The dtype of a sum over what is filled with one value, and how that is rounded (issue 189518).
    aten.cumsum.default: _cumsum,
    aten.full.default: _full,
    # Windows that overhang are divided by their whole size (issue 198119).
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    # The dtype of indices by which rows are added, once torch.compile has been used in the process.
    aten.randperm.default: _randperm,
}
