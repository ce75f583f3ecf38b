"""Recipes: the operations that make a deferred tensor, recorded, and replayed for one tensor at a time.

A ``Value`` stands for a tensor; a ``Cell`` for the memory that it and its views share, with all operations on that
memory in order. An operation that draws random numbers is recorded with the state of its generator, so that it gives
the same numbers whenever it is replayed, in whatever order tensors are made.

```
w = torch.empty(4, 4)    cell 1: empty
w.uniform_(-1, 1)        cell 1: empty, uniform_ (generator state s0)
v = w[0]; v.zero_()      cell 1: empty, uniform_ (s0), select, zero_
b = w.sum(0)             cell 2: sum, of a value in cell 1: made from the operations of both cells
```

Operations carry numbers as Lamport clocks do: an operation on a cell gets a higher number than all earlier ones on it,
so the numbers order any two operations that depend on each other, without a counter for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.errors import UsageError
from zerofx.ir.op_kernels.own_draws import generator_of
from zerofx.ir.operators.operator import Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.dispatch import without_modes
from zerofx.torch_private.operators import OpOverload, pytree, schema_of
from zerofx.torch_private.tensors import version_of


@dataclass(eq=False)
class Cell:
    """The memory of a tensor that does not exist, and of its views: the operations that touch it, in order.

    ``clock`` is the number of the latest operation that wrote or read it, ``last_read`` that of the latest whose result
    is in another cell. ``is_written`` says whether its values are defined.
    """

    operations: list[Operation] = field(default_factory=list)
    clock: int = 0
    last_read: int = 0
    is_written: bool = False

    @property
    def is_constant(self) -> bool:
        """True if it is made of tensors that exist, as of Python's numbers, and nothing has changed it."""
        if not self.operations or any(operation.written for operation in self.operations):
            return False
        inputs = self.operations[0].inputs
        return bool(inputs) and all(isinstance(value, Constant) or value.cell.is_constant for value in inputs)


@dataclass(eq=False, frozen=True)
class Value:
    """A tensor that does not exist: ``shadow`` (on meta) has its shape, strides and dtype; ``device`` is its own."""

    shadow: torch.Tensor
    cell: Cell
    device: torch.device


@dataclass(eq=False, frozen=True)
class Constant:
    """A tensor that exists and was read by an operation, at ``version``."""

    tensor: torch.Tensor
    version: int

    def read(self) -> torch.Tensor:
        """The tensor, with the values that it had then.

        Raises:
            UsageError: it has been changed in place since.
        """
        if version_of(self.tensor) != self.version:
            raise UsageError(
                f"expected tensors that a deferred model was made from to stay as they are, found one of shape "
                f"{list(self.tensor.shape)} changed in place since: clone() it before it is used, or make it inside "
                f"empty_init()"
            )
        return self.tensor


@dataclass(eq=False, frozen=True)
class Operation:
    """One call: ``args`` and ``kwargs`` hold values and constants instead of tensors.

    ``outputs`` are the tensors in its result, in order. ``random_state`` is the state of the generator before it,
    ``default_dtype`` torch's at that time, which decides the dtypes of tensors made from Python numbers.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Value, ...]
    written: frozenset[Cell]
    random_state: torch.Tensor | None
    default_dtype: torch.dtype

    @property
    def inputs(self) -> list[Value | Constant]:
        """The tensors among its arguments."""
        return values_in((self.args, self.kwargs))

    @property
    def cells(self) -> set[Cell]:
        """The cells that it reads or writes."""
        return {value.cell for value in (*self.inputs, *self.outputs) if isinstance(value, Value)}

    def fills(self, cell: Cell) -> bool:
        """True if it overwrites all of ``cell``."""
        if not fills_first_argument(self.function) or self.written != {cell}:
            return False
        filled = self.args[0].shadow
        return bool(filled.numel() * filled.itemsize == filled.untyped_storage().nbytes())


def values_in(tree: Any) -> list[Any]:
    """The values and constants among the leaves of ``tree``."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Value | Constant)]


