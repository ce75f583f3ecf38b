"""Python's garbage collector, while a step is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_recent_garbage_only() -> Iterator[None]:
    """While open, what was there before is not gone through.

    Building a step makes so many objects that the collector goes through all of them several times. Those of torch and
    of the libraries around it are a million, none of them garbage. Where the caller has frozen objects already, they
    stay, and nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
