"""Operators that take memory, fill it, or copy it."""

from __future__ import annotations

from zerofx.ir.operators.operator import Inductor, Operator, Traffic

_ALLOCATES = Operator(per_element=0, traffic=Traffic.ALLOCATES)
_FILLS = Operator(per_element=0, traffic=Traffic.FILLS)
_FILLS_LIKE = Operator(per_element=0, traffic=Traffic.FILLS, is_pointwise=True)
_OVERWRITES = Operator(per_element=0, traffic=Traffic.OVERWRITES)
_COPIES = Operator(per_element=0)

OPERATORS: dict[str, Operator] = {
    "empty": _ALLOCATES,
    "empty_strided": _ALLOCATES,
    "empty_permuted": _ALLOCATES,
    "empty_like": _ALLOCATES,
    "new_empty": _ALLOCATES,
    "new_empty_strided": _ALLOCATES,
    "full": Operator(inductor=Inductor.LOOP),
    "zeros": Operator(inductor=Inductor.LOOP),
    "full_like": _FILLS_LIKE,
    "ones_like": _FILLS_LIKE,
    "zeros_like": _FILLS_LIKE,
    "rand_like": _FILLS,
    "randint_like": _FILLS,
    "randn_like": _FILLS,
    "new_full": _FILLS,
    "new_ones": _FILLS,
    "new_zeros": _FILLS,
    "copy_": _OVERWRITES,
    "fill_": _OVERWRITES,
    "zero_": _OVERWRITES,
    "clone": Operator(per_element=0, inductor=Inductor.LOOP),
    "copy": _COPIES,
    "fill": _COPIES,
    "zero": _COPIES,
    "lift_fresh_copy": _COPIES,
}
