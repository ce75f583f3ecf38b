"""Walk through the Python state that executed code may have read, from a step's functions and their globals.

Of an object, the attributes that executed code names count; of a list, dictionary or set all items; of a function its
closure and defaults. Names are those of the code's own table, and strings in it, which may be arguments of ``getattr``.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from zerofx.capture.python_state.columns import MISSING, value_at
from zerofx.capture.python_state.executed import ExecutedCode, is_opaque, names_read
from zerofx.capture.python_state.reads import OF_FUNCTION, State, is_plain
from zerofx.torch_private.modules import (
    HOOKS_AND_PARTS,
    OF_RNNS,
    TABLES,
    buffer_table,
    child_table,
    hook_tables,
    hook_tables_of_all,
)

MOST_ITEMS = 1000
"""Items of a container up to which each is looked at, beyond which their number is: data sets have millions."""
_MOST_BYTES = 1 << 16  # of an array whose values are compared
_MOST_OBJECTS = 100_000
_READS_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "hasattr"})
_READS_ENVIRONMENT = frozenset({"environ", "getenv"})
_OWN = (*TABLES, OF_RNNS, "training")  # what is watched elsewhere, or by nobody


def walk(
    roots: Mapping[str, Any],
    executed: ExecutedCode,
    ignored: tuple[type, ...] = (),
    constants: AbstractSet[int] = frozenset(),
) -> State:
    """The state that ``executed`` code may have read.

    Args:
        roots: the functions of a step, by name: the model, ``forward``, ``loss_fn``.
        executed: the code that ran while the step was traced.
        ignored: classes whose instances, as hooks, belong to the step.
        constants: addresses of the memory of tensors that the step keeps, even if they are replaced.
    """
    names = _names(executed)
    state = _Walk(roots, executed, names, ignored, constants).state
    if any(_READS_ANY_NAME & set(code.co_names) for code in executed.globals):
        # A name that is looked up may itself have been read.
        read = {value for value in state.facts.values() if type(value) is str and value.isidentifier()}
        if read - names:
            state = _Walk(roots, executed, names | read, ignored, constants).state
    return state


def _names(executed: ExecutedCode) -> set[str]:
    names = set(executed.attributes)
    for code in executed.globals:
        names.update(names_read(code))
        names.update(text for text in _strings(code.co_consts) if text.isidentifier())
    return names


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for constant in constants:
        if type(constant) is str:
            yield constant
        elif type(constant) is tuple:
            yield from _strings(constant)


class _Walk:
    """One walk, nearest first; ``state`` is its result."""

    def __init__(
        self,
        roots: Mapping[str, Any],
        executed: ExecutedCode,
        names: AbstractSet[str],
        ignored: tuple[type, ...],
        constants: AbstractSet[int],
    ) -> None:
        self.state, self._constants = State(), constants
        takers = [code for code in executed.globals if "next" in code.co_names]
        self._taken = {name for code in takers for name in (*code.co_names, *code.co_freevars)}
        self._names, self._executed, self._ignored = names, executed, ignored
        self._seen: dict[int, Any] = {}  # with what it is the identity of, which may be gone otherwise
        self._pending: deque[tuple[str, Any]] = deque()
        self._hooks("all modules", hook_tables_of_all())
        for name, root in roots.items():
            self._reach(name, root)
        for code, table in executed.globals.items():
            self._read_code(code, table)
        self._finish()
        # Found through code that is not Python's, so that no path leads there.
        for owner in list(executed.owners.values()):
            if id(owner) not in self._seen and not isinstance(owner, torch.Tensor):
                self._reach(type(owner).__name__, owner)
        self._finish()

    def _finish(self) -> None:
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            self._look_into(*self._pending.popleft())

    def _reach(self, path: str, value: Any) -> None:
        """Look into ``value`` later, unless it has been visited."""
        if not is_plain(value) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._pending.append((path, value))

    def _read(self, path: str, container: Any, key: Any, value: Any) -> None:
        """Note a value that was read, and look into it."""
        if path in self.state.facts:
            return
        self.state.add(path, container, key, value)
        self.state.facts[path] = _Same(value) if self._is_constant(value) else _fact(value)
        if isinstance(value, Iterator) and key in self._taken:
            self.state.iterators.append(path)
        self._reach(path, value)

    def _is_constant(self, value: Any) -> bool:
        """True if a tensor is one that the step keeps."""
        if not self._constants or type(value) is not torch.Tensor or value.is_meta:
            return False
        return value.untyped_storage().data_ptr() in self._constants

    def _read_code(self, code: CodeType, table: dict[str, Any]) -> None:
        module = table.get("__name__")
        for name in names_read(code):
            if name in table:
                self._read(f"{module}.{name}", table, name, table[name])
            elif isinstance(module_of_name := sys.modules.get(name), ModuleType):
                self._reach(name, module_of_name)
        if _READS_ENVIRONMENT & set(code.co_names):
            for key in _strings(code.co_consts):
                self._read(f"os.environ[{key!r}]", os.environ, key, os.environ.get(key, MISSING))

    def _look_into(self, path: str, owner: Any) -> None:
        if isinstance(owner, FunctionType):
            self._read_function(path, owner)
        elif isinstance(owner, MethodType):
            self._reach(path, owner.__func__)
            self._reach(path, owner.__self__)
        elif isinstance(owner, partial):
            self._reach(path, owner.func)
            self._items(path, owner.args)
            self._items(path, owner.keywords)
        elif isinstance(owner, property):
            self._reach(path, owner.fget)
        elif isinstance(owner, (classmethod, staticmethod)):
            self._reach(path, owner.__func__)
        elif isinstance(owner, type):
            self._read_class(path, owner)
        elif isinstance(owner, ModuleType):
            if not is_opaque(owner.__name__):
                self._attributes(path, vars(owner))
        elif isinstance(owner, weakref.ref):
            self._reach(path, owner())
        elif type(owner) in weakref.ProxyTypes:
            self._reach(path, getattr(owner.__init__, "__self__", None))
        elif isinstance(owner, (list, tuple, deque, Mapping)):
            self._items(path, owner)
        elif isinstance(owner, ContextVar):
            self._read(f"{path}.get()", owner, None, owner.get(MISSING))
        elif isinstance(owner, np.ndarray):
            if owner.nbytes <= _MOST_BYTES and owner.dtype != object:
                self.state.add(path, owner, None, owner.tobytes())
                self.state.facts[f"{path} (values)"] = owner.tobytes()
        elif isinstance(owner, (set, frozenset)):
            if len(owner) <= MOST_ITEMS:
                self.state.add(path, owner, None, frozenset(owner))
        elif not isinstance(owner, (torch.Tensor, BuiltinFunctionType)):
            self._read_object(path, owner)

    def _read_function(self, path: str, function: FunctionType) -> None:
        if is_opaque(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._read(f"{path}({name})", cell, name, value_at(cell, None))
        for name in OF_FUNCTION if function.__code__ in self._executed.globals else ():
            self._read(f"{path}.{name}", function, name, getattr(function, name))
        self._attributes(path, vars(function))

    def _read_class(self, path: str, owner: type) -> None:
        for base in owner.__mro__:
            if is_opaque(base.__module__):
                continue
            for name in self._names & base.__dict__.keys():
                value = base.__dict__[name]
                if not isinstance(value, MemberDescriptorType):
                    self._read(f"{base.__qualname__}.{name}", base, name, value)
            self.state.sized.append(base.__dict__)
            self.state.sizes.append(len(base.__dict__))

    def _read_object(self, path: str, owner: Any) -> None:
        if is_opaque(type(owner).__module__) and not isinstance(owner, nn.Module):
            if type(owner).__module__.partition(".")[0] in ("torch", "zerofx"):
                return
        else:
            self._reach(type(owner).__qualname__, type(owner))
        self.state.objects.append(owner)
        self.state.facts[f"{path} (class)"] = type(owner)
        table = getattr(owner, "__dict__", None)
        if type(table) is dict:
            self._attributes(path, table)
            if isinstance(owner, nn.Module):
                self._read_module(path, owner, table)
            else:
                # An attribute that is put there may hide one of the class.
                self.state.sized.append(table)
                self.state.sizes.append(len(table))
                self._hidden(path, owner, table)
        for base in type(owner).__mro__:
            for name, slot in vars(base).items() if not is_opaque(base.__module__) else ():
                if isinstance(slot, MemberDescriptorType) and name in self._names:
                    self._read(f"{path}.{name}", owner, name, value_at(owner, name))

    def _hidden(self, path: str, owner: Any, table: dict[str, Any]) -> None:
        """Attributes that executed code names and that are not in the object's own dictionary."""
        for base in type(owner).__mro__ if not is_opaque(type(owner).__module__) else ():
            for name in self._names & base.__dict__.keys() if not is_opaque(base.__module__) else ():
                if name not in table:
                    self.state.facts.setdefault(f"{path}.{name}", "of its class")

    def _read_module(self, path: str, module: nn.Module, table: dict[str, Any]) -> None:
        if "forward" not in table:
            self._read(f"{path}.forward", table, "forward", MISSING)
        self.state.sized.append(table)
        self.state.sizes.append(len(table))
        self._hidden(path, module, table)
        children = child_table(module)
        for kind, entries in (("modules", children), ("buffers", buffer_table(module))):
            self.state.sized.append(entries)
            self.state.sizes.append(len(entries))
            self.state.facts[f"{path} ({kind})"] = tuple(entries)
        for name, child in children.items():
            self._reach(f"{path}.{name}", child)
        self._hooks(path, hook_tables(module))

    def _hooks(self, path: str, tables: Iterable[dict[int, Any]]) -> None:
        tables = tuple(tables)
        self.state.hooks += [(table, tuple(table)) for table in tables]
        own = [table for table in tables if any(not isinstance(hook, self._ignored) for hook in table.values())]
        self.state.sized += own
        self.state.sizes += map(len, own)
        hooks = [hook for table in own for hook in table.values() if not isinstance(hook, self._ignored)]
        self.state.facts[f"{path} (hooks)"] = tuple(map(_fact, hooks))
        for hook in hooks:
            self._reach(f"{path} (hook)", hook)

    def _attributes(self, path: str, table: dict[str, Any]) -> None:
        few = self._names if len(self._names) < len(table) else table
        for name in list(few):
            if name in self._names and name in table and name not in _OWN and not name.endswith(HOOKS_AND_PARTS):
                self._read(f"{path}.{name}", table, name, table[name])

    def _items(self, path: str, container: Any) -> None:
        is_list = isinstance(container, (list, tuple, deque))
        self.state.sized.append(container)
        self.state.sizes.append(len(container))
        self.state.facts[f"{path} (items)"] = len(container)
        if len(container) > MOST_ITEMS:
            return
        try:
            entries = list(enumerate(container)) if is_list else list(container.items())
        except Exception:  # noqa: BLE001 - a mapping of the user's own may do anything
            return
        if not is_list:
            self.state.facts[f"{path} (keys)"] = tuple(key for key, _ in entries if is_plain(key))
        for key, value in entries:
            if is_list or is_plain(key):
                self._read(f"{path}[{key!r}]", container, key, value)


def _fact(value: Any) -> Any:
    """The part of a value that a step may depend on: of objects that are looked into, their class."""
    if is_plain(value) or value is MISSING:
        return value
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, MethodType):
        return _fact(value.__func__), id(value.__self__)
    if isinstance(value, AbstractSet) and len(value) <= MOST_ITEMS:
        return frozenset(item if is_plain(item) else id(item) for item in value)
    if isinstance(value, (type, ModuleType, nn.Module, BuiltinFunctionType)):
        return _Same(value)
    return type(value)


class _Same:
    """Equal for the same object alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)

    def __repr__(self) -> str:
        return type(self._value).__qualname__
