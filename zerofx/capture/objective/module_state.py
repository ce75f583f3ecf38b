"""Attributes that a forward leaves on its modules while traced: tensors, plain values, hooks, modules and buffers.

All are removed, so that each trace of a forward is of the same call.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn

from zerofx.capture.python_state.numbers import is_number
from zerofx.errors import CaptureError
from zerofx.torch_private.modules import HOOKS_AND_PARTS, OF_RNNS, TABLES, buffer_table, parameter_table
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import is_traced


@dataclass(frozen=True)
class Change:
    """A plain value that a forward has put on a module, and that was undone; ``full`` is its name in the model."""

    attributes: dict[str, Any]
    name: str
    value: Any
    full: str

    def make(self) -> None:
        """Put the value there."""
        self.attributes[self.name] = self.value


_PLAIN = (bool, int, float, str, NoneType)


@contextlib.contextmanager
def restore_modules(
    model: nn.Module, left: dict[str, None], changed: dict[str, Change | None], prefix: str = ""
) -> Iterator[None]:
    """Restore what a forward puts on its modules: tensors, containers of tensors, plain values, hooks, modules.

    The names of tensors that replace no buffer are added to ``left``; plain values to ``changed``, by name, and the
    names of containers of hooks or modules. Names begin with ``prefix``.
    """
    # Each with what a tensor is told of that takes its place: anything, no buffer, nothing.
    tables: list[tuple[str, dict[str, Any], dict[str, Any], type | tuple[()]]] = [
        (path, table, dict(table), instead_of)
        for path, module in model.named_modules(prefix=prefix)
        for table, instead_of in (
            (vars(module), object),
            (buffer_table(module), NoneType),
            (parameter_table(module), ()),
        )
    ]
    containers = [
        (path, name, value, copy.copy(value))
        for path, module in model.named_modules(prefix=prefix)
        for name, value in vars(module).items()
        if isinstance(value, (list, dict)) and (type(value) in (list, dict) or name.endswith(HOOKS_AND_PARTS))
    ]
    try:
        yield
    finally:
        for path, table, entries, instead_of in tables:
            _put_back(table, entries, path, instead_of, left, changed)
        for path, name, container, earlier in containers:
            full = f"{path}.{name}".removeprefix(".")
            if _identities(container) == _identities(earlier):
                continue
            if name.endswith(HOOKS_AND_PARTS):
                changed[full] = None
            elif _holds_traced(name, container):
                left[full] = None
            else:
                continue
            container.clear()
            if isinstance(container, dict):
                container.update(earlier)
            else:
                container.extend(earlier)


def _put_back(
    table: dict[str, Any],
    entries: Mapping[str, Any],
    path: str,
    instead_of: type | tuple[()],
    left: dict[str, None],
    changed: dict[str, Change | None],
) -> None:
    """Restore the ``entries`` of tensors and plain values in a table of a module."""
    for name, value in list(table.items()):
        earlier, full = entries.get(name), f"{path}.{name}".removeprefix(".")
        if isinstance(value, torch.Tensor) or (value is not earlier and _holds_traced(name, value)):
            if value is not earlier and isinstance(earlier, instead_of):
                left[full] = None
                if type(earlier) in (int, float):  # by which a later call may go another way
                    changed[full] = None
        elif is_number(value):  # which nobody is to find once the trace has ended
            changed[full] = None
        elif type(value) in _PLAIN and type(earlier) in _PLAIN and value != earlier:
            changed[full] = Change(table, name, value, full)
        else:
            continue
        if name in entries:
            table[name] = earlier
        else:
            del table[name]
    table.update({name: entry for name, entry in entries.items() if isinstance(entry, torch.Tensor)})


def _holds_traced(name: str, value: Any) -> bool:
    """True if an attribute of a module is a list, tuple or dict of traced tensors, and not one of torch's own."""
    if type(value) not in (list, tuple, dict) or name in (*TABLES, OF_RNNS):
        return False
    return any(map(is_traced, pytree.tree_leaves(value)))


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that modules have as attributes, and in lists, tuples and dicts there, by name."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value
            elif _holds_traced(name, value):
                tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
                yield from ((f"{path}.{name}[{index}]", tensor) for index, tensor in enumerate(tensors))


def _identities(container: list[Any] | dict[Any, Any]) -> list[tuple[Any, int]]:
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in entries]


def shape_text(tensor: torch.Tensor) -> str:
    """A tensor's shape and dtype, in words."""
    return f"a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype}"


def numbers_of(model: nn.Module) -> dict[str, int | float]:
    """The Python numbers that modules have as attributes."""
    return {
        f"{prefix}.{name}".removeprefix("."): number
        for prefix, module in model.named_modules()
        for name, number in vars(module).items()
        if type(number) in (int, float)
    }


def rebound_buffers(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that a forward has put in place of buffers, by name.

    Raises:
        CaptureError: one is not like the buffer that it replaces.
    """
    changed = {name: after.get(name) for name, buffer in before.items() if after.get(name) is not buffer}
    rebound = {}
    for name, tensor in changed.items():
        buffer = before[name]
        if tensor is None or tensor.shape != buffer.shape or tensor.dtype != buffer.dtype or tensor.requires_grad:
            description = "nothing" if tensor is None else shape_text(tensor)
            raise CaptureError(
                f"expected a forward that leaves each buffer its shape and dtype, and no gradient, found that it puts "
                f"{description}{' with a gradient' if tensor is not None and tensor.requires_grad else ''} in the "
                f"place of {name}, {shape_text(buffer)}: detach() what a buffer is to hold, and give it its full size "
                f"at first, as a call of the model before zerofx.compile may do"
            )
        others = [other for other in before if other != name and before[other] is buffer]
        if others:
            raise CaptureError(
                f"expected a forward that leaves buffers that share a tensor as they are, found that it puts another "
                f"in the place of {name}, which is {', '.join(others)} too: change it in place, or give each its own"
            )
        rebound[name] = tensor
    return rebound
