"""What all tests of a run share: captured graphs, and how ranks share them, which is most of what small steps take.

A graph is read where the record of a model's forward is the same (``zerofx/capture/cache.py``), so that each model is
captured once in a run; how ranks share it is read where all that it follows from is the same
(``zerofx/driver/shardings.py``). Plans, steps and kernels are made anew in every test. With ``ZEROFX_VERIFY=2`` every
pass is checked, and no shared graph is compared with a capture: tests that share nothing do that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from zerofx.capture.traceable import Forward
    from zerofx.ir.graph import StepGraph

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
    from zerofx.capture.by_layer.by_layer import capture_by_layer
    from zerofx.disk.cache import DiskCache
    from zerofx.driver import captures, shardings

    def shared(given: Path | None) -> DiskCache:
        return DiskCache(given or Path(folder))

    def unchecked(forward: Forward, **options: Any) -> StepGraph:
        return capture_by_layer(forward, **{**options, "check": False})

    with (
        mock.patch.object(captures, "DiskCache", shared),
        mock.patch.object(shardings, "DiskCache", shared),
        mock.patch.object(captures, "capture_by_layer", unchecked),
    ):
        yield


def captured_graph(forward: Forward) -> StepGraph:
    """The graph of ``forward`` as it is captured, or read where captures are shared; to be edited as one likes."""
    from zerofx.capture.by_layer.by_layer import capture_by_layer
    from zerofx.disk.cache import DiskCache

    folder = os.environ.get(SWITCH)
    return capture_by_layer(forward, allowed=False, cache=DiskCache(Path(folder) if folder else None))


@contextlib.contextmanager
def own_captures() -> Iterator[None]:
    """While open, this process and those that it starts share nothing."""
    folder = os.environ.pop(SWITCH)
    try:
        yield
    finally:
        os.environ[SWITCH] = folder
