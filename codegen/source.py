"""Load an emitted file from its text."""

from __future__ import annotations

import linecache
from typing import Any

from zerofx.errors import PlanError


def load_source(source: str, filename: str) -> dict[str, Any]:
    """Execute an emitted file; tracebacks and debuggers show its lines under ``filename``.

    Raises:
        PlanError: the text does not run, or has no function ``step``.
    """
    namespace: dict[str, Any] = {"__name__": "zerofx_generated", "__file__": filename}
    try:
        exec(compile(source, filename, "exec"), namespace)
    except Exception as error:
        raise PlanError(f"expected an emitted step that Python can load, found {error!r} in {filename}") from error
    if not callable(namespace.get("step")):
        raise PlanError(f"expected a function step(runtime, state, batch) in {filename}, found none")
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return namespace
