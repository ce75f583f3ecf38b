"""A call of an operator but for its values: shapes, strides, dtypes and other arguments, to compare and to resize."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from zerofx.ir.aliasing import tensors_in
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.operators import OpOverload

# What is made at once: some milliseconds, bytes of inputs and outputs and multiplications.
QUICK_BYTES, QUICK_STEPS = 2**22, 2**24
# What is made at all: some tenths of a second.
MOST_BYTES, MOST_STEPS = 2**26, 2**28
_NAMESPACES = ("aten", "bitsandbytes", "torch_nn", "zerofx")


class KernelMemory(NamedTuple):
    """``inside``: bytes that a call takes at its worst moment, beyond inputs and outputs. ``excess``: bytes that each
    output's memory has beyond those that it shows; fewer than 0 where one is empty that fakes have elements of."""

    inside: int
    excess: tuple[int, ...]


class Like(NamedTuple):
    """A tensor on a CPU but for its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conjugated: bool = False  # is to be, once its values are read
    is_negated: bool = False

    @property
    def span(self) -> int:
        """Elements of the memory that it reaches over."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def cut(self, sizes: Mapping[int, int]) -> Like:
        """With other sizes of some dimensions, by number: it lies in memory as before, and what is dense stays so. One
        of a single place that gets more is the outermost."""
        shape, stride = list(self.shape), list(self.stride)
        for dim, size in sizes.items():
            if shape[dim] == 1:
                stride[dim] = self._replace(shape=tuple(shape), stride=tuple(stride)).span
            for outer in [other for other, step in enumerate(stride) if step > stride[dim] > 0]:
                stride[outer] = stride[outer] * size // shape[dim]
            shape[dim] = size
        return self._replace(shape=tuple(shape), stride=tuple(stride))

    def make_contiguous(self) -> Like:
        """Dense, in the order of its dimensions."""
        stride = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return self._replace(stride=tuple(stride))

    def replace_sizes(self, sizes: Mapping[int, int]) -> Like | None:
        """With other sizes, in the same order and with the same gaps in memory; None where dimensions overlap."""
        shape = tuple(sizes.get(size, size) for size in self.shape)
        if shape == self.shape:
            return self
        stride, before, extent = list(self.stride), 1, 1
        for dim in sorted(range(len(shape)), key=lambda d: (self.stride[d], -d)):
            step, size = self.stride[dim], self.shape[dim]
            if step == 0 or size == 1:
                continue
            if step < before:
                return None
            factor, rest = divmod(step, before)
            stride[dim] = factor * extent + rest
            before, extent = step * size, stride[dim] * shape[dim]
        return self._replace(shape=shape, stride=tuple(stride))


class _Number(NamedTuple):
    """A number that is no ``int``: 1.0 and True are other arguments than 1."""

    kind: type
    value: Any


class _OtherDeviceError(Exception):
    """A tensor is not on a CPU."""


class OperatorCall(NamedTuple):
    """``args`` and ``kwargs`` have a ``Like`` for each tensor and tuples for lists."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Like, ...]

    @staticmethod
    def from_arguments(
        target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Iterable[Tensor]
    ) -> OperatorCall | None:
        """A call with nodes or (fake) tensors, which gives tensors like ``results``; None if any is not on a CPU."""
        try:
            return OperatorCall(
                target,
                tuple([_describe(arg) for arg in args]),
                tuple([(name, _describe(value)) for name, value in kwargs.items()]),
                tuple([_describe_tensor(tensor) for tensor in results]),
            )
        except _OtherDeviceError:
            return None

    @property
    def inputs(self) -> list[Like]:
        """Its tensors, in order."""
        return list(_likes([*self.args, *(value for _, value in self.kwargs)]))

    @property
    def num_bytes(self) -> int:
        return sum(like.num_bytes for like in (*self.inputs, *self.results))

    @property
    def num_steps(self) -> int:
        """Steps of arithmetic of an operator whose time is not that of its reads and writes, else 0."""
        facts = facts_of(self.target)
        if facts.steps is not None:
            return facts.steps(self.inputs, self.results)
        if not facts.is_cubic:
            return 0
        numels = sorted(math.prod(like.shape) for like in (*self.inputs, *self.results))[-3:]
        return math.isqrt(math.prod(numels) * numels[-1] ** (3 - len(numels))) if numels else 0

    @property
    def is_quick(self) -> bool:
        """True if the call takes so little time that it is run at its full size."""
        return self.num_bytes <= QUICK_BYTES and self.num_steps <= QUICK_STEPS

    @property
    def is_feasible(self) -> bool:
        """True if the call can be run at its full size where nothing else tells its memory."""
        return self.num_bytes <= MOST_BYTES and self.num_steps <= MOST_STEPS

    @property
    def sizes(self) -> list[int]:
        """All sizes of its tensors, the largest first."""
        return sorted({size for like in (*self.inputs, *self.results) for size in like.shape}, reverse=True)

    def replace_sizes(self, sizes: Mapping[int, int]) -> OperatorCall | None:
        """With other sizes wherever they occur, in numbers too; None where that cannot be."""
        try:
            args, kwargs, results = (_resize(part, sizes) for part in (self.args, self.kwargs, self.results))
        except ValueError:
            return None
        return self._replace(args=args, kwargs=kwargs, results=results)

    def replace_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperatorCall:
        """The same operator called on others; what that gives is found on meta tensors."""
        pairs = [(name, _describe(value)) for name, value in kwargs.items()]
        call = self._replace(args=tuple([_describe(arg) for arg in args]), kwargs=tuple(pairs))
        on_meta, more = call.substitute(lambda like: torch.empty_strided(*like[:2], dtype=like.dtype, device="meta"))
        tensors = tensors_in(self.target(*on_meta, **more))
        results = tuple([Like(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors])
        return OperatorCall(call.target, call.args, call.kwargs, results)

    def substitute(self, values: Callable[[Like], Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they are given, with ``values`` in the place of tensors."""
        return [_fill(arg, values) for arg in self.args], {name: _fill(arg, values) for name, arg in self.kwargs}


def call_of(node: fx.Node) -> OperatorCall | None:
    """The call that a node makes; None if its operator is of a library that is not listed, or not on CPU tensors."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace not in _NAMESPACES:
        return None
    return OperatorCall.from_arguments(target, node.args, node.kwargs, tensors_in(node.meta.get("val")))


def dispatch_state() -> tuple[object, ...]:
    """ATen's inputs to its choice of kernels, besides a call's arguments: number of threads, oneDNN, deterministic
    algorithms."""
    return torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()


def _describe_tensor(tensor: Tensor) -> Like:
    if tensor.device.type != "cpu":
        raise _OtherDeviceError
    return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _describe(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return _describe(value.meta["val"])
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if isinstance(value, Like):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return _Number(type(value), value) if isinstance(value, (bool, float, complex)) else value


def _likes(values: Iterable[Any]) -> Iterable[Like]:
    for value in values:
        if isinstance(value, Like):
            yield value
        elif type(value) is tuple:
            yield from _likes(value)


def _resize(value: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(value, Like):
        like = value.replace_sizes(sizes)
        if like is None:
            raise ValueError
        return like
    if type(value) is tuple:
        return tuple(_resize(item, sizes) for item in value)
    return sizes.get(value, value) if type(value) is int else value


def _fill(value: Any, values: Callable[[Like], Any]) -> Any:
    if isinstance(value, Like):
        return values(value)
    if isinstance(value, _Number):
        return value.value
    return [_fill(item, values) for item in value] if type(value) is tuple else value
