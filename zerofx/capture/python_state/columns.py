"""Compare values in Python's containers with earlier ones in one pass, with no line of Python for each."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import compress, repeat
from types import CellType, MappingProxyType
from typing import Any

import numpy as np

from zerofx.torch_private.modules import version_of_dict

MISSING = object()


@dataclass(frozen=True)
class Column:
    """The earlier ``values`` under ``keys`` of ``containers``, and ``read``, which iterates over the current ones.

    ``is_alike`` compares a current value with an earlier one, in the same way for all entries of a column.
    """

    read: Callable[[Sequence[Any], Sequence[Any]], Iterator[Any]]
    containers: Sequence[Any]
    keys: Sequence[Any]
    values: list[Any]
    is_alike: Callable[[Any, Any], bool] = operator.is_

    def differences(self) -> Sequence[tuple[int, Any]]:
        """The positions of values that have changed, each with its current value."""
        if all(map(self.is_alike, self.read(self.containers, self.keys), self.values)):
            return ()
        now = list(self.read(self.containers, self.keys))
        differs = map(operator.not_, map(self.is_alike, now, self.values))
        return list(compress(enumerate(now), differs))


class Tables:
    """Dictionaries that nobody has written to, seen by their versions, which each write makes larger."""

    def __init__(self, tables: Iterable[dict[Any, Any]]) -> None:
        distinct = {id(table): table for table in tables}
        # By address: each page of memory is met once.
        self._put([distinct[address] for address in sorted(distinct)])

    def _put(self, tables: list[dict[Any, Any]]) -> None:
        self._all = tables
        self._empty = [table for table in tables if not table]
        self._filled = list(filter(None, tables))
        self._versions = list(map(version_of_dict, self._filled))
        self._sum = sum(self._versions)

    def take_written(self) -> list[dict[Any, Any]]:
        """Take those out that were written to; as versions only grow, none was if their sum is the same."""
        load(self._all)
        if not any(self._empty) and sum(map(version_of_dict, self._filled)) == self._sum:
            return []
        differs = map(operator.ne, map(version_of_dict, self._filled), self._versions)
        written = [*filter(None, self._empty), *compress(self._filled, differs)]
        addresses = set(map(id, written))
        self._put([table for table in self._all if id(table) not in addresses])
        return written


def load(objects: Sequence[Any]) -> None:
    """Bring objects into the processor's caches, side by side: a step drives them out, and whoever looks into one after
    the other waits for each."""
    deque(objects, 0)


def items_of_dicts(tables: Sequence[dict[Any, Any]], keys: Sequence[Any]) -> Iterator[Any]:
    """The items of dictionaries under ``keys``, one of each; ``MISSING`` where there is none."""
    return map(dict.get, tables, keys, repeat(MISSING))


def items_of_classes(classes: Sequence[type], keys: Sequence[str]) -> Iterator[Any]:
    """The attributes of classes themselves under ``keys``, like ``items_of_dicts``."""
    return map(MappingProxyType.get, map(vars, classes), keys, repeat(MISSING))


def value_at(container: Any, key: Any) -> Any:
    """The value under ``key`` of a container; ``MISSING`` where there is none."""
    try:
        if isinstance(container, dict):
            return dict.get(container, key, MISSING)
        if isinstance(container, CellType):
            return container.cell_contents
        if isinstance(container, type):
            return container.__dict__.get(key, MISSING)
        if isinstance(container, np.ndarray):
            return container.tobytes()
        if isinstance(container, (set, frozenset)):
            return frozenset(container)
        if isinstance(container, ContextVar):
            return container.get(MISSING)
        if container is os.environ:
            return os.environ.get(key, MISSING)
        return container[key] if isinstance(container, (Mapping, list, tuple, deque)) else getattr(container, key)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        return MISSING
