"""Operators that do the same to each tensor of a list: updates of many parameters."""

from __future__ import annotations

from zerofx.ir.operators.operator import Operator, Traffic

_OVERWRITES = Operator(of_lists=True, per_element=0, traffic=Traffic.OVERWRITES)

OPERATORS: dict[str, Operator] = {
    "_foreach_copy_": _OVERWRITES,
    "_foreach_zero_": _OVERWRITES,
    "_foreach_*": Operator(of_lists=True),
    # Two moments (6), bias corrections (2), root, add, divide, step; decay (2).
    "_fused_adam_": Operator(of_lists=True, per_element=14),
    "_fused_adamw_": Operator(of_lists=True, per_element=14),
    "_fused_sgd_": Operator(of_lists=True, per_element=5),
    "_fused_adagrad_": Operator(of_lists=True, per_element=7),
}
