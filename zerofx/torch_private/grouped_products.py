"""Fake tensors for ``F.grouped_mm`` that match its kernels: products of rows in groups, a matrix each.

Up to torch 2.14 fakes refuse it in float32 and float16, so that a forward with it could only be traced as compiled,
where libraries take another path; and they return rows without their padding bytes.
"""

from __future__ import annotations

import torch

from zerofx.torch_private.versions import TORCH

_BOUNDARY = 16  # bytes, which rows begin at multiples of
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuses_dtypes() -> bool:
    """True if torch's own fakes refuse dtypes that kernels support: to torch 2.14."""
    return TORCH < (2, 15)


def _fake_grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product on fake tensors, after the checks of ATen's ``_grouped_mm`` (``native/GroupedMMUtils.h``).

    Args:
        left: the first operand, [rows, inner] or [groups, rows, inner].
        right: the second, [inner, columns] or [groups, inner, columns]; of ``left``'s dtype.
        offs: the ends of groups along the dimension that is in groups, [groups], unless both operands have a matrix
            each.
        bias: None, the only value that kernels accept.
        out_dtype: the dtype of ``left``, or None.
    """
    dims = (left.dim(), right.dim())
    torch._check(left.dtype == right.dtype and left.dtype in _DTYPES, lambda: f"grouped products of {left.dtype}")
    torch._check(set(dims) <= {2, 3} and left.shape[-1] == right.shape[-2], lambda: f"grouped products of {dims}")
    torch._check((offs is None) == (dims == (3, 3)), lambda: "ends of groups, unless each has a matrix of its own")
    torch._check(bias is None and out_dtype in (None, left.dtype), lambda: "neither bias nor another dtype")
    for operand in (left, right):
        (rows, columns), (down, across) = operand.shape[-2:], operand.stride()[-2:]
        by_columns, by_rows = down == 1 and across >= max(1, rows), across == 1 and down >= max(1, columns)
        torch._check(by_columns or by_rows, lambda: "columns or rows that lie together")
        apart = (across if by_columns else down) * operand.element_size()
        torch._check(apart % _BOUNDARY == 0, lambda: "strides should be multiple of 16 bytes")
    ends = offs if offs is not None else left
    shape = (*ends.shape[: dims[0] == dims[1]], left.shape[-2], right.shape[-1])
    padded = -(-shape[-1] * left.element_size() // _BOUNDARY) * _BOUNDARY // left.element_size()
    strides = (shape[-2] * padded, padded, 1)
    return left.new_empty_strided(shape, strides[-len(shape) :])


if refuses_dtypes():
    torch.library.register_fake("aten::_grouped_mm", _fake_grouped_mm, allow_override=True)
