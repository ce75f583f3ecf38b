"""Reductions, norms and softmax: Inductor's loops inline what they reduce, and store the result."""

from __future__ import annotations

from zerofx.ir.operators.operator import Inductor, Operator, OperatorKind, ResultLayout
from zerofx.ir.operators.row_rules import normalisation, normalisation_backward, reduce_over, sum_over, work_along

_REDUCTION = Operator(inductor=Inductor.REDUCTION)


def _batch_norm(per_element: int, argument: int = 0) -> Operator:
    return Operator(per_element=per_element, layout=ResultLayout.OF_FORMAT, layout_arguments=(argument,))


OPERATORS: dict[str, Operator] = {
    # max, subtract, exp, sum, divide
    "_softmax": Operator(per_element=5, inductor=Inductor.ROW_LOOP, rows=work_along(1)),
    # multiply, sum, multiply, subtract
    "_softmax_backward_data": Operator(per_element=4, inductor=Inductor.ROW_LOOP, rows=work_along(2)),
    # max, subtract, exp, sum, subtract
    "_log_softmax": Operator(per_element=5, inductor=Inductor.ROW_LOOP, rows=work_along(1)),
    # sum, exp, multiply, subtract
    "_log_softmax_backward_data": Operator(
        per_element=4,
        inductor=Inductor.ROW_LOOP,
        rows=work_along(2),
        layout=ResultLayout.OF_GRADIENT,
        reads_exactly=(1,),
    ),
    # mean; subtract, square, sum; subtract, multiply; affine multiply, add
    "native_layer_norm": Operator(per_element=8, inductor=Inductor.ROW_LOOP, rows=normalisation(3)),
    # normalise again (2), weight (3) and bias (1) sums, input (8)
    "native_layer_norm_backward": Operator(
        per_element=14, inductor=Inductor.ROW_LOOPS, rows=normalisation_backward(4, 2), layout=ResultLayout.OF_GRADIENT
    ),
    # square, sum; multiply by the root, by the weight
    "_fused_rms_norm": Operator(per_element=4, inductor=Inductor.ROW_LOOP, rows=normalisation(2)),
    "_fused_rms_norm_backward": Operator(per_element=10, rows=normalisation_backward(3, 1)),
    "native_group_norm": Operator(per_element=8, takes_dense=True),
    "native_group_norm_backward": Operator(per_element=14, takes_dense=True),
    "native_batch_norm": _batch_norm(8),
    "native_batch_norm_backward": _batch_norm(14, 1),
    "_native_batch_norm_legit": _batch_norm(8),
    "_native_batch_norm_legit.no_stats": _batch_norm(8),
    "_native_batch_norm_legit_functional": _batch_norm(8),
    "_native_batch_norm_legit_no_training": _batch_norm(1),
    "logsumexp": Operator(per_element=4, inductor=Inductor.REDUCTION),
    "all": _REDUCTION,
    "amax": Operator(inductor=Inductor.REDUCTION, rows=reduce_over),
    "amin": _REDUCTION,
    "any": _REDUCTION,
    "linalg_vector_norm": Operator(inductor=Inductor.REDUCTION, kind=OperatorKind.CUBIC),
    "max": _REDUCTION,
    "mean": _REDUCTION,
    "mean.dim": Operator(inductor=Inductor.REDUCTION, rows=reduce_over),
    "min": _REDUCTION,
    "prod": _REDUCTION,
    "std": Operator(per_element=4),
    "sum": _REDUCTION,
    "sum.dim_IntList": Operator(inductor=Inductor.REDUCTION, rows=sum_over),
    "var": Operator(per_element=4, inductor=Inductor.REDUCTION),
    "var_mean": Operator(per_element=4, inductor=Inductor.REDUCTION),
}
