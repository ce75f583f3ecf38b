"""Python state that a captured step depends on, compared with the current state.

Each value that code of the forward may have read is an entry: a container (the dictionary of an object, a module's
globals, a list, a closure's cell) and a key. Of a dictionary the version is compared, and once it was written to its
entries, as those of others are: by identity, a column at a time. Only where one differs is its value looked at, and
only if that is an object or a container is the state walked through again.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import compress
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from zerofx.capture.python_state.columns import (
    MISSING,
    Column,
    Tables,
    items_of_classes,
    items_of_dicts,
    load,
    value_at,
)
from zerofx.capture.python_state.numbers import Number, Tape, is_number
from zerofx.torch_private.modules import number_of_next_hook

_NUMBERS = (numbers.Number, np.generic, range, slice)
_TEXTS = (str, bytes, frozenset, Enum, CodeType, type(None))
PLAIN = (*_NUMBERS, *_TEXTS, torch.dtype, torch.device, torch.Size)
"""Values that are compared as values."""


OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
"""Attributes of a function that say what it does, besides its closure."""


def is_plain(value: Any) -> bool:
    """True if a value is compared as a value, and leads to nothing else."""
    return isinstance(value, PLAIN)


def put(container: Any, key: Any, value: Any) -> bool:
    """Put a value under ``key`` of a container; False if that is impossible."""
    if isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif isinstance(container, CellType):
        container.cell_contents = value
    elif isinstance(container, type):
        type.__setattr__(container, key, value)
    elif isinstance(container, ContextVar):
        container.set(value)
    elif isinstance(container, (list, deque, MutableMapping)):
        container[key] = value
    elif isinstance(key, str) and not isinstance(container, (tuple, FunctionType, np.ndarray)):
        object.__setattr__(container, key, value)
    else:
        return False
    return True


@dataclass
class State:
    """Python state at one moment: ``facts`` by path, and where each of them was read.

    ``sized`` are containers whose number of items was read, with that number; ``objects`` those whose class was;
    ``hooks`` are tables of hooks, each with its keys; ``iterators`` are paths of iterators that code advances.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    sized: list[Sized] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    hooks: list[tuple[dict[int, Any], tuple[int, ...]]] = field(default_factory=list)
    iterators: list[str] = field(default_factory=list)

    def add(self, path: str, container: Any, key: Any, value: Any) -> None:
        """Note that ``value`` was read under ``key`` of ``container``."""
        self.paths.append(path)
        self.containers.append(container)
        self.keys.append(key)
        self.values.append(value)


def is_varying(value: Any) -> bool:
    """True if a value may be an input of a graph."""
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, (bool, Enum))


class Numbers:
    """The numbers that steps have as inputs, by path; ``note`` adds one that has changed a second time."""

    def __init__(self) -> None:
        self.paths: dict[str, None] = {}
        self._num_changes: Counter[str] = Counter()
        self._places: dict[str, tuple[Any, Any]] = {}
        self._stood_for: dict[str, Any] = {}
        self._fixed: set[str] = set()  # in whose places nothing can be put

    def note(self, changes: Sequence[Change]) -> None:
        """Learn from the changes for which a capture is made again."""
        for change in changes:
            if is_varying(change.now) and change.path not in self._fixed:
                self._num_changes[change.path] += 1
                if self._num_changes[change.path] > 1:
                    self.paths[change.path] = None

    def is_fixed(self, path: str) -> bool:
        """True if no stand-in can replace a number, as in a tuple."""
        return path in self._fixed

    def find(self, state: State) -> None:
        """Find the places where the numbers are now."""
        if self.paths:
            for path, container, key in zip(state.paths, state.containers, state.keys, strict=True):
                if path in self.paths:
                    self._places[path] = container, key

    def value(self, path: str) -> Any:
        """The current value of a number, or its value before a stand-in replaced it."""
        value = value_at(*self._places[path]) if path in self._places else MISSING
        return self._stood_for.get(path, MISSING) if is_number(value) else value

    @contextlib.contextmanager
    def substitute(self, tape: Tape) -> Iterator[None]:
        """While open, stand-ins of ``tape`` replace the numbers."""
        stood_for: dict[str, Any] = {}
        for path in list(self.paths):
            value = self.value(path)
            if is_varying(value):
                self._stood_for[path] = value
                if put(*self._places[path], Number(tape, path, partial(self.value, path))):
                    stood_for[path] = value
                    continue
                self._fixed.add(path)
            del self.paths[path]
        try:
            yield
        finally:
            for path, value in stood_for.items():
                put(*self._places[path], value)
            self._stood_for.clear()
            tape.is_open = False


