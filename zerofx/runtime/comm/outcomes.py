"""Outcomes of work that each rank does in a thread of its own, exchanged over the process group's store.

Gloo's collectives are for the thread that runs steps. The store may be asked from any thread, and a rank that fails can
say so even if its drive hangs.
"""

from __future__ import annotations

import contextlib

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, but not listed as public

_FAILED = "failed"


class Outcomes:
    """Outcomes of one piece of work, by rank.

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
        self._store.set(_FAILED, failure)

    def has_failed(self) -> bool:
        """True if a rank has reported a failure."""
        return bool(self._store.check([_FAILED]))

    def read_all(self) -> list[str] | None:
        """The outcomes of all ranks, in their order; None until all are there."""
        return [self._store.get(key).decode() for key in self._keys] if self._store.check(self._keys) else None

    def forget(self) -> None:
        """Remove all outcomes from the store, on one rank, once no other rank reads them."""
        with contextlib.suppress(RuntimeError):
            for key in (*self._keys, _FAILED):
                self._store.delete_key(key)
