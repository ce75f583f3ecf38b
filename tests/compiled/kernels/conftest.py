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
    triton = pytest.importorskip("triton")

    def run(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return pool.submit(function, *args).result(PATIENCE_SECONDS)
        except Exception as error:
            if triton.__version__.startswith("3.6.") and "only 0-dimensional arrays" in str(error):
                pytest.skip(
                    "the interpreter of Triton 3.6 counts no loops with numpy 2.5, which has arrays of one number"
                )
            raise

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_interpreting) as pool:
        yield run
