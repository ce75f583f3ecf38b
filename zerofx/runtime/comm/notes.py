"""Notes that ranks leave for one another in the process group's store: arrivals, the first failure, and outcomes.

The store answers where collectives do not: a rank asks it after waiting in vain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed as public

from zerofx.runtime.comm.heartbeat import call_with_timeout
from zerofx.torch_private.distributed import default_store

T = TypeVar("T")

_STORE_SECONDS = 5.0  # for an answer of the process group's store
_GRACE_SECONDS = 1.0  # for the others' notes, once waiting has failed here
_FAILED = "failed"  # key of the first failure of a rank


class Notes:
    """The notes of the ranks of one channel. Nothing is left or read before ``begin``."""

    def __init__(self, rank: int, num_ranks: int, rank_timeout_seconds: float) -> None:
        self._rank, self._num_ranks, self._rank_timeout_seconds = rank, num_ranks, rank_timeout_seconds
        self._store_answers = True
        self._default = default_store()
        self._store = PrefixStore("zerofx/not begun", self._default)
        # How many channels this rank has made before: the same number on all ranks that do the same.
        self._count = f"zerofx/channels/{rank}"

    def begin(self) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: a rank did not come, or the store has failed.
        """
        self._store = PrefixStore(f"zerofx/{self.ask(lambda: self._default.add(self._count, 1))}", self._default)
        keys = self._keys(0)
        self.ask(lambda: self._store.set(keys[self._rank], "waited"))
        self.ask(
            lambda: self._store.wait(keys, timedelta(seconds=self._rank_timeout_seconds)), self._rank_timeout_seconds
        )

    def withdraw(self) -> None:
        """Remove the notes of ``begin``, if it has failed."""
        with contextlib.suppress(RuntimeError):
            self.ask(lambda: self._store.delete_key(self._keys(0)[self._rank]))
            self.ask(lambda: self._default.add(self._count, -1))

    def absent_ranks(self, meeting: int) -> str:
        """The ranks that leave no note within a second of having come to the meeting of this number."""
        keys = self._keys(meeting)
        try:
            self.ask(lambda: self._store.set(keys[self._rank], "waited"))
            deadline = time.monotonic() + min(_GRACE_SECONDS, self._rank_timeout_seconds)
            while not self.ask(lambda: self._store.check(keys)) and time.monotonic() < deadline:
                time.sleep(0.05)
            absent = [str(rank) for rank, key in enumerate(keys) if not self._has(key)]
        except RuntimeError:
            if self._num_ranks == 2:
                return f"rank {1 - self._rank}"
            return "some, the one that holds the process group's store (mostly rank 0) among them,"
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else "some"

    def tell_failure(self, what: str) -> None:
        """Leave a note that this rank has failed, unless another rank has done so before."""
        with contextlib.suppress(RuntimeError):
            self.ask(lambda: self._store.compare_set(_FAILED, "", what))

    def failure(self) -> str:
        """The first failure that a rank has reported; empty if none has."""
        with contextlib.suppress(RuntimeError):
            if self._has(_FAILED):
                return self.ask(lambda: self._store.get(_FAILED)).decode()
        return ""

    def outcomes(self, name: str) -> Outcomes:
        """Outcomes of work that ranks do in threads of their own; ``name`` is unique for each piece of work."""
        return Outcomes(self._store, name, self._rank, self._num_ranks)

    def ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """Call ``call``, which asks the store: its methods hang if the process that holds the store is stopped.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        if not self._store_answers:
            raise RuntimeError("the process group's store does not answer")
        try:
            return call_with_timeout(call, seconds + _STORE_SECONDS)
        except TimeoutError as error:
            self._store_answers = False
            raise RuntimeError(f"the process group's store does not answer: {error}") from error

    def _has(self, key: str) -> bool:
        return self.ask(lambda: self._store.check([key]))

    def _keys(self, meeting: int) -> list[str]:
        return [f"{meeting}/{rank}" for rank in range(self._num_ranks)]


_FAILURE = "failed"


class Outcomes:
    """Outcomes of one piece of work that each rank does in a thread of its own, by rank.

    No collective runs in such a thread, and a rank that fails can say so even if its drive hangs.

    Raises:
        RuntimeError: from every method but ``forget``, where the store has failed.
    """

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store = PrefixStore(name, store)
        self._rank, self._keys = rank, [str(number) for number in range(num_ranks)]

    def tell(self, outcome: str) -> None:
        """Report that the work is done on this rank."""
        self._store.set(self._keys[self._rank], outcome)

    def fail(self, failure: str) -> None:
        """Report that the work has failed on this rank."""
        self._store.set(_FAILURE, failure)

    def has_failed(self) -> bool:
        """True if a rank has reported a failure."""
        return bool(self._store.check([_FAILURE]))

    def read_all(self) -> list[str] | None:
        """The outcomes of all ranks, in their order; None until all are there."""
        return [self._store.get(key).decode() for key in self._keys] if self._store.check(self._keys) else None

    def forget(self) -> None:
        """Remove all outcomes from the store, on one rank, once no other rank reads them."""
        with contextlib.suppress(RuntimeError):
            for key in (*self._keys, _FAILURE):
                self._store.delete_key(key)
