"""Places in which Python has values: what is read of one is what stands there, and a value can be put there."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from zerofx.capture.python_state.columns import value_at
from zerofx.capture.python_state.reads import put


class _Slotted:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1.5


class _OfClass:
    x = 1.5


def _cell() -> Any:
    x = 1.5

    def read() -> float:
        return x

    return (read.__closure__ or ())[0]


def _variable() -> ContextVar[float]:
    variable = ContextVar[float]("x")
    variable.set(1.5)
    return variable


PLACES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "dictionary": lambda: ({"x": 1.5}, "x"),
    "dictionary in order": lambda: (OrderedDict(x=1.5), "x"),
    "mapping": lambda: (UserDict(x=1.5), "x"),
    "list": lambda: ([0.0, 1.5], 1),
    "deque": lambda: (deque([0.0, 1.5]), 1),
    "object": lambda: (SimpleNamespace(x=1.5), "x"),
    "slot": lambda: (_Slotted(), "x"),
    "class": lambda: (type("Own", (_OfClass,), {"x": 1.5}), "x"),
    "cell": lambda: (_cell(), None),
    "context variable": lambda: (_variable(), None),
}


@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES.keys())
def test_a_value_is_read_and_replaced_where_it_stands(make: Callable[[], tuple[Any, Any]]) -> None:
    container, key = make()
    assert value_at(container, key) == 1.5
    assert put(container, key, 2.5)
    assert value_at(container, key) == 2.5


def test_nothing_is_put_in_a_tuple() -> None:
    held = (0.0, 1.5)
    assert value_at(held, 1) == 1.5
    assert not put(held, 1, 2.5)
