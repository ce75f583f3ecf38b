"""Listen, on a thread, for ranks that have failed or are gone, on behalf of ranks that wait where nothing tells them.

NCCL kernels wait forever for another rank. So each rank listens to the next one over gloo, for a word that is sent on
leaving. A rank that fails, or is gone, breaks that connection without the word. A rank that notices this breaks the
connection on which the rank before it listens, so that the news reaches all ranks within milliseconds for each.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_LEAVES = 2**31 - 2  # tag of the word; no other message of the group has one so large
_WITHOUT_END = timedelta(days=365)
_GRACE_SECONDS = 1.0  # for the rank before this one to take the word, and for the next one to send its own


class Watch:
    """Listens to the next rank of a gloo group, and calls ``hear`` on its thread if that rank breaks the connection.

    ``hear`` is a method, whose object may be collected meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup, hear: Callable[[], None]) -> None:
        self._group = group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.next_rank, self._rank_before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        self._thread = threading.Thread(
            target=_listen, args=(group, self.next_rank, weakref.WeakMethod(hear)), name="zerofx-watch", daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Announce that this rank leaves; the next one is not listened to for much longer."""
        with contextlib.suppress(RuntimeError):  # the rank before this one may be gone
            word = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._group.send([word], self._rank_before, _LEAVES).wait(timedelta(seconds=_GRACE_SECONDS))
        if self._thread is not threading.current_thread():
            self._thread.join(_GRACE_SECONDS)


def _listen(group: dist.ProcessGroup, rank: int, hear: weakref.WeakMethod[Callable[[], None]]) -> None:
    word = torch.empty(1, dtype=torch.uint8, device="cpu")
    try:
        group.recv([word], rank, _LEAVES).wait(_WITHOUT_END)
    except RuntimeError:
        call = hear()
        if call is not None:
            call()
