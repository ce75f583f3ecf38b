"""Host scalars that remember how they were computed.

An optimizer's Python code computes with hyperparameters, step counters and 0-dim state tensors before it hands plain
numbers to tensor operators. While an update is traced, those scalars are ``TrackedScalar`` objects: they behave like
floats, carry their present value, and record an expression that is evaluated again at every step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from zerofx.errors import OptimizerError
from zerofx.torch_private.operators import OpOverload


@dataclass(frozen=True)
class Hyper:
    """``group[key]``, or ``group[key][index]`` where the hyperparameter is a pair such as betas."""

    key: str
    index: int | None = None
    length: int = 0


@dataclass(frozen=True)
class StateScalar:
    """``state[name]`` as it is before the update: a 0-dim tensor, or a plain Python number."""

    name: str
    is_tensor: bool


@dataclass(frozen=True)
class PythonCall:
    """A Python operator, by its name in module ``operator``, on numbers."""

    op: str
    args: tuple[Operand, ...]


@dataclass(frozen=True)
class ItemOf:
    """``tensor.item()``: the Python number in a 0-dim tensor."""

    tensor: Expr


@dataclass(frozen=True)
class MakeTensor:
    """``torch.tensor(value, dtype=dtype)``: a 0-dim tensor on the host."""

    value: Operand
    dtype: torch.dtype


@dataclass(frozen=True)
class Cast:
    """``tensor.to(dtype)`` of a 0-dim tensor."""

    tensor: Expr
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorCall:
    """A functional ATen operator on 0-dim host tensors; it rounds as the tensor's dtype does."""

    op: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Heard:
    """A number that the step's own Python gives to an operator, the ``index``-th: known when that has run."""

    index: int


Expr: TypeAlias = Hyper | StateScalar | PythonCall | ItemOf | MakeTensor | Cast | TensorCall | Heard
Operand: TypeAlias = Expr | int | float
EXPR_TYPES: Final = (Hyper, StateScalar, PythonCall, ItemOf, MakeTensor, Cast, TensorCall, Heard)


@dataclass(frozen=True)
class BranchGuard:
    """A truth value that the traced branch depends on: a comparison of scalars, and what it gave."""

    condition: PythonCall
    outcome: bool


@dataclass
class GuardTape:
    """The guards met so far, in the order of the optimizer's own control flow."""

    guards: list[BranchGuard] = field(default_factory=list)

    def decide(self, condition: PythonCall, outcome: bool) -> bool:
        """Record that ``condition`` came out as ``outcome``, once, and return ``outcome``."""
        guard = BranchGuard(condition, outcome)
        if guard not in self.guards:
            self.guards.append(guard)
        return outcome


def children(expr: Expr) -> tuple[Any, ...]:
    """The operands of ``expr``: expressions and plain values."""
    match expr:
        case Hyper() | StateScalar() | Heard():
            return ()
        case PythonCall():
            return expr.args
        case MakeTensor():
            return (expr.value,)
        case ItemOf() | Cast():
            return (expr.tensor,)
        case TensorCall():
            return expr.args + tuple(value for _, value in expr.kwargs)


def is_constant(value: Any) -> bool:
    """Whether a scalar depends on neither hyperparameters nor state."""
    if not isinstance(value, EXPR_TYPES):
        return True
    return isinstance(value, (PythonCall, ItemOf, MakeTensor, Cast, TensorCall)) and all(
        map(is_constant, children(value))
    )


def reads_state(expr: Any) -> bool:
    """Whether a value depends on optimizer state, and so may change at every step."""
    if not isinstance(expr, EXPR_TYPES):
        return False
    return isinstance(expr, StateScalar) or any(reads_state(child) for child in children(expr))


def lost_scalar(expr: Expr | None, use: str) -> OptimizerError:
    """The error for a scalar whose expression cannot be followed through ``use``."""
    what = describe(expr) if expr is not None else "a hyperparameter or step count"
    return OptimizerError(
        f"expected {what} to reach the tensor operators through Python arithmetic, found it going through {use}, which "
        "would freeze its present value into the update: write x ** 0.5 for math.sqrt(x), x.item() for float(x)"
    )


