"""Notes that ranks leave for one another in the process group's store: who has come, and who has failed first.

The store answers where collectives do not: it is asked once a rank has waited in vain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, but not listed as public

from zerofx.runtime.comm.outcomes import Outcomes
from zerofx.runtime.comm.patience import in_time
from zerofx.torch_private.distributed import default_store

T = TypeVar("T")

_STORE_SECONDS = 5.0  # for an answer of the process group's store
_GRACE_SECONDS = 1.0  # for the others' notes, once waiting has failed here
_FAILED = "failed"  # key of the first failure of a rank


class Notes:
    """What the ranks of one channel leave for one another. Nothing is left or read before ``begin``."""

    def __init__(self, rank: int, num_ranks: int, patience_seconds: float) -> None:
        self._rank, self._num_ranks, self._patience_seconds = rank, num_ranks, patience_seconds
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
        self.ask(lambda: self._store.wait(keys, timedelta(seconds=self._patience_seconds)), self._patience_seconds)

    def withdraw(self) -> None:
        """Undo what ``begin`` has left, where it has failed."""
        with contextlib.suppress(RuntimeError):
            self.ask(lambda: self._store.delete_key(self._keys(0)[self._rank]))
            self.ask(lambda: self._default.add(self._count, -1))

    def missing(self, meeting: int) -> str:
        """The ranks that leave no note, within a second, that they have come to the meeting of this number."""
        keys = self._keys(meeting)
        try:
            self.ask(lambda: self._store.set(keys[self._rank], "waited"))
            deadline = time.monotonic() + min(_GRACE_SECONDS, self._patience_seconds)
            while not self.ask(lambda: self._store.check(keys)) and time.monotonic() < deadline:
                time.sleep(0.05)
            absent = [str(rank) for rank, key in enumerate(keys) if not self._has(key)]
        except RuntimeError:
            if self._num_ranks == 2:
                return f"rank {1 - self._rank}"
            return "some, the one that holds the process group's store (mostly rank 0) among them,"
        return f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else "some"

    def tell_failure(self, what: str) -> None:
        """Leave a note that this rank has failed, unless another has before it."""
        with contextlib.suppress(RuntimeError):
            self.ask(lambda: self._store.compare_set(_FAILED, "", what))

    def failure(self) -> str:
        """The first failure that a rank has told of; empty where none has."""
        with contextlib.suppress(RuntimeError):
            if self._has(_FAILED):
                return self.ask(lambda: self._store.get(_FAILED)).decode()
        return ""

    def outcomes(self, name: str) -> Outcomes:
        """Outcomes of work that ranks do in threads of their own; ``name`` is another for each piece of work."""
        return Outcomes(self._store, name, self._rank, self._num_ranks)

    def ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        """``call``, which asks the store; its methods wait without end where the process that holds it is stopped.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        if not self._store_answers:
            raise RuntimeError("the process group's store does not answer")
        try:
            return in_time(call, seconds + _STORE_SECONDS)
        except TimeoutError as error:
            self._store_answers = False
            raise RuntimeError(f"the process group's store does not answer: {error}") from error

    def _has(self, key: str) -> bool:
        return self.ask(lambda: self._store.check([key]))

    def _keys(self, meeting: int) -> list[str]:
        return [f"{meeting}/{rank}" for rank in range(self._num_ranks)]
