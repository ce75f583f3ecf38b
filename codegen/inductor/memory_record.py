"""Allocations and frees of compiled code, read from the wrapper that Inductor generated for it.

The wrapper is straight-line Python: it allocates buffers, runs kernels on them, and deletes names. It is gone through
statement by statement on fake tensors. Names hold storages, kernels that Inductor generated take nothing, and operators
that it leaves to ATen make their own outputs and hold a workspace while they run (``scheduler/cost/cpu/workspace.py``).

Not covered: the copy that a wrapper for CUDA makes of an input that does not begin at a multiple of 16 bytes, as a
micro-batch's part of the batch may not. A bucket's slots do, and so does what the allocator makes.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.aliasing import tensors_in
from zerofx.scheduler.cost.cpu.workspace import workspace_bytes
from zerofx.scheduler.cost.liveness import MemoryEvent
from zerofx.torch_private.inductor.wrapper import (
    DEVICE,
    EMPTY,
    NUMBERS,
    REDUCING_METHODS,
    SAME_MEMORY,
    VIEW,
    WRITING_METHODS,
    Wrapper,
    is_guard,
    operator_called,
    unknown_statement,
)
from zerofx.torch_private.operators import OpOverload, schema_of
from zerofx.torch_private.tensors import memory_of


def memory_record(
    source: str, inputs: Sequence[Any], owners: Sequence[int], fake_mode: AbstractContextManager[Any]
) -> tuple[MemoryEvent, ...]:
    """Go through the wrapper in a generated file.

    Args:
        source: the file.
        inputs: fake values of what the wrapper is called with.
        owners: for each of them, the number of the region's input whose storage it is in.
        fake_mode: what fake tensors are made in.

    Raises:
        InternalError: there is a statement that may take memory for all that is known of it.
    """
    with fake_mode:
        return _Record(Wrapper.parse(source), inputs, owners).run()


class _Record:
    """The names that hold memory at one statement of the wrapper, and all that has happened before it."""

    def __init__(self, wrapper: Wrapper, inputs: Sequence[Any], owners: Sequence[int]) -> None:
        self._wrapper = wrapper
        self._given = list(inputs)
        self._events: list[MemoryEvent] = []
        self._values: dict[str, Any] = {}
        self._names: Counter[int] = Counter()  # by storage
        self._sizes: dict[int, int] = {}
        self._owner = {memory_of(i): owner for i, owner in zip(inputs, owners, strict=True) if isinstance(i, Tensor)}
        self._views = Counter(self._owner.values())  # storages of inputs that are still held, by region input
        self._unnamed: list[Tensor] = []  # what the statement has made on the way to its value
        self._blocks: dict[int, int] = {}  # by storage: the number of what the wrapper itself has allocated
        self._num_blocks = 0

    def run(self) -> tuple[MemoryEvent, ...]:
        self._block(self._wrapper.body)
        return tuple(self._events)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.With() if is_guard(statement):
                    self._block(statement.body)
                case ast.Delete():
                    for target in statement.targets:
                        if not isinstance(target, ast.Name) or target.id not in self._values:
                            raise unknown_statement(target)
                        self._release(self._values.pop(target.id))
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    self._bind(dict(zip(map(ast.unparse, names), self._given, strict=True)))
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self._bind({name: self._evaluate(statement.value)})
                    while self._unnamed:
                        self._release(self._unnamed.pop())
                case ast.Expr():
                    self._evaluate(statement.value)
                case ast.Return(value=ast.expr() as value):
                    self._leave(self._evaluate(value))
                    return
                case _:
                    raise unknown_statement(statement)

    def _bind(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            before = self._values.get(name)
            for tensor in tensors_in(value):
                self._hold(tensor)
            self._values[name] = value
            self._release(before)

    def _hold(self, tensor: Tensor) -> None:
        key = memory_of(tensor)
        self._names[key] += 1
        if key not in self._owner and key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self._events.append(MemoryEvent(self._sizes[key]))

    def _allocate(self, tensor: Tensor) -> None:
        key = memory_of(tensor)
        self._sizes[key], self._blocks[key] = tensor.untyped_storage().nbytes(), self._num_blocks
        self._events.append(MemoryEvent(self._sizes[key], block=self._num_blocks))
        self._num_blocks += 1

    def _leave(self, values: Sequence[Any]) -> None:
        """Say which blocks the wrapper's results lie in."""
        for number, value in enumerate(values):
            block = self._blocks.get(memory_of(value)) if isinstance(value, Tensor) else None
            if block is not None:
                self._events.append(MemoryEvent(block=block, output=number))

    def _release(self, value: Any) -> None:
        for tensor in tensors_in(value):
            key = memory_of(tensor)
            self._names[key] -= 1
            if self._names[key]:
                continue
            if key in self._sizes:
                self._events.append(MemoryEvent(-self._sizes.pop(key), block=self._blocks.pop(key, None)))
            else:
                owner = self._owner[key]
                self._views[owner] -= 1
                if not self._views[owner]:
                    self._events.append(MemoryEvent(freed=owner))

    def _evaluate(self, expression: ast.expr) -> Any:
        """The fake value of an expression; None for what holds no memory, such as a stream or a generated kernel's."""
        match expression:
            case ast.Constant():
                return expression.value
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.Name(id=name) if name in NUMBERS:
                return NUMBERS[name]
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate(expression.operand)
            case ast.BinOp(op=ast.Add()):
                return self._evaluate(expression.left) + self._evaluate(expression.right)
            case ast.BinOp(op=ast.Mult()):
                return self._evaluate(expression.left) * self._evaluate(expression.right)
            case ast.Slice(lower=ast.expr() as lower, upper=ast.expr() as upper, step=None):
                return slice(self._evaluate(lower), self._evaluate(upper))
            case ast.List() | ast.Tuple():
                items = [self._evaluate(item) for item in expression.elts]
                return items if isinstance(expression, ast.List) else tuple(items)
            case ast.Subscript():
                return self._evaluate(expression.value)[self._evaluate(expression.slice)]
            case ast.Attribute() if ast.unparse(expression).startswith("torch."):
                return operator.attrgetter(ast.unparse(expression).removeprefix("torch."))(torch)
            case ast.Call() if not self._wrapper.takes_nothing(expression):
                return self._call(expression)
            case ast.Call():
                return None
        raise unknown_statement(expression)

    def _call(self, call: ast.Call) -> Any:
        name = ast.unparse(call.func)
        target = operator_called(name)
        if target is None and isinstance(call.func, ast.Attribute):
            return self._method(call, call.func)
        args = [self._evaluate(argument) for argument in call.args]
        keywords = {keyword.arg: self._evaluate(keyword.value) for keyword in call.keywords if keyword.arg}
        if target is not None:
            return self._operator(target, args, keywords)
        if name == SAME_MEMORY:
            return args[0]
        if name == VIEW:
            return torch.as_strided(*args)
        if name == DEVICE:
            return torch.device(*args, **keywords)
        if name.startswith(EMPTY):
            size, stride, dtype = args
            device, _, pinned = name.removeprefix(EMPTY).partition("_")
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
            if not pinned:
                self._allocate(tensor)
            return tensor
        raise unknown_statement(call)

    def _method(self, call: ast.Call, function: ast.Attribute) -> Any:
        """A method of a tensor: a view, one that writes into it, or one that reduces it."""
        if function.attr == "as_strided":
            return torch.as_strided(self._evaluate(function.value), *map(self._evaluate, call.args))
        known = function.attr in WRITING_METHODS or function.attr in REDUCING_METHODS
        value = self._evaluate(function.value) if known else None
        if not isinstance(value, Tensor):
            raise unknown_statement(call)
        if function.attr in WRITING_METHODS:
            return None
        keywords = {keyword.arg: self._evaluate(keyword.value) for keyword in call.keywords if keyword.arg}
        result = getattr(value, function.attr)(*map(self._evaluate, call.args), **keywords)
        self._hold(result)
        self._unnamed.append(result)
        return result

    def _operator(self, target: OpOverload, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        is_written = keywords.pop("out", None) is not None  # where the caller has memory for it
        node = _node(target, *_positional_arguments(target, args, keywords))
        allocated = [tensor for tensor in tensors_in(node.meta["val"]) if not self._names[memory_of(tensor)]]
        num_bytes = 0 if is_written else sum(tensor.untyped_storage().nbytes() for tensor in allocated)
        if scratch := workspace_bytes(node):
            self._events += [MemoryEvent(num_bytes + scratch), MemoryEvent(-num_bytes - scratch)]
        return None if is_written else node.meta["val"]


def _positional_arguments(
    target: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by their places in the operator's schema, as the rules for workspaces read them.

    Besides them, by name, those which the schema takes in no other way.
    """
    places = [argument for argument in schema_of(target).arguments if not argument.kwarg_only]
    rest = {name: value for name, value in keywords.items() if all(name != argument.name for argument in places)}
    missing = places[len(args) :]
    return (*args, *(keywords.get(argument.name, argument.default_value) for argument in missing)), rest


def _node(target: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> fx.Node:
    """A node that calls ``target``, with fake values."""
    graph = fx.Graph()

    def to_node(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(map(to_node, args)), dict(keywords))
    node.meta["val"] = target(*args, **keywords)
    return node
