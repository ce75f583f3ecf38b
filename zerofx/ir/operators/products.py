"""Products of matrices, and linear algebra. FLOPs of most are in torch's registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zerofx.ir.op_kernels import products
from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Operator, OperatorKind, OwnKernel

_CUBIC = Operator(kind=OperatorKind.CUBIC)
_COUNTED_FROM_ONE = Operator(kind=OperatorKind.CUBIC, integers=lambda _args: (1,))
_MATRIX_VECTOR = Operator(per_element=2)  # every element of the matrix is multiplied and added once


def _group_flops(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Every row of the ragged operand is multiplied with one matrix: rows x columns x inner size."""
    left, right = inputs[:2]
    columns = right.shape[-1] if left.dim() == right.dim() == 2 else outputs[0].numel() // left.shape[-2]
    return 2 * int(left.numel()) * int(columns)


def _group_gradient_flops(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """A product for the gradient of each operand: of rows with matrices, and of rows with rows."""
    return 4 * int(outputs[0].numel()) * int(inputs[-1].shape[-1])


def _group_ends(args: Sequence[Any]) -> set[int]:
    """Numbers of rows of a first group, without any in the others, of which some product holds as much as of any.

    In 16 bits oneDNN copies operands, and holds sums in float32, in blocks that it chooses by the number of rows, not
    always more for more of them: it changes its ways next to powers of two. What it holds for terms of a sum grows
    with their number, by fewer where that is even. Compared with all numbers of rows for shapes of each kind.
    """
    left, right = args[:2]
    num_rows = right.shape[-1] if len(left.shape) == 3 else left.shape[len(right.shape) - 3]
    powers = [2**power for power in range(num_rows.bit_length())]
    return {rows for rows in (num_rows, num_rows - 1, *powers, *(power + 1 for power in powers)) if rows <= num_rows}


def _mm_inside(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> int | None:
    return products.scratch_bytes(left) if products.has_kernel(left, right, None, into=out is not None) else None


def _addmm_inside(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None
) -> int | None:
    if (beta, alpha) != (1, 1):
        return None
    return products.scratch_bytes(left) if products.has_kernel(left, right, bias, into=out is not None) else None


OPERATORS: dict[str, Operator] = {
    "mm": Operator(
        kind=OperatorKind.PRODUCT, rows=row_rules.product, own_kernel=OwnKernel(products.KERNEL, _mm_inside)
    ),
    "addmm": Operator(
        kind=OperatorKind.PRODUCT, rows=row_rules.addmm, own_kernel=OwnKernel(products.KERNEL, _addmm_inside)
    ),
    "bmm": Operator(kind=OperatorKind.PRODUCT, rows=row_rules.batch_product),
    "baddbmm": Operator(kind=OperatorKind.PRODUCT),
    "addmm_": _CUBIC,
    "baddbmm_": _CUBIC,
    "addbmm": _CUBIC,
    "addbmm_": _CUBIC,
    "linear": _CUBIC,
    "_int_mm": Operator(kind=OperatorKind.CUBIC, counted_as="mm"),
    "_scaled_mm": _CUBIC,
    "_grouped_mm": Operator(kind=OperatorKind.CUBIC, flops=_group_flops, integers=_group_ends),
    "_scaled_grouped_mm": Operator(kind=OperatorKind.CUBIC, flops=_group_flops),
    # Where there is no kernel: one product for each group (transformers).
    "transformers::grouped_mm_fallback": Operator(kind=OperatorKind.CUBIC, flops=_group_flops),
    "transformers::grouped_mm_fallback_backward": Operator(kind=OperatorKind.CUBIC, flops=_group_gradient_flops),
    "mv": _MATRIX_VECTOR,
    "addmv": _MATRIX_VECTOR,
    "dot": _MATRIX_VECTOR,
    "vdot": _MATRIX_VECTOR,
    "_trilinear": _CUBIC,
    "_euclidean_dist": _CUBIC,
    "cdist": _CUBIC,
    "_cdist_forward": _CUBIC,
    "_cdist_backward": _CUBIC,
    "cholesky": _CUBIC,
    "cholesky_inverse": _CUBIC,
    "cholesky_solve": _CUBIC,
    # Pivots are rows, counted from one.
    "lu_solve": _COUNTED_FROM_ONE,
    "lu_unpack": _COUNTED_FROM_ONE,
    "linalg_lu_solve": _COUNTED_FROM_ONE,
    "linalg_ldl_solve": _COUNTED_FROM_ONE,
    "linalg_*": _CUBIC,
    "_linalg_*": _CUBIC,
}
