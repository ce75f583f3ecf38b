"""Reductions: Inductor's loops inline what they reduce, and store the result."""

from __future__ import annotations

from zerofx.ir.operators.operator import Inductor, Operator, OperatorKind
from zerofx.ir.operators.row_rules import reduce_over, sum_over

_REDUCTION = Operator(inductor=Inductor.REDUCTION)

OPERATORS: dict[str, Operator] = {
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
