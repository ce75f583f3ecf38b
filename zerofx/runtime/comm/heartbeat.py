"""Heartbeats and timeouts: how long ranks wait for one another.

A working rank sends a heartbeat every few seconds: a capture, a plan or compiling regions may take minutes. Peers wait
while heartbeats arrive, and time out when they stop, as they do if the rank is stopped or hangs in a file system.
Heartbeats go to rank 0, and from it to all others, over the ranks' gloo group, whose timeout is the limit for each.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from zerofx.torch_private.distributed import group_timeout

T = TypeVar("T")

WAYS_TO_WAIT = (
    "raise ZEROFX_TIMEOUT, and the timeout of the process group if that is less, for ranks that are only slow"
)

_HEARTBEATS_PER_TIMEOUT = 4  # so that a late one is not taken for none
_MOST_SECONDS = 15.0  # between two heartbeats
_BUSY = 1e-3  # of a core: less is what a process takes that waits
_FIRST_TAG = 1 << 20  # of heartbeats: no other message of the group has one so large
_DONE, _AT_WORK = 1, 0


class SilentRankError(Exception):
    """A rank has sent no heartbeat for too long, or is gone; ``rank`` if it is known."""

    def __init__(self, rank: int | None) -> None:
        super().__init__(f"rank {rank} says no more that it works" if rank is not None else "a rank is gone")
        self.rank = rank


def rank_timeout_seconds(group: dist.ProcessGroup | None, timeout_seconds: float) -> float:
    """The time a rank is waited for: ``timeout_seconds``, or the timeout of the user's group if that is less."""
    theirs = group_timeout(group) if group is not None else None
    return min(timeout_seconds, theirs.total_seconds()) if theirs is not None else timeout_seconds


def call_with_timeout(call: Callable[[], T], seconds: float) -> T:
    """Run ``call()`` on a thread of its own: some calls of torch's wait forever, and ignore interrupts.

    Raises:
        TimeoutError: it has not returned within ``seconds``; the thread is left waiting.
    """
    outcome: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.put((None, error))

    threading.Thread(target=run, name="zerofx-wait", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there where there is no error


class Heartbeat:
    """The time that a thread may still be waited for: ``limit_seconds`` from its last ``beat``."""

    def __init__(self, limit_seconds: float = math.inf) -> None:
        self.limit_seconds = limit_seconds
        self.beat()

    def beat(self) -> None:
        """Record that the thread makes progress."""
        self._last = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """The time until the thread counts as hanging; 0 from then on."""
        return max(0.0, self._last + self.limit_seconds - time.monotonic())


def wait_for(work: dist.Work, seconds: float) -> None:
    """Wait for a gloo collective, in pieces, so that interrupts are handled meanwhile.

    Raises:
        RuntimeError: it failed, or is not done within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            work.wait(timedelta(seconds=max(1e-3, min(1.0, deadline - time.monotonic()))))
        except RuntimeError:
            if not work.is_completed():
                if time.monotonic() >= deadline:
                    raise
                continue
            work.wait()  # its own error, or none if it was done just now
        return


class JointWork:
    """One piece of work that all ranks of a gloo group do, or wait for the others to do."""

    def __init__(self, group: dist.ProcessGroup, number: int, rank_timeout_seconds: float) -> None:
        """Prepare the work ``number``, which is unique for each piece of work and the same on all ranks."""
        self._group, self._tag, self._rank_timeout_seconds = group, _FIRST_TAG + number, rank_timeout_seconds
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._listeners = list(range(1, self._num_ranks)) if self._rank == 0 else [0]
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._done_here = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="zerofx-work", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def finish(self) -> None:
        """Report that the work is done here, and wait until it is done on all ranks.

        Raises:
            SilentRankError: a rank has sent no heartbeat for too long, or is gone.
        """
        self._done_here = True
        if self._rank == 0:
            for peer in self._listeners:
                self._hear(peer)
        self.__exit__()  # no heartbeat comes after the last word
        try:
            self._send(_DONE)
        except RuntimeError as error:
            raise SilentRankError(self._listeners[0] if len(self._listeners) == 1 else None) from error
        if self._rank != 0:
            self._hear(0)

    def _hear(self, peer: int) -> None:
        word = torch.tensor([_AT_WORK], device="cpu")

        def receive() -> None:
            dist.recv(word, group=self._group, group_src=peer, tag=self._tag)

        while int(word) != _DONE:
            try:
                call_with_timeout(receive, self._rank_timeout_seconds + 1.0)
            except (RuntimeError, TimeoutError) as error:
                raise SilentRankError(peer) from error

    def _send(self, what: int) -> None:
        for peer in self._listeners:
            word = torch.tensor([what], device="cpu")
            self._sent.append((dist.isend(word, group=self._group, group_dst=peer, tag=self._tag), word))

    def _beat(self) -> None:
        interval = min(_MOST_SECONDS, self._rank_timeout_seconds / _HEARTBEATS_PER_TIMEOUT)
        before = _busy_seconds()
        while not self._ended.wait(interval):
            now = _busy_seconds()
            # Rank 0 passes on that some rank works: it says so while it waits, too.
            if now - before > _BUSY * interval or self._done_here:
                with contextlib.suppress(RuntimeError):  # a lost rank is found by those that wait for it
                    self._send(_AT_WORK)
            before = now


def _busy_seconds() -> float:
    """Processor time of this process and its children, in seconds."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in tasks.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


_LEAVES = 2**31 - 2  # tag of the word; no other message of the group has one so large
_WITHOUT_END = timedelta(days=365)
_GRACE_SECONDS = 1.0  # for the rank before this one to take the word, and for the next one to send its own


class Watch:
    """Listens to the next rank of a gloo group, and calls ``hear`` on its thread if that rank breaks the connection.

    NCCL kernels wait forever for another rank. So each rank listens to the next one over gloo, for a word that is sent
    on leaving. A rank that fails, or is gone, breaks that connection without the word. A rank that notices this breaks
    the connection on which the rank before it listens, so that all ranks hear of it within milliseconds for each.

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