@dataclass(frozen=True)
class Change:
    """A value that has changed since a step was captured; ``is_settled``: an input cannot replace it."""

    path: str
    before: Any
    now: Any
    is_settled: bool = False

    def __str__(self) -> str:
        before, now = _fact_text(self.before), _fact_text(self.now)
        return f"{self.path} from one {now} to another" if before == now else f"{self.path} from {before} to {now}"


class Reads:
    """The Python state that one captured step depends on.

    Args:
        walk: gives the current state.
        numbers: told of each walk, to find the numbers that steps have as inputs.
        tape: how the step uses such numbers.
        unread: paths of values that the forward changes, and that change nothing.
        own: the same of values that its logs change, which ``learn_own`` finds, shared by all steps of a model.
    """

    def __init__(
        self,
        walk: Callable[[], State],
        numbers: Numbers,
        tape: Tape,
        unread: frozenset[str] = frozenset(),
        own: set[str] | None = None,
    ) -> None:
        self._own = set() if own is None else own
        self._walk, self._numbers, self._tape = walk, numbers, tape
        self._varying, self._unread = frozenset(numbers.paths), unread
        self._adopt(walk())

    def _adopt(self, state: State) -> None:
        self._state, self._next_hook = state, number_of_next_hook()
        self._numbers.find(state)
        self._kinds = {path: type(self._numbers.value(path)) for path in self._varying}
        self._classes = list(map(type, state.objects))
        self._tables = Tables(each for each in (*state.containers, *state.sized) if isinstance(each, dict))
        self._written: set[int] = set()
        self._compare()

    def _compare(self) -> None:
        """Compare the values and sizes of all containers but dictionaries that were not written to."""
        state, excluded = self._state, self._varying | self._unread | self._own
        is_compared = [not isinstance(c, dict) or id(c) in self._written for c in (*state.containers, *state.sized)]
        indices = [i for i, path in enumerate(state.paths) if is_compared[i] and path not in excluded]
        self._columns = list(_columns(state, indices))
        own = is_compared[len(state.containers) :]
        self._sized, self._sizes = list(compress(state.sized, own)), list(compress(state.sizes, own))

    def changes(self) -> list[Change]:
        """The values that have changed since the step was captured."""
        return self._differences() or self._violations()

    @contextlib.contextmanager
    def restore_captured(self) -> Iterator[bool]:
        """While open, changed plain values have their captured values; gives whether that undoes all changes."""
        state, changes = self._state, self._differences()
        plain = {change.path: change.now for change in changes if is_plain(change.now) and is_plain(change.before)}
        places = {
            path: (container, key, value)
            for path, container, key, value in zip(state.paths, state.containers, state.keys, state.values, strict=True)
            # A container that another has replaced is no place to put a value.
            if path in plain and _equal(value_at(container, key), plain[path])
        }
        now = [(container, key, value_at(container, key)) for container, key, _ in places.values()]
        is_whole = len(places) == len(changes) and all(put(*place) for place in places.values())
        try:
            yield is_whole
        finally:
            for place in now:
                put(*place)

    @contextlib.contextmanager
    def learn_own(self) -> Iterator[None]:
        """Learn that what changes while open is changed by the forward itself, and decides nothing of its step."""
        before = self._state.facts if self._plain_differences() == [] else self._walk().facts
        yield
        if self._plain_differences() == []:
            return
        now = self._walk()
        self._own.update(path for path in _find_changed_paths(before, now.facts) if path not in self._varying)
        self._adopt(now)

    def _is_own(self, path: str, *facts: Mapping[str, Any]) -> bool:
        """True if the forward changes the value itself, or adds and removes such items of its container."""
        if path in self._own:
            return True
        container = path
        while not all(path in of_state for of_state in facts) and "[" in container:
            container = container.rpartition("[")[0]
            if f"{container} (items)" in self._own:
                return True
        return False

    def accept(self) -> None:
        """Take the current state for the one that the step was captured in."""
        self._adopt(self._walk())

    def values_text(self, paths: Sequence[str]) -> str:
        """A line for each of ``paths``, which a change may have, with its current value."""
        numbers = {assumed.number.text: assumed.number.current for assumed in self._tape.assumptions.values()}
        numbers |= {path: partial(self._numbers.value, path) for path in self._varying}
        facts = self._walk().facts
        values = {path: numbers[path]() if path in numbers else facts.get(path, MISSING) for path in paths}
        return "\n".join(f"{path}: {_fact_text(value)}" for path, value in values.items())

    def put_back(self) -> list[str]:
        """Restore the values that were read, where they are plain; returns the paths of all changed values, and of
        iterators, which cannot be compared."""
        changes, state = {change.path for change in self._differences()}, self._state
        for path, container, key, value in zip(state.paths, state.containers, state.keys, state.values, strict=True):
            if path in changes and is_plain(value):
                put(container, key, value)
        return [*sorted(changes), *state.iterators]

    def _violations(self) -> list[Change]:
        """The assumptions about numbers as inputs that no longer hold."""
        kinds = [
            Change(path, kind, type(now))
            for path, kind in self._kinds.items()
            if type(now := self._numbers.value(path)) is not kind
        ]
        return kinds or [
            Change(assumed.number.text, assumed.value, assumed.number.current(), is_settled=assumed.is_number)
            for assumed in self._tape.assumptions.values()
            if not assumed.holds()
        ]

    def _differences(self) -> list[Change]:
        plain = self._plain_differences()
        return self._changes_by_walk() if plain is None else plain

    def _plain_differences(self) -> list[Change] | None:
        """Plain values that have changed where they were read; None if something else may have changed, too."""
        state = self._state
        if written := self._tables.take_written():
            self._written.update(map(id, written))
            self._compare()
        load(state.objects)
        if (
            self._has_other_hooks()
            or not all(map(operator.eq, map(len, self._sized), self._sizes))
            or not all(map(operator.is_, map(type, state.objects), self._classes))
        ):
            return None
        changes = []
        for indices, column in self._columns:
            for position, value in column.differences():
                before = column.values[position]
                if not (is_plain(value) and is_plain(before)):
                    return None
                if _equal(value, before):
                    column.values[position] = value
                else:
                    changes.append(Change(state.paths[indices[position]], before, value))
        return changes

    def _has_other_hooks(self) -> bool:
        """True if a hook was added to a module; tensors have hooks of torch's own, and of other programs."""
        if (next_hook := number_of_next_hook()) == self._next_hook:
            return False
        if any(tuple(table) != keys for table, keys in self._state.hooks):
            return True
        self._next_hook = next_hook
        return False

    def _changes_by_walk(self) -> list[Change]:
        """The changes between the state that was read and a walk through the current one."""
        now, before, excluded = self._walk(), self._state.facts, self._varying | self._unread
        changed = [
            Change(path, before.get(path, MISSING), now.facts.get(path, MISSING))
            for path in _find_changed_paths(before, now.facts)
            if path not in excluded and not self._is_own(path, before, now.facts)
        ]
        if not changed:
            self._adopt(now)
        return changed


