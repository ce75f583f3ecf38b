"""A process of its own for Triton's interpreter: it has to be switched on before Triton is imported, for good."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.lib.distributed import PATIENCE_SECONDS

Interpret = Callable[..., Any]


def _interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def interpret() -> Iterator[Interpret]:
    """``interpret(function, *args)`` is ``function(*args)``, of ``interpreted.py``, where Triton interprets kernels."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_interpreting) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(PATIENCE_SECONDS)
