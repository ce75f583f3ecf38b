"""Python's garbage collector, while a step is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FEW = 10_000  # Python 3.12 begins with some hundred of its own objects frozen
_SELDOM = 50_000  # objects that are made until the youngest are gone through: those of a graph of a thousand nodes


@contextmanager
def limit_garbage_collection() -> Iterator[None]:
    """While open, what was there before is not gone through, and what is made seldom.

    Building a step makes so many objects that the collector goes through all of them several times. Those of torch and
    of the libraries around it are a million, none of them garbage; those of a graph are garbage all at once, after
    thousands have been made. Where the caller has frozen objects already, these stay frozen, and no others are.
    """
    thresholds = gc.get_threshold()
    with freeze_objects():
        if gc.isenabled() and thresholds[0]:
            gc.set_threshold(max(thresholds[0], _SELDOM), *thresholds[1:])
        try:
            yield
        finally:
            gc.set_threshold(*thresholds)


@contextmanager
def freeze_objects() -> Iterator[None]:
    """While open, what was there before is not gone through; where the caller has frozen objects, nothing changes."""
    freezes = not _has_frozen()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def all_objects() -> list[Any]:
    """The objects that the collector knows, frozen ones among them: where there are any, all are frozen after it."""
    is_frozen = _has_frozen()
    gc.unfreeze()  # what is frozen is not listed
    objects = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return objects


def _has_frozen() -> bool:
    return gc.get_freeze_count() >= _FEW
