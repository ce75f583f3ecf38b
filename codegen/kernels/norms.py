"""The sum of the squares of many values with one launch: the arithmetic of ``zerofx/ir/op_kernels/norms.py``.

Each program squares and adds up one row of ``ROW`` values in float32, or float64 for those, without a copy of them. The
rows' sums, in float64, are added up by torch. Rows are those of the reference and sums have no atomics, so that the
bits depend on the values and on how many there are, and not on plan or stage.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl

from zerofx.codegen.kernels.current_device import on_device
from zerofx.ir.op_kernels.norms import ROW

# Products are rounded with the sums they go into, as Triton 3.9 does by default and 3.10 does not.
LAUNCH = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})


@triton.jit
def row_sums_kernel(values, sums, numel, ROW: tl.constexpr):
    """One row, of which the last may be shorter."""
    row = tl.program_id(0).to(tl.int64)
    at = row * ROW + tl.arange(0, ROW)
    loaded = tl.load(values + at, mask=at < numel, other=0.0)
    wide = loaded if values.dtype.element_ty == tl.float64 else loaded.to(tl.float32)
    tl.store(sums + row, tl.sum(wide * wide, 0).to(tl.float64))


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """``zerofx.ir.op_kernels.norms.square_sum`` in two launches."""
    num_rows = triton.cdiv(values.numel(), ROW)
    sums = values.new_empty(num_rows, dtype=torch.float64)
    if num_rows:
        with on_device(values.device):
            row_sums_kernel[(num_rows,)](values, sums, values.numel(), ROW=ROW, **LAUNCH)
    return sums.sum(0, keepdim=True)
