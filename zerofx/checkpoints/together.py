"""Work on checkpoints that succeeds on all ranks, or fails on all of them with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from zerofx.errors import CheckpointError, ZeroFXError
from zerofx.runtime.comm.control import Control

T = TypeVar("T")


def run_on_all(control: Control, purpose: str, function: Callable[[], T]) -> T:
    """Call ``function()`` on every rank; if it fails on some, the error of the first of them is raised on all.

    Raises:
        CheckpointError: ``function`` raised it, or an ``OSError``.
    """

    def run() -> tuple[T | None, str | None]:
        try:
            return function(), None
        except (CheckpointError, OSError) as error:
            return None, cannot_be_done(purpose, error)

    done, failure = control.attempt(purpose, run)
    failures = control.gather(failure, purpose)
    failed = [rank for rank, text in enumerate(failures) if text is not None]
    if failed:
        where = f" (on rank {failed[0]} of {control.num_ranks})" if control.num_ranks > 1 else ""
        raise CheckpointError(f"{failures[failed[0]]}{where}")
    return cast(T, done)


def run_on_first(control: Control, purpose: str, function: Callable[[], T]) -> T:
    """The result of ``function()`` on rank 0, on all ranks.

    Raises:
        CheckpointError: ``function`` raised it on rank 0, or an ``OSError``; on all ranks.
    """

    def run() -> T:
        try:
            return function()
        except OSError as error:
            raise CheckpointError(cannot_be_done(purpose, error)) from error

    return control.share(purpose, run)


def cannot_be_done(purpose: str, error: OSError | ZeroFXError) -> str:
    """The message for an error: zerofx's own text, or advice for one of the system's."""
    if isinstance(error, ZeroFXError):
        return str(error)
    return (
        f"expected to {purpose}, found that it cannot be done ({error}): look at the space that is left, and at who "
        f"may write there"
    )
