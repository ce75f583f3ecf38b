"""Timeouts: how long ranks wait for one another, and the sign of life that a rank at work gives.

A rank may have minutes of work that the others wait for: a capture, a plan, regions to compile. It says every few
seconds that it works, and is waited for as long as it does: one that is stopped, or hangs in a file system, says so no
more.
Words go to rank 0, and from it to all others, over the ranks' gloo group, whose timeout is how long a word may take.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
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

_WORDS_PER_PATIENCE = 4  # so that a late one is not taken for none
_MOST_SECONDS = 15.0  # between two words
_BUSY = 1e-3  # of a core: less is what a process takes that waits
_FIRST_TAG = 1 << 20  # of the words: no other message of the group has one so large
_DONE, _AT_WORK = 1, 0


class SilentRankError(Exception):
    """A rank has not said for too long that it works, or is gone; ``rank`` where it is known which."""

    def __init__(self, rank: int | None) -> None:
        super().__init__(f"rank {rank} says no more that it works" if rank is not None else "a rank is gone")
        self.rank = rank


def patience_seconds(group: dist.ProcessGroup | None, timeout_seconds: float) -> float:
    """How long a rank is waited for: ``timeout_seconds``, or the timeout of the user's group if that is less."""
    theirs = group_timeout(group) if group is not None else None
    return min(timeout_seconds, theirs.total_seconds()) if theirs is not None else timeout_seconds


def in_time(call: Callable[[], T], seconds: float) -> T:
    """``call()``, on a thread of its own: some calls of torch's wait for ever, and none of them hears an interrupt.

    Raises:
        TimeoutError: it has not returned within ``seconds``; the thread is left where it waits.
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
    """Tells how long a thread may still be waited for: ``limit_seconds`` from the last time that it got on."""

    def __init__(self, limit_seconds: float = math.inf) -> None:
        self.limit_seconds = limit_seconds
        self.beat()

    def beat(self) -> None:
        """Say that the thread gets on with its work."""
        self._last = time.monotonic()

    @property
    def left_seconds(self) -> float:
        """The time until the thread is taken to hang; 0 once it is."""
        return max(0.0, self._last + self.limit_seconds - time.monotonic())


def wait_for(work: dist.Work, seconds: float) -> None:
    """Wait for a collective of gloo's, in pieces, so that an interrupt is heard meanwhile.

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

    def __init__(self, group: dist.ProcessGroup, number: int, patience: float) -> None:
        """``number`` is another for each piece of work, and the same on all ranks."""
        self._group, self._tag, self._patience = group, _FIRST_TAG + number, patience
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._listeners = list(range(1, self._num_ranks)) if self._rank == 0 else [0]
        self._sent: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._done_here = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="zerofx-work", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def finish(self) -> None:
        """Say that the work is done here, and wait until it is on all ranks.

        Raises:
            SilentRankError: a rank has not said for too long that it works, or is gone.
        """
        self._done_here = True
        if self._rank == 0:
            for peer in self._listeners:
                self._hear(peer)
        self.__exit__()  # the last word is the last
        try:
            self._say(_DONE)
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
                in_time(receive, self._patience + 1.0)
            except (RuntimeError, TimeoutError) as error:
                raise SilentRankError(peer) from error

    def _say(self, what: int) -> None:
        for peer in self._listeners:
            word = torch.tensor([what], device="cpu")
            self._sent.append((dist.isend(word, group=self._group, group_dst=peer, tag=self._tag), word))

    def _show(self) -> None:
        interval = min(_MOST_SECONDS, self._patience / _WORDS_PER_PATIENCE)
        before = _busy_seconds()
        while not self._ended.wait(interval):
            now = _busy_seconds()
            # Rank 0 passes on that some rank works: it says so while it waits, too.
            if now - before > _BUSY * interval or self._done_here:
                with contextlib.suppress(RuntimeError):  # who is gone is found out by whoever waits for it
                    self._say(_AT_WORK)
            before = now


def _busy_seconds() -> float:
    """Processor time of this process and of those that it has started, in seconds."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for tasks in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in tasks.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
