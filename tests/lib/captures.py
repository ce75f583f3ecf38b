"""Captured graphs that all tests of a run share: capturing is most of what a small step takes to make.

A graph is read where the record of a model's forward is the same (``zerofx/capture/cache.py``), so that each model is
captured once in a run. Plans, steps and kernels are made anew in every test.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# Names the folder, in the processes that a test starts, too.
SWITCH = "ZEROFX_TESTS_CAPTURES"


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """While open, what is captured is kept in the folder that ``SWITCH`` names, and read from there.

    zerofx is imported when this is called, since some processes may do so only after they have set what it reads.
    Without ``SWITCH``, and where ``ZEROFX_CACHE_DIR`` names a folder, nothing is changed.
    """
    folder = os.environ.get(SWITCH)
    if folder is None:
        yield
        return
    from zerofx.disk.cache import DiskCache
    from zerofx.driver import captures

    with mock.patch.object(captures, "DiskCache", lambda given: DiskCache(given or Path(folder))):
        yield
