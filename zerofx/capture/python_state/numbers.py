"""Numbers that change from step to step, as inputs of the graph.

While a step is traced, a stand-in replaces each such number. Results that Python computes with it are stand-ins in
turn, computed from the numbers of each step as Python would; where tensors are computed with one, the graph has an
input of one element::

    loss * min(1.0, self.global_step / 1000)    ->    mul(loss, number),    with self.global_step / 1000 < 1.0 assumed

A number that decides the control flow of the forward (a comparison), or that cannot be an input (an exponent, an
argument of ``math``), is an assumption: the step holds for numbers of which it is true.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from zerofx.torch_private.dispatch import without_modes

_MOST_TEXT = 400  # characters of an expression, beyond which it is called by its number


@dataclass(frozen=True)
class Assumption:
    """A value that a step relies on: of a comparison, or of a number itself if ``is_number``."""

    number: Number
    value: Any
    is_number: bool

    def holds(self) -> bool:
        """True if the value is still the same."""
        now = self.number.current()
        return type(now) is type(self.value) and bool(now == self.value)

    def __str__(self) -> str:
        return f"{self.number.text} == {self.value!r}"


@dataclass(frozen=True)
class NumberTensor:
    """A number as an input of a graph: ``tensor`` has shape ``[]``."""

    number: Number
    tensor: torch.Tensor

    def fill(self) -> torch.Tensor:
        """The tensor, filled with the number's current value."""
        return self.tensor.fill_(self.number.current())