def note(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Sequence[Value],
    written: Sequence[Value],
    random_state: torch.Tensor | None,
) -> None:
    """Add an operation to the recipes of the tensors that it makes or writes to; mark those that it only reads as read.

    ``outputs`` in new memory come with a new cell each.
    """
    inputs = values_in((args, kwargs))
    read = {value.cell for value in inputs if isinstance(value, Value)}
    changed = {value.cell for value in (*outputs, *written)}
    number = 1 + max((cell.clock for cell in read | changed), default=0)
    written_cells = frozenset(value.cell for value in written)
    operation = Operation(
        number, function, args, kwargs, tuple(outputs), written_cells, random_state, torch.get_default_dtype()
    )
    defined = facts_of(function).traffic is not Traffic.ALLOCATES and all(
        cell.is_written for cell in read - written_cells
    )
    for cell in changed:
        if operation.fills(cell):
            cell.operations = [operation for operation in cell.operations if _is_needed(operation, cell)]
        cell.operations.append(operation)
        if cell in written_cells or not cell.clock:
            cell.is_written |= defined
    for cell in read | changed:
        cell.clock = number
    if len(read | changed) > 1:
        for cell in read:
            cell.last_read = number


def _is_needed(operation: Operation, cell: Cell) -> bool:
    """True if an operation on ``cell`` matters once all of it is about to be filled: it makes a tensor, or its result
    may have been read."""
    return operation.written != {cell} or operation.number <= cell.last_read


def replay(value: Value) -> torch.Tensor:
    """The tensor that ``value`` stands for, made by the operations that lead to it, and no others.

    It is made again at each call, on its own device. Meanwhile no more is in memory than the tensor and its inputs. The
    state of all generators is restored afterwards.

    Raises:
        UsageError: a tensor from outside, which it was computed from, has been changed in place since.
    """
    operations = _operations_leading_to(value.cell)
    last_use = {named: index for index, operation in enumerate(operations) for named in _values_of(operation)}
    results: dict[Value, torch.Tensor] = {}

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Constant):
            return leaf.read()
        return results[leaf] if isinstance(leaf, Value) else leaf

    with torch.no_grad(), _pause_recording():
        for index, operation in enumerate(operations):
            args, kwargs = pytree.tree_map(real, (operation.args, operation.kwargs))
            torch.set_default_dtype(operation.default_dtype)
            with _random_state(operation.random_state, kwargs, operation.outputs):
                result = operation.function(*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            results.update(zip(operation.outputs, tensors, strict=True))
            del args, kwargs, result, tensors
            for named in _values_of(operation):
                if last_use[named] == index and named is not value:
                    del results[named]
    return results[value]


def check_constants(value: Value) -> None:
    """Raise the errors of ``replay``, without making anything."""
    for operation in _operations_leading_to(value.cell):
        for constant in operation.inputs:
            if isinstance(constant, Constant):
                constant.read()


def _values_of(operation: Operation) -> set[Value]:
    return {value for value in (*operation.inputs, *operation.outputs) if isinstance(value, Value)}


def _operations_leading_to(cell: Cell) -> list[Operation]:
    """All operations on ``cell``, and on the cells that they read, in order."""
    operations: dict[Operation, None] = {}
    seen, waiting = {cell}, [cell]
    while waiting:
        for operation in waiting.pop().operations:
            if operation not in operations:
                operations[operation] = None
                fresh = operation.cells - seen
                seen |= fresh
                waiting += fresh
    return sorted(operations, key=lambda operation: operation.number)


def fills_first_argument(function: Callable[..., Any]) -> bool:
    """True if ``function`` replaces the values of its first argument without reading them."""
    if not isinstance(function, OpOverload) or facts_of(function).traffic is not Traffic.OVERWRITES:
        return False
    return [str(argument.type) for argument in schema_of(function).arguments].count("Tensor") == 1


@contextlib.contextmanager
def _random_state(state: torch.Tensor | None, kwargs: dict[str, Any], outputs: Sequence[Value]) -> Iterator[None]:
    """Set the generator that an operation draws from to ``state`` while it runs."""
    if state is None:
        yield
        return
    generator = kwargs.get("generator") or generator_of(outputs[0].device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


@contextlib.contextmanager
def _pause_recording() -> Iterator[None]:
    """While open, operations are not recorded; the default dtype is restored afterwards."""
    default = torch.get_default_dtype()
    try:
        with without_modes():
            yield
    finally:
        torch.set_default_dtype(default)
