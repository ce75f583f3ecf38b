"""What compiled code will take and give back, read from the wrapper that Inductor generated for it.

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
from zerofx.torch_private.operators import OpOverload, schema_of
from zerofx.torch_private.tensors import memory_of

_EMPTY = "empty_strided_"  # and the device
_SAME_MEMORY = "copy_if_misaligned"  # what it is given, for inputs that begin where kernels for CUDA expect it


def memory_record(
    source: str, inputs: Sequence[Any], owners: Sequence[int], fake_mode: AbstractContextManager[Any]
) -> tuple[MemoryEvent, ...]:
    """Go through the wrapper in a generated file.

    Args:
        source: the file.
        inputs: fake values of what the wrapper is called with.
        owners: for each of them, the number of the region's input whose storage it is in.
        fake_mode: what fake tensors are made in.
    """
    call = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "call")
    with fake_mode:
        return _Record(inputs, owners).run(call)


class _Record:
    """The names that hold memory at one statement of the wrapper, and all that has happened before it."""

    def __init__(self, inputs: Sequence[Any], owners: Sequence[int]) -> None:
        self._given = list(inputs)
        self._events: list[MemoryEvent] = []
        self._values: dict[str, Any] = {}
        self._names: Counter[int] = Counter()  # by storage
        self._sizes: dict[int, int] = {}
        self._owner = {memory_of(i): owner for i, owner in zip(inputs, owners, strict=True) if isinstance(i, Tensor)}
        self._views = Counter(self._owner.values())  # storages of inputs that are still held, by region input

    def run(self, call: ast.FunctionDef) -> tuple[MemoryEvent, ...]:
        self._block(call.body)
        return tuple(self._events)

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.With):  # a device guard
                self._block(statement.body)
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self._drop(target.id)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
                names = [name.id for name in statement.targets[0].elts if isinstance(name, ast.Name)]
                if _is_name(statement.value, "args"):
                    self._bind(dict(zip(names, self._given, strict=True)))
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                self._bind({statement.targets[0].id: self._evaluate(statement.value)})
            elif isinstance(statement, ast.Expr):
                self._evaluate(statement.value)

    def _bind(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            before = self._values.get(name)
            for tensor in tensors_in(value):
                self._hold(tensor)
            self._values[name] = value
            self._release(before)

    def _drop(self, name: str) -> None:
        self._release(self._values.pop(name, None))

    def _hold(self, tensor: Tensor) -> None:
        key = memory_of(tensor)
        self._names[key] += 1
        if key not in self._owner and key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes()
            self._events.append(MemoryEvent(self._sizes[key]))

    def _release(self, value: Any) -> None:
        for tensor in tensors_in(value):
            key = memory_of(tensor)
            self._names[key] -= 1
            if self._names[key]:
                continue
            if key in self._sizes:
                self._events.append(MemoryEvent(-self._sizes.pop(key)))
            else:
                owner = self._owner[key]
                self._views[owner] -= 1
                if not self._views[owner]:
                    self._events.append(MemoryEvent(freed=owner))

    def _evaluate(self, expression: ast.expr) -> Any:
        """The fake value of an expression; None for what holds no memory, such as a stream or a generated kernel."""
        match expression:
            case ast.Constant():
                return expression.value
            case ast.Name():
                return self._values.get(expression.id)
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate(expression.operand)
            case ast.List() | ast.Tuple():
                made = [self._evaluate(item) for item in expression.elts]
                return made if isinstance(expression, ast.List) else tuple(made)
            case ast.Subscript():
                return self._evaluate(expression.value)[self._evaluate(expression.slice)]
            case ast.Attribute() if ast.unparse(expression).startswith("torch."):
                return operator.attrgetter(ast.unparse(expression).removeprefix("torch."))(torch)
            case ast.Call():
                return self._call(expression)
        return None

    def _call(self, call: ast.Call) -> Any:
        name = ast.unparse(call.func)
        if name == _SAME_MEMORY:
            return self._evaluate(call.args[0])
        target = _operator(name)
        if not name.startswith(_EMPTY) and name != "reinterpret_tensor" and target is None:
            return None
        args = [self._evaluate(argument) for argument in call.args]
        if name.startswith(_EMPTY):
            size, stride, dtype = args
            return torch.empty_strided(size, stride, dtype=dtype, device=name.removeprefix(_EMPTY).split("_")[0])
        if target is None:
            return torch.as_strided(*args)
        keywords = {keyword.arg: self._evaluate(keyword.value) for keyword in call.keywords if keyword.arg}
        is_written = keywords.pop("out", None) is not None  # where the caller has memory for it
        node = _node(target, *_ordered(target, args, keywords))
        scratch = workspace_bytes(node)
        if is_written:
            self._events += [MemoryEvent(scratch), MemoryEvent(-scratch)] if scratch else []
            return None
        if scratch:
            outputs = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(node.meta["val"]))
            self._events += [MemoryEvent(outputs + scratch), MemoryEvent(-outputs - scratch)]
        return node.meta["val"]


def _is_name(expression: ast.expr, name: str) -> bool:
    return isinstance(expression, ast.Name) and expression.id == name


def _operator(name: str) -> OpOverload | None:
    """The operator that the wrapper calls by ``name``: ``torch.ops.aten.x.default``, or ``extern_kernels.x``."""
    space, _, rest = name.partition(".")
    found: Any = None
    if space == "torch" and rest.startswith("ops."):
        found = operator.attrgetter(rest)(torch)
    elif space == "extern_kernels":
        found = getattr(getattr(torch.ops.aten, rest, None), "default", None)
    return found if isinstance(found, OpOverload) else None


def _ordered(
    target: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call by their places in the operator's schema, as the rules for workspaces read them.

    Beside them, by name, those which the schema takes in no other way.
    """
    places = [argument for argument in schema_of(target).arguments if not argument.kwarg_only]
    rest = {name: value for name, value in keywords.items() if all(name != argument.name for argument in places)}
    missing = places[len(args) :]
    return (*args, *(keywords.get(argument.name, argument.default_value) for argument in missing)), rest


def _node(target: OpOverload, args: Sequence[Any], keywords: Mapping[str, Any]) -> fx.Node:
    """A node that calls ``target``, with fake values."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(map(given, args)), dict(keywords))
    node.meta["val"] = target(*args, **keywords)
    return node
