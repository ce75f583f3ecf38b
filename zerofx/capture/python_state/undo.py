"""Undo what a traced forward does to Python objects: a trace is no step, and must leave nothing in anybody's logs."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from types import (
    CellType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import nn

from zerofx.capture.blame import describe_user_line
from zerofx.capture.python_state.columns import MISSING, value_at
from zerofx.capture.python_state.executed import ExecutedCode, is_opaque, names_read
from zerofx.capture.python_state.reads import is_plain, put
from zerofx.errors import CaptureError
from zerofx.torch_private.modules import HOOKS_AND_PARTS, TABLES
from zerofx.torch_private.operators import pytree
from zerofx.torch_private.tensors import is_traced

_MOST_OBJECTS = 500_000
_MOST_BYTES = 1 << 20  # of an array that is copied
_CONTAINERS = (dict, list, deque, set, bytearray)
_OF_CLASSES = (FunctionType, classmethod, staticmethod, property, MemberDescriptorType, GetSetDescriptorType)


class Mute:
    """Takes the place of what would write to a file, or hand on, what is logged: does nothing, whatever is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Mute:
        return self

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class WritesError(Exception):
    """A forward writes something outside of Python's objects, by one of ``sinks``, the innermost first, at ``line``."""

    def __init__(self, name: str, sinks: list[Any], line: str) -> None:
        super().__init__(f"{name} at {line}")
        self.name, self.sinks, self.line = name, sinks, line


_WRITING = frozenset({
    "write", "writelines", "writerow", "writerows", "send", "sendall", "sendto", "dump", "open", "put", "put_nowait",
    "execute",
})  # fmt: skip


_HANDING_ON = frozenset({"put", "put_nowait", "send"})  # of Python's own modules, to other threads and processes
_READING_SOURCES = frozenset({"linecache", "tokenize"})  # lines of code that warnings and tracebacks show


def raise_before_writing(frame: FrameType, event: str, called: Any, readers: Container[int]) -> None:
    """A profile function: raises where a function that writes somewhere is about to be called.

    ``readers``: the objects whose methods read what is logged, which write nothing themselves.
    """
    is_c = event == "c_call"
    name = getattr(called, "__name__", "") if is_c else frame.f_code.co_name
    if event not in ("call", "c_call") or name not in (_WRITING if is_c else _HANDING_ON):
        return
    owner = getattr(called, "__self__", None) if is_c else None
    if owner in (sys.stdout, sys.stderr) or isinstance(owner, (GeneratorType, Mute)):
        return
    where = frame.f_globals.get("__name__", "")
    if where in _READING_SOURCES or _is_ours(where) or not (is_c or is_opaque(where)):  # what users' code calls is seen
        return
    sinks, others = [owner], (nn.Module, ModuleType)
    around: FrameType | None = frame
    while around is not None:
        code = around.f_code
        sinks += [around.f_locals.get(code.co_varnames[0])] if code.co_argcount else []
        around = around.f_back
    sinks = [sink for sink in sinks if not is_plain(sink) and not isinstance(sink, others) and id(sink) not in readers]
    raise WritesError(name, sinks, describe_user_line(frame))