def describe(expr: Expr) -> str:
    """A short name of ``expr`` for messages: the leaf itself, or the leaves it is made of."""
    match expr:
        case Hyper():
            return f'group["{expr.key}"]' if expr.index is None else f'group["{expr.key}"][{expr.index}]'
        case StateScalar():
            return f'state["{expr.name}"]'
        case _:
            leaves = [describe(child) for child in children(expr) if isinstance(child, EXPR_TYPES)]
            return " and ".join(dict.fromkeys(leaves)) or "a constant"


def _both_ways(op: str) -> tuple[Any, Any]:
    """The methods of a ``TrackedScalar`` for ``op``, with the scalar before the other operand, and after it."""

    def before(self: TrackedScalar, other: Any) -> Any:
        return self._apply(op, self, other)

    def after(self: TrackedScalar, other: Any) -> Any:
        return self._apply(op, other, self)

    return before, after


class TrackedScalar(float):
    """A float that records the expression it was computed by.

    The underlying C double is NaN on purpose: C code that reads it directly (``math.sqrt``, numpy) yields NaN, which
    the recorder refuses, in place of a constant silently baked into the update. The present value is ``value``.

    Comparisons return the present outcome and are recorded as guards.
    """

    expr: Expr
    value: int | float
    tape: GuardTape

    def __new__(cls, expr: Expr, value: int | float, tape: GuardTape) -> TrackedScalar:
        scalar = super().__new__(cls, float("nan"))
        scalar.expr, scalar.value, scalar.tape = expr, value, tape
        return scalar

    def _apply(self, op: str, *operands: Any) -> Any:
        """The tracked result of ``op``; NotImplemented for operands, such as tensors, that know better."""
        if not all(isinstance(operand, (int, float)) for operand in operands):
            return NotImplemented
        for operand in operands:
            if not isinstance(operand, TrackedScalar) and operand != operand:
                raise lost_scalar(None, "a function of math or numpy")
        value = getattr(operator, op)(*(x.value if isinstance(x, TrackedScalar) else x for x in operands))
        expr = PythonCall(op, tuple(x.expr if isinstance(x, TrackedScalar) else x for x in operands))
        if isinstance(value, bool):
            return self.tape.decide(expr, value)
        return TrackedScalar(expr, value, self.tape)

    __add__, __radd__ = _both_ways("add")
    __sub__, __rsub__ = _both_ways("sub")
    __mul__, __rmul__ = _both_ways("mul")
    __truediv__, __rtruediv__ = _both_ways("truediv")
    __floordiv__, __rfloordiv__ = _both_ways("floordiv")
    __mod__, __rmod__ = _both_ways("mod")
    __pow__, __rpow__ = _both_ways("pow")
    __lt__, __le__, __gt__, __ge__ = (_both_ways(op)[0] for op in ("lt", "le", "gt", "ge"))
    __eq__, __ne__ = (_both_ways(op)[0] for op in ("eq", "ne"))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __neg__(self) -> Any:
        return self._apply("neg", self)

    def __pos__(self) -> TrackedScalar:
        return self

    def __abs__(self) -> Any:
        return self._apply("abs", self)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        return id(self)

    def __int__(self) -> int:
        """The present value, which becomes a guard: right for counts among the hyperparameters, refused for steps."""
        number = int(self.value)
        if reads_state(self.expr) or number != self.value:
            raise lost_scalar(self.expr, "int()")
        self.tape.decide(PythonCall("eq", (self.expr, number)), True)
        return number

    __index__ = __int__

    def __float__(self) -> float:
        raise lost_scalar(self.expr, "float() or math")

    def __round__(self, ndigits: Any = None) -> Any:
        raise lost_scalar(self.expr, "round()")

    def __trunc__(self) -> int:
        raise lost_scalar(self.expr, "math.trunc()")

    def __floor__(self) -> int:
        raise lost_scalar(self.expr, "math.floor()")

    def __ceil__(self) -> int:
        raise lost_scalar(self.expr, "math.ceil()")

    def __repr__(self) -> str:
        return f"{describe(self.expr)} (now {self.value})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)
