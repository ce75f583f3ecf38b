"""Views: facts that their schemas do not have."""

from __future__ import annotations

from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Operator, OperatorKind, ResultLayout, View

_IDENTITY = Operator(kind=OperatorKind.IDENTITY)
_SPLIT = row_rules.work_along(2)
_COPY_OF_SHAPE = Operator(view=View.WHERE_STRIDES_ALLOW)
_COPY_OF_KIND = Operator(view=View.WHERE_ALIKE)


def _reshape(view: View | None, layout: ResultLayout | None) -> Operator:
    return Operator(kind=OperatorKind.RESHAPE, rows=row_rules.reshape, takes_shape=True, view=view, layout=layout)


OPERATORS: dict[str, Operator] = {
    "view.default": _reshape(None, ResultLayout.OF_VIEW),
    "_unsafe_view": _reshape(View.ALWAYS, ResultLayout.OF_VIEW),
    "reshape": _reshape(View.WHERE_STRIDES_ALLOW, None),
    "reshape_as": _COPY_OF_SHAPE,
    "flatten": _COPY_OF_SHAPE,
    "ravel": _COPY_OF_SHAPE,
    "contiguous": _COPY_OF_KIND,
    "to": _COPY_OF_KIND,
    "detach": _IDENTITY,
    "alias": _IDENTITY,
    "t": Operator(rows=row_rules.matrix_transpose),
    "transpose.int": Operator(rows=row_rules.transpose),
    "permute": Operator(rows=row_rules.permute),
    "expand": Operator(rows=row_rules.expand, takes_shape=True),
    "unsqueeze": Operator(rows=row_rules.insert_dim(1)),
    "squeeze.dim": Operator(rows=row_rules.squeeze),
    "squeeze.dims": Operator(rows=row_rules.squeeze),
    "select.int": Operator(rows=row_rules.remove_dim),
    "unbind.int": Operator(rows=row_rules.remove_dim),
    "slice.Tensor": Operator(rows=row_rules.work_along(1)),
    "split.Tensor": Operator(rows=_SPLIT),
    "split_with_sizes": Operator(rows=_SPLIT),
    "unsafe_chunk": Operator(view=View.ALWAYS),
    "unsafe_split": Operator(view=View.ALWAYS),
    "unsafe_split_with_sizes": Operator(view=View.ALWAYS),
    "_c10d_functional::wait_tensor": Operator(view=View.ALWAYS),  # hands on the tensor that was waited for
}