@dataclass
class Tape:
    """The uses of numbers in a trace: inputs that tensors are computed with, by name, and assumptions about others."""

    inputs: dict[str, NumberTensor] = field(default_factory=dict)
    assumptions: dict[str, Assumption] = field(default_factory=dict)
    is_open: bool = True

    def assume(self, number: Number, value: Any, *, is_number: bool) -> Any:
        """``value`` of ``number``, which the step relies on from here."""
        if self.is_open:
            assumption = Assumption(number, value, is_number)
            self.assumptions.setdefault(str(assumption), assumption)
        return value

    def input(self, number: Number, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor of one element that stands for ``number``."""
        name = f"number {number.text} as {dtype} on {device}"
        if name not in self.inputs:
            with without_modes():
                self.inputs[name] = NumberTensor(number, torch.zeros((), dtype=dtype, device=device))
        return self.inputs[name].tensor


class Number:
    """A stand-in for a number: a Python number at ``source()``, or the result of ``compute`` on ``operands``."""

    def __init__(self, tape: Tape, text: str, compute: Callable[..., Any], operands: tuple[Any, ...] = ()) -> None:
        self.tape, self.text, self._compute, self._operands = tape, text, compute, operands
        if len(text) > _MOST_TEXT:
            self.text = f"number {len(tape.inputs)}.{len(tape.assumptions)} of {text[:_MOST_TEXT]}"

    @property  # type: ignore[misc]  # for who asks whether it is a number
    def __class__(self) -> type:
        return type(self.current())

    def current(self) -> Any:
        """The current value, computed as Python would."""
        return self._compute(*(operand.current() if is_number(operand) else operand for operand in self._operands))

    def constant(self) -> Any:
        """The current value, which the step relies on from here."""
        return self.tape.assume(self, self.current(), is_number=True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_constants(args), **_constants(kwargs or {}))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        if method != "__call__" or named:
            return NotImplemented
        return derive(ufunc.__name__, ufunc, inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Number:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.current()), (self.constant(),)

    def __bool__(self) -> bool:
        return bool(self.tape.assume(derive("bool", bool, (self,)), bool(self.current()), is_number=False))

    def __int__(self) -> int:
        return int(self.tape.assume(derive("int", int, (self,)), int(self.current()), is_number=False))

    def __index__(self) -> int:
        return int(self.tape.assume(self, operator.index(self.current()), is_number=False))

    def __float__(self) -> float:
        return float(self.constant())

    def __complex__(self) -> complex:
        return complex(self.constant())

    def __hash__(self) -> int:
        return hash(self.constant())

    def __repr__(self) -> str:
        return repr(self.constant())

    def __str__(self) -> str:
        return str(self.constant())

    def __format__(self, spec: str) -> str:
        return format(self.constant(), spec)

    def __getattr__(self, name: str) -> Any:  # ``is_integer``, ``real`` and others
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.constant(), name)


def is_number(value: Any) -> bool:
    """True if ``value`` is a stand-in."""
    return type(value) is Number


def derive(name: str, compute: Callable[..., Any], operands: tuple[Any, ...]) -> Number:
    """The stand-in for ``compute`` of ``operands``, at least one of which is a stand-in."""
    tape = next(operand.tape for operand in operands if is_number(operand))
    texts = (operand.text if is_number(operand) else repr(operand) for operand in operands)
    return Number(tape, f"{name}({', '.join(texts)})", compute, operands)


_OPERANDS = (int, float, bool, np.number)


def _binary(name: str, compute: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(own: Number, other: Any) -> Any:
        return derive(name, compute, (own, other)) if _is_operand(other) else NotImplemented

    def reflect(own: Number, other: Any) -> Any:
        return derive(name, compute, (other, own)) if _is_operand(other) else NotImplemented

    return forward, reflect


def _comparison(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    def compare(own: Number, other: Any) -> Any:
        if not _is_operand(other):
            return NotImplemented
        comparison = derive(name, compute, (own, other))
        return own.tape.assume(comparison, comparison.current(), is_number=False)

    return compare


def _unary(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda own, *args: derive(name, compute, (own, *args))


def _is_operand(value: Any) -> bool:
    return is_number(value) or isinstance(value, _OPERANDS)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _own, _reflected = _binary(_name, getattr(operator, _name))
    setattr(Number, f"__{_name}__", _own)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _comparison(_name, getattr(operator, _name)))
for _name in ("neg", "pos", "abs"):
    setattr(Number, f"__{_name}__", _unary(_name, getattr(operator, _name)))
for _name in ("floor", "ceil", "trunc"):
    setattr(Number, f"__{_name}__", _unary(_name, getattr(math, _name)))
setattr(Number, "__round__", _unary("round", round))  # noqa: B010

_ARITHMETIC: Final = frozenset(
    {
        *("mul", "multiply", "add", "sub", "subtract", "div", "divide", "true_divide"),
        *("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__"),
        *("__rdiv__", "__div__"),
    }
)
_IN_PLACE: Final = frozenset(
    {"mul_", "add_", "sub_", "div_", "__imul__", "__iadd__", "__isub__", "__itruediv__", "__idiv__"}
)
_QUOTIENTS: Final = frozenset(
    {"div", "divide", "true_divide", "__truediv__", "__div__", "div_", "__itruediv__", "__idiv__"}
)
_OF_HALVES: Final = frozenset({"mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"})
_HALVES: Final = (torch.float16, torch.bfloat16)


class NumberInputs(TorchFunctionMode):
    """While open, tensors are computed with inputs of one element instead of stand-ins, to the bit.

    In eager mode a number is cast to the dtype in which a kernel computes: float32 or float64. Kernels that multiply
    halves, or divide them by a number, compute in float32, so halves are cast to it first, and back after; other
    operators on halves round a number as the device's kernel does, and get it as it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(is_number, _leaves((args, kwargs)))):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("tensor", "as_tensor", "scalar_tensor") and len(args) == 1 and is_number(args[0]):
            return _number_tensor(args[0], **kwargs)
        if len(args) == 2 and not kwargs and name in _ARITHMETIC | _IN_PLACE:
            outcome = _compute_with(func, name, *args)
            if outcome is not None:
                return outcome
        return func(*_constants(args), **_constants(kwargs))


def _number_tensor(number: Number, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
    of_python = {int: torch.int64, bool: torch.bool}.get(type(number.current()), torch.get_default_dtype())
    where = torch.empty((), device=device).device
    if rest:
        return torch.tensor(number.constant(), dtype=dtype, device=device, **rest)
    return number.tape.input(number, dtype or of_python, where).clone()


def _compute_with(func: Callable[..., Any], name: str, first: Any, other: Any) -> torch.Tensor | None:
    """The result of ``func`` on a tensor and a stand-in; None if it cannot match eager mode."""
    tensor, number = (other, first) if is_number(first) else (first, other)
    if not (isinstance(tensor, torch.Tensor) and is_number(number) and tensor.is_floating_point()):
        return None
    is_half = tensor.dtype in _HALVES
    if is_half and name not in _OF_HALVES:
        return None
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    if tensor.device.type == "cuda" and name in _QUOTIENTS and number is other:
        # A GPU's kernel multiplies by what is computed on the host.
        rounded = np.float64 if dtype is torch.float64 else np.float32
        inverse = derive("1 /", lambda value: float(rounded(1) / rounded(value)), (number,))
        func = torch.Tensor.mul_ if name in _IN_PLACE else torch.mul
        number = inverse
    scalar = number.tape.input(number, dtype, tensor.device)
    wide = tensor.float() if is_half else tensor
    outcome: torch.Tensor = func(scalar, wide) if is_number(first) else func(wide, scalar)
    return outcome.to(tensor.dtype) if is_half else outcome


def _constants(value: Any) -> Any:
    if is_number(value):
        return value.constant()
    if type(value) in (list, tuple):
        return type(value)(map(_constants, value))
    return {key: _constants(item) for key, item in value.items()} if type(value) is dict else value


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) in (list, tuple):
        for item in value:
            yield from _leaves(item)
    elif type(value) is dict:
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value