_READERS: Mapping[type, Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]] = {
    dict: items_of_dicts,
    type: items_of_classes,
    list: partial(map, operator.getitem),
    FunctionType: partial(map, getattr),
    object: partial(map, value_at),
}


def _columns(state: State, compared: Sequence[int]) -> Iterator[tuple[list[int], Column]]:
    """The entries of a state at the indices ``compared``, as columns, each with its own indices."""
    indices: dict[type, list[int]] = {kind: [] for kind in _READERS}
    for index in compared:
        if not isinstance(container := state.containers[index], tuple):  # which do not change
            indices[next(kind for kind in indices if isinstance(container, kind))].append(index)
    for kind, own in indices.items():
        containers, keys, values = ([part[i] for i in own] for part in (state.containers, state.keys, state.values))
        # Arrays and sets are read as copies of what is in them.
        yield own, Column(_READERS[kind], containers, keys, values, _is_alike if kind is object else operator.is_)


def _is_alike(first: Any, other: Any) -> bool:
    return first is other or (is_plain(first) and _equal(first, other))


def _find_changed_paths(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The paths of facts that differ, or that one of two states alone has."""
    paths = dict.fromkeys((*before, *now))
    return [path for path in paths if not _equal(before.get(path, MISSING), now.get(path, MISSING))]


def _equal(first: Any, other: Any) -> bool:
    return first is other or (type(first) is type(other) and bool(first == other))


def _fact_text(fact: Any) -> str:
    """The text of a fact: of an object its class, of a function its name."""
    if fact is MISSING:
        return "nothing"
    if isinstance(fact, CodeType):
        return f"{fact.co_qualname} (line {fact.co_firstlineno})"
    if isinstance(fact, type):
        return fact.__qualname__
    text = f"({', '.join(map(_fact_text, fact))})" if type(fact) is tuple else repr(fact)
    return text if len(text) <= 60 else f"{text[:57]}..."
