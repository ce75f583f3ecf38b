"""Dataclasses of plain data as JSON, to be saved, compared between ranks, and read again."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


P = TypeVar("P", bound="DataclassInstance")

ONLY_IF_SET = {"only if set": True}
"""Metadata of fields that JSON has only where they are not at their defaults, of which most plans say nothing."""


def to_data(value: Any) -> Any:
    """A dataclass of plain data as JSON has it."""
    if is_dataclass(value):
        entries = ((entry, getattr(value, entry.name)) for entry in fields(value))
        return {entry.name: to_data(given) for entry, given in entries if not _is_left_out(entry, given)}
    if isinstance(value, Mapping):
        return {name: to_data(item) for name, item in value.items()}
    return [to_data(item) for item in value] if isinstance(value, tuple | list) else value


def _is_left_out(entry: Field[Any], given: Any) -> bool:
    default = entry.default if entry.default_factory is MISSING else entry.default_factory()
    return bool(entry.metadata == ONLY_IF_SET and given == default)


def from_data(kind: type[P], data: Any, where: str | None = None) -> P:
    """A dataclass of plain data from what JSON has for it; ``where``: what errors call it, else the type's name.

    Raises:
        TypeError, ValueError: a field is missing, there is another, or a value is not of its field's type.
    """
    hints, where = _hints(kind), where or kind.__name__
    if not isinstance(data, dict):
        raise TypeError(f"{where}: expected an object with the fields of {kind.__name__}, found {data!r:.80}")
    if unknown := sorted(data.keys() - hints.keys()):
        raise TypeError(f"{where}: unknown field {unknown[0]!r}; fields are {', '.join(hints)}")
    if missing := [entry.name for entry in fields(kind) if entry.name not in data and _is_needed(entry)]:
        raise TypeError(f"{where}: missing field {missing[0]!r}")
    return kind(**{name: parse_value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _is_needed(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def parse_value(expected: Any, value: Any, where: str) -> Any:
    """A value of type ``expected`` from what JSON has for it: lists for tuples, dicts for dataclasses."""
    origin, inner = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (expected,) = (option for option in inner if option is not NoneType)
        return parse_value(expected, value, where)
    if origin is tuple and isinstance(value, list):
        each = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(each) != len(value):
            raise ValueError(f"{where}: expected {len(each)} values, found {value!r:.80}")
        return tuple(parse_value(each[place], item, f"{where}[{place}]") for place, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: parse_value(inner[1], item, f"{where}.{name}") for name, item in value.items()}
    if origin is Literal:
        if value in inner:
            return value
        raise ValueError(f"{where}: expected one of {', '.join(map(repr, inner))}, found {value!r:.80}")
    if isinstance(expected, type) and is_dataclass(expected):
        return from_data(expected, value, where)
    if expected is Any:
        return value
    if value != value:  # no plan has it, and nothing can be drawn of it
        raise ValueError(f"{where}: expected a number, found NaN")
    if type(value) is expected or (expected is float and type(value) is int):
        return value
    raise TypeError(f"{where}: expected {getattr(expected, '__name__', expected)}, found {value!r:.80}")
