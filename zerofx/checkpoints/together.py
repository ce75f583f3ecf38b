"""Work on checkpoints that succeeds on all ranks, or fails on all of them with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from zerofx.errors import CheckpointError, ZeroFXError
from zerofx.runtime.comm.control import Control

T = TypeVar("T")


def on_all(control: Control, purpose: str, function: Callable[[], T]) -> T:
    """``function()`` on every rank; where it fails on some, the error of the first of them is raised on all.

    Raises:
        CheckpointError: what ``function`` raised, which was that or an ``OSError``.
    """

    def guarded() -> tuple[T | None, str | None]:
        try:
            return function(), None
        except (CheckpointError, OSError) as error:
            return None, cannot_be_done(purpose, error)

    done, failure = control.attempt(purpose, guarded)
    failures = control.gather(failure, purpose)
    failed = [rank for rank, text in enumerate(failures) if text is not None]
    if failed:
        where = f" (on rank {failed[0]} of {control.num_ranks})" if control.num_ranks > 1 else ""
        raise CheckpointError(f"{failures[failed[0]]}{where}")
    return cast(T, done)


def on_first(control: Control, purpose: str, function: Callable[[], T]) -> T:
    """What ``function()`` gives on rank 0, on all ranks.

    Raises:
        CheckpointError: what it raised there, which was that or an ``OSError``, on all ranks.
    """

    def guarded() -> T:
        try:
            return function()
        except OSError as error:
            raise CheckpointError(cannot_be_done(purpose, error)) from error

    return control.share(purpose, guarded)


def cannot_be_done(purpose: str, error: OSError | ZeroFXError) -> str:
    """What to say of an error: what zerofx says itself, or of one of the system's what to look at."""
    if isinstance(error, ZeroFXError):
        return str(error)
    return (
        f"expected to {purpose}, found that it cannot be done ({error}): look at the space that is left, and at who "
        f"may write there"
    )
