"""Environment variables that zerofx reads, and the tracebacks that one of them has in full.

=====================  =========================================================================================
``ZEROFX_DEBUG``       0 nothing, 1 tracebacks of errors in full, how the model was captured, passes and peaks, 2
                       operators added and removed, and what the planner's stages tried, 3 the schedule, 4 the generated
                       source, 5 the graph after each pass; written to stderr by rank 0
``ZEROFX_DUMP_DIR``    folder for generated files (default: ``zerofx/dumps`` in the user's cache folder)
``ZEROFX_DISABLE``     comma-separated names of what to leave out: ``prefetch``, ``in_place`` (ranks of a host then copy
                       what they gather), ``channels`` (they then send through gloo on CPUs), ``simplify``, ``stamp``
                       (repeated layers are then captured one by one)
``ZEROFX_KERNELS``     ``auto`` (default), ``none``, or comma-separated names of zerofx's own kernels that a compiled
                       step is to use: ``update``, ``loss`` on CUDA, ``attention``,
                       ``products`` on a CPU (see ``docs/kernels.md``)
``ZEROFX_VERIFY``      0 no checks, 1 checks after the last pass (default), 2 after every pass, and of repeated layers
                       that were stamped out against a whole capture
``ZEROFX_NVME_DIR``    folder for what plans put on nvme, or several with ``:`` between them, over which it is striped;
                       each process makes one of its own in each (default: none)
``ZEROFX_TIMEOUT``     seconds that a rank is waited for, wherever ranks wait for one another (default 600); the timeout
                       of the process group where that is less. A rank that captures, plans or compiles says every few
                       seconds that it works, and is waited for as long as it does. Kernels of NCCL's have
                       the process group's timeout alone; a rank that fails or is gone ends the others within seconds
                       all the same
``ZEROFX_CACHE_DIR``   folder for what is kept for the next run, 0 or empty for none (default: ``zerofx`` in
                       ``TORCHINDUCTOR_CACHE_DIR``, or else in the user's cache folder)
=====================  =========================================================================================
"""

from __future__ import annotations

import contextlib
import os
import types
from dataclasses import dataclass
from pathlib import Path

from zerofx.errors import InternalError, UsageError, ZeroFXError


@dataclass(frozen=True)
class Settings:
    """The switches' values; see the table in the module's docstring.

    ``kernels``: None for those on by default. ``dump_dir``: None for the default.
    """

    debug: int
    dump_dir: Path | None
    disable: frozenset[str]
    verify: int
    timeout_seconds: float
    nvme_dirs: tuple[Path, ...] = ()
    kernels: frozenset[str] | None = None
    cache_dir: Path | None = None


def read_settings() -> Settings:
    """Read the environment.

    Raises:
        UsageError: a switch has a value that it cannot have.
    """
    return Settings(
        debug=_integer("ZEROFX_DEBUG", 0, 5),
        dump_dir=Path(dumps) if (dumps := os.environ.get("ZEROFX_DUMP_DIR")) else None,
        disable=frozenset(name for name in os.environ.get("ZEROFX_DISABLE", "").split(",") if name),
        verify=_integer("ZEROFX_VERIFY", 1, 2),
        timeout_seconds=float(_integer("ZEROFX_TIMEOUT", 600, 86_400)),
        nvme_dirs=tuple(Path(part) for part in os.environ.get("ZEROFX_NVME_DIR", "").split(os.pathsep) if part),
        kernels=_kernels(os.environ.get("ZEROFX_KERNELS", "auto")),
        cache_dir=_cache_dir(),
    )


def _kernels(text: str) -> frozenset[str] | None:
    if text == "auto":
        return None
    return frozenset() if text == "none" else frozenset(name for name in text.split(",") if name)


def _cache_dir() -> Path | None:
    given = os.environ.get("ZEROFX_CACHE_DIR")
    if given is not None:
        return Path(given) if given not in ("", "0") else None
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor:
        return Path(inductor) / "zerofx"
    return user_cache()


def user_cache() -> Path | None:
    """zerofx's part of the user's cache folder; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path("~/.cache").expanduser()) / "zerofx"
    except RuntimeError:
        return None


def _integer(name: str, default: int, largest: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit() or int(text) > largest:
        raise UsageError(f"expected {name} to be a whole number from 0 to {largest}, found {text!r}")
    return int(text)


class ShortTraceback(contextlib.ContextDecorator):
    """Wraps a public function: errors that zerofx raises on purpose leave it with the lines of others alone.

    Their messages say what to do; the way through zerofx to where they begin is for ``ZEROFX_DEBUG=1``.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, ZeroFXError) or isinstance(error, InternalError) or read_settings().debug:
            return
        error.__traceback__ = _lines_of_others(error.__traceback__)
        cause = _cause_of(error)
        while isinstance(cause, ZeroFXError):  # whose reason the error has taken over
            cause = _cause_of(cause)
        if cause is not None:
            cause.__traceback__ = _lines_of_others(cause.__traceback__) or cause.__traceback__
            cause.__context__ = None if isinstance(cause.__context__, ZeroFXError) else cause.__context__
        error.__cause__ = cause  # and no context


def _cause_of(error: BaseException) -> BaseException | None:
    return error.__cause__ if error.__suppress_context__ else error.__context__


def _lines_of_others(trace: types.TracebackType | None) -> types.TracebackType | None:
    lines: list[types.TracebackType] = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("zerofx", "torch", "contextlib"):
            lines.append(trace)
        trace = trace.tb_next
    for line in reversed(lines):
        trace = types.TracebackType(trace, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return trace
