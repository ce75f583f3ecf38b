"""Matrix products in float32 on CPUs: oneDNN's, and ``products.cpp``, which Inductor's compiler builds once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from zerofx.ir.op_kernels.products import CONSTANTS, empty_result, scratch_numel
from zerofx.torch_private.operators import onednn_linear

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = ("float*",) * 4 + ("int64_t*",)


@functools.cache
def build() -> Callable[..., None]:
    """The kernel, built where no file of Inductor's cache has it.

    Raises:
        Exception: what Inductor's compiler raises.
    """
    from zerofx.codegen.inductor.cpp import build_cpp

    return build_cpp(_ARGUMENTS, CONSTANTS + _SOURCE.read_text())


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left @ right + bias`` for values that ``zerofx.ir.op_kernels.products.has_kernel`` accepts.

    Args:
        left: ``[rows, inner]``; where it is transposed in memory it is multiplied by the kernel, else by oneDNN.
        right: ``[inner, columns]``, laid out either way: a layer's weight as its forward reads it, or its backward.
        bias: ``[columns]``, or None.

    Returns:
        ``[rows, columns]``.
    """
    if left.is_contiguous():
        return onednn_linear(left, right.t(), bias)
    result = empty_result(left, right, bias)
    product_into(result, left, right)
    return result


def product_into(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Write ``left @ right`` over ``into``, for values that ``zerofx.ir.op_kernels.products.has_kernel`` accepts.

    An element is the same sum in the same order wherever it lies, for any number of threads.

    Args:
        into: ``[rows, columns]``, row by row in its memory.
        left: ``[rows, inner]``, column by column.
        right: ``[inner, columns]``, row by row.
    """
    rows, depth = left.shape
    num_threads = torch.get_num_threads()
    sizes = [depth, rows, right.shape[1], left.stride(1), right.stride(0), into.stride(0), num_threads]
    build()(left, right, into, left.new_empty(scratch_numel(depth)), torch.tensor(sizes, device="cpu"))