class Before:
    """The Python objects that ``roots`` and executed code lead to, as they are; ``restore`` makes them so again."""

    def __init__(self, roots: Iterable[Any], executed: ExecutedCode) -> None:
        self._copies: list[tuple[Any, Any]] = []  # containers with shallow copies
        self._entries: list[tuple[Any, Any, Any]] = []  # single places, with what is there
        self._seen: dict[int, Any] = {}
        self._pending: deque[Any] = deque(roots)
        for code, table in executed.globals.items():
            self._note_globals(table, names_read(code))
        self._pending.extend(executed.owners.values())
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            value = self._pending.popleft()
            if id(value) not in self._seen and not is_plain(value) and not isinstance(value, torch.Tensor):
                self._seen[id(value)] = value
                self._look_into(value)

    def restore(self) -> bool:
        """Undo all changes; gives whether a container that has changed held traced tensors."""
        holds_traced = False
        for container, earlier in self._copies:
            if _is_same(container, earlier):
                continue
            leaves = pytree.tree_leaves(list(container.values()) if isinstance(container, dict) else list(container))
            holds_traced |= any(map(is_traced, leaves))
            _fill(container, earlier)
        for container, key, value in self._entries:
            now = value_at(container, key)
            if now is not value and now is not MISSING:
                put(container, key, value)
        return holds_traced

    def mute(self, sinks: Iterable[Any]) -> bool:
        """Put a ``Mute`` in all places of the first of ``sinks`` that is found, until ``restore``; False for none."""
        for sink in sinks:
            places = [
                (container, key)
                for container, earlier in self._copies
                if isinstance(container, (dict, list, deque))
                for key, value in (earlier.items() if isinstance(earlier, dict) else enumerate(earlier))
                if value is sink
            ]
            places += [(container, key) for container, key, value in self._entries if value is sink]
            are_put = [put(container, key, Mute()) for container, key in places]
            if any(are_put):
                return True
        return False

    def _note_globals(self, table: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if name in table:
                self._entries.append((table, name, _keep(table[name])))
                self._pending.append(table[name])

    def _look_into(self, value: Any) -> None:
        if isinstance(value, _CONTAINERS):
            self._copies.append((value, _copy_of(value)))
            self._pending.extend(dict.values(value) if isinstance(value, dict) else value)
        elif isinstance(value, (tuple, frozenset)):
            self._pending.extend(value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES:
                self._copies.append((value, value.copy()))
        elif isinstance(value, FunctionType):
            if not is_opaque(value.__module__):
                self._note_cells(value)
                self._note_globals(value.__globals__, names_read(value.__code__))
                self._pending.extend([*(value.__defaults__ or ()), vars(value)])
        elif isinstance(value, MethodType):
            self._pending.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            self._pending.extend((value.func, value.args, value.keywords))
        elif isinstance(value, type):
            if not is_opaque(value.__module__):
                for name, entry in vars(value).items():
                    if not isinstance(entry, _OF_CLASSES) and not name.startswith("__"):
                        self._entries.append((value, name, _keep(entry)))
                        self._pending.append(entry)
        elif not isinstance(value, (ModuleType, CellType)):
            self._look_into_object(value)

    def _note_cells(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            inside = value_at(cell, None)
            if inside is not MISSING:
                self._entries.append((cell, None, _keep(inside)))
                self._pending.append(inside)

    def _look_into_object(self, value: Any) -> None:
        kind = type(value)
        is_module = isinstance(value, nn.Module)
        if _is_ours(kind.__module__) and not is_module:
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._copies.append((attributes, _copy_of(attributes)))
            # Tables of modules are the trace's own; what they hold is looked into.
            self._pending.extend(
                item
                for name, item in attributes.items()
                if not (is_module and (name in TABLES or name.endswith(HOOKS_AND_PARTS)))
            )
            if is_module:
                self._pending.extend(value.children())
        for base in kind.__mro__ if not is_opaque(kind.__module__) else ():
            if "__slots__" not in vars(base):  # others' are C's, and not to be written
                continue
            for name, slot in vars(base).items():
                if isinstance(slot, MemberDescriptorType) and (entry := value_at(value, name)) is not MISSING:
                    self._entries.append((value, name, _keep(entry)))
                    self._pending.append(entry)
        self._pending.append(kind)


def _is_ours(module: str) -> bool:
    """True for torch's objects and the step's own, which a trace looks after itself."""
    return module.partition(".")[0] in ("torch", "zerofx") and not module.startswith("zerofx.integrations.")


def _keep(value: Any) -> Any:
    """The value to put back: of a counter a copy, as it is advanced itself."""
    return copy.copy(value) if isinstance(value, itertools.count) else value


def _copy_of(container: Any) -> Any:
    if isinstance(container, dict):
        return {key: _keep(value) for key, value in dict.items(container)}
    return [_keep(value) for value in container] if isinstance(container, (list, deque)) else container.copy()


def _is_same(container: Any, earlier: Any) -> bool:
    if isinstance(container, np.ndarray):
        return bool(container.tobytes() == earlier.tobytes())
    if len(container) != len(earlier):
        return False
    if isinstance(container, dict):
        return all(
            key == other and value is before
            for (key, value), (other, before) in zip(dict.items(container), earlier.items(), strict=True)
        )
    if isinstance(container, (set, bytearray)):
        return bool(container == earlier)
    return all(value is before for value, before in zip(container, earlier, strict=True))


def _fill(container: Any, earlier: Any) -> None:
    if isinstance(container, np.ndarray):
        container[...] = earlier
    elif isinstance(container, (list, bytearray)):
        container[:] = earlier
    elif isinstance(container, dict):
        kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # which has an order of its own
        kind.clear(container)
        kind.update(container, earlier)
    else:
        container.clear()
        container.extend(earlier) if isinstance(container, deque) else container.update(earlier)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """While open, nothing is printed, and loggers say nothing."""
    before = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def undo_changes(roots: Iterable[Any], executed: ExecutedCode, writers: Iterable[WritesError]) -> Iterator[list[bool]]:
    """While open, what Python code changes is undone at the end; an entry says whether it kept traced tensors.

    ``writers``: what is known to write, which is mute meanwhile.

    Raises:
        CaptureError: a writer is nowhere where it can be replaced.
    """
    before, keeps_traced = Before(roots, executed), list[bool]()
    try:
        for writer in writers:
            if not before.mute(writer.sinks):
                raise CaptureError(
                    f"expected a forward that logs what it reads to Python's objects, found one that calls "
                    f"{writer.name}() at\n  {writer.line}\nA trace of it would write, too: have a method of an object "
                    f"that the forward finds in an attribute or a global write it, or write it after the step"
                )
        yield keeps_traced
    finally:
        keeps_traced.append(before.restore())
