"""The lines of a Triton kernel that updates a bucket: its values, where they are stored, and what the host computes.

Values are float32 inside the kernel, whatever they are stored in, and are rounded where an operator of ATen would have
rounded them to a lower dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_NAMES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}

# What becomes of a scalar on the host, in double precision, before the kernel takes it as float32.
HOST_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "value": lambda x: x,
    "complement": lambda x: 1 - x,
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
}


class NoKernelError(Exception):
    """An update cannot be written as one kernel; the message is the reason."""


@dataclass(frozen=True)
class HostScalar:
    """An argument of the kernel: entry ``index`` of the tuple that is input ``source``, through a host function."""

    source: int
    index: int
    function: str


@dataclass
class Buffer:
    """Memory of the update, or a value on its way: the variable that has its present value, if one has.

    ``number`` is that of the input, None for a value that is never stored.
    """

    dtype: torch.dtype
    number: int | None = None
    variable: str = ""
    is_written: bool = False
    is_single: bool = False


class Writer:
    """The lines of one kernel, and what they read and write."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.scalars: dict[HostScalar, str] = {}
        self.buffers: dict[fx.Node, Buffer] = {}
        self.hypers: dict[fx.Node, tuple[int, int]] = {}  # input and index
        self._count = 0

    def line(self, expression: str) -> str:
        """A variable that has the value of ``expression``."""
        self._count += 1
        name = f"v{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def round_to(self, expression: str, dtype: torch.dtype) -> str:
        """A variable with the value of ``expression`` as ``dtype`` would store it."""
        low = _TRITON_NAMES.get(dtype)
        return self.line(f"({expression}).to({low}).to(tl.float32)" if low else expression)

    def read(self, arg: Any) -> str:
        """Text for an operand: a tensor's present value, an argument, or a number."""
        if not isinstance(arg, fx.Node) or arg in self.hypers:
            return self.scalar(arg)
        buffer = self.buffers[arg]
        if not buffer.variable:
            place = f"x{buffer.number}" if buffer.is_single else f"x{buffer.number} + at, mask=inside"
            buffer.variable = self.line(f"tl.load({place}).to(tl.float32)")
        return buffer.variable

    def scalar(self, arg: Any, function: str = "value") -> str:
        """Text for a number, or for an argument that is computed from one of the update's scalars."""
        if isinstance(arg, fx.Node):
            known = HostScalar(*self.hypers[arg], function)
            return self.scalars.setdefault(known, f"s{len(self.scalars)}")
        if isinstance(arg, bool) or not isinstance(arg, int | float):
            raise NoKernelError(f"an operand is {arg!r}, not a number")
        return _literal(HOST_FUNCTIONS[function](float(arg)))

    def write(self, node: fx.Node, expression: str) -> None:
        """``node``'s memory now has the value of ``expression``, in the dtype that it has."""
        buffer = self.buffers[node]
        if buffer.is_single:
            raise NoKernelError(f"{node.name} is written for all elements at once")
        buffer.variable = self.round_to(expression, buffer.dtype)
        buffer.is_written = True

    def make(self, node: fx.Node, expression: str, dtype: torch.dtype) -> None:
        """``node`` is a value that is not stored."""
        self.buffers[node] = Buffer(dtype, variable=self.round_to(expression, dtype))


def _literal(number: float) -> str:
    """Text for a number. Triton takes a literal beyond float32's normal range for a float64: what is smaller is 0."""
    if math.isnan(number) or abs(number) > torch.finfo(torch.float32).max:
        return f'float("{math.copysign(math.inf, number) if number == number else number}")'
    return repr(number) if abs(number) >= torch.finfo(torch.float32).tiny else "0.0"
