"""Shared by the transports of a rank on a CPU: its channels to all other ranks, and the messages in flight.

The gloo group is the step's own: a rank whose step fails closes its connections there, and its lines to other ranks of
its host, so that the others fail too instead of waiting for it, and the user's process group stays as it is.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from zerofx.runtime.comm.groups import close_connections, destroy_with
from zerofx.runtime.comm.same_host.channels import GlooChannel, MemoryChannel, Message, open_channels
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.copies import Workers

_SLOW = (
    "rank {} and rank {} run on one machine and cannot read each other's memory, so that what they send goes through "
    "gloo, which is slower: run them in one container and as one user, and see that kernel.yama.ptrace_scope is 0"
)


_MOST_GROUPS, _MOST_NUMBERS = 2**6, 2**24  # their product is a tag that gloo has


def number_tags(group: int) -> Callable[[], int]:
    """A source of tags for the messages of a group, the same where these are sent and received in one order."""
    assert group < _MOST_GROUPS, "a step has few groups of ranks"
    numbers = itertools.count(1)
    # Far fewer are under way at once than a number comes back after.
    return lambda: next(numbers) % _MOST_NUMBERS * _MOST_GROUPS + group


class Connections:
    """Messages between all pairs of ranks of a gloo group that nobody else uses. The ranks of a group start the same
    collectives in the same order, so the group's number and a collective's there identify its messages; the numbers of
    those between two ranks alone are counted by pair.

    ``log`` notes durations; ``rank_timeout_seconds`` is the group's timeout. ``reads_memory``: whether ranks of one
    host may read each other's memory. ``sent_to`` counts the bytes of payload that this rank has sent to each other.
    """

    def __init__(
        self, group: dist.ProcessGroup, log: SpanLog, rank_timeout_seconds: float, *, reads_memory: bool
    ) -> None:
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_to: Counter[int] = Counter()
        self.log = log
        self._end = destroy_with(self, group)
        self._groups = itertools.count()
        self._readers = Workers("messages")
        self.channels = open_channels(group, self._readers, rank_timeout_seconds, reads_memory=reads_memory)
        near = [rank for rank, channel in self.channels.items() if isinstance(channel, GlooChannel) and channel.is_near]
        self.notice = _SLOW.format(self.rank, ", ".join(map(str, near))) if near and reads_memory else ""
        self._watch: _Watch | None = None
        self._started: list[list[Message]] = []  # what has not been awaited yet

    @property
    def reads_all(self) -> bool:
        """True if this rank reads the memory of all others."""
        return all(isinstance(channel, MemoryChannel) for channel in self.channels.values())

    def open_group(self) -> int:
        """The number of one more group of messages: the same on all ranks that open theirs in one order."""
        return next(self._groups)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        self.sent_to[rank] += tensor.nbytes
        return self.channels[rank].send(tensor, tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Message:
        return self.channels[rank].receive(tensor, tag)

    def track(
        self, works: list[Message], num_bytes: int, stream: str, *, only_sent: bool = False
    ) -> Callable[[], None]:
        """The function that waits for a collective's messages on ``stream``, ``num_bytes`` of them sent; while a step
        is measured, a thread notes their arrival. ``only_sent``: nothing comes back, and the receiver may take its time
        while others' messages arrive."""
        self._started = [*(work for work in self._started if work), works]
        if self.log.is_running and only_sent:
            now = time.perf_counter()
            self.log.add(stream, now, now, num_bytes)
        elif self.log.is_running and works:
            self._watch = self._watch or _Watch(self.log)
            return self._watch.see(works, num_bytes, stream)
        if not self.log.is_running:
            self._stop_watching()

        def wait_all() -> None:
            while works:
                works.pop().wait()

        return wait_all

    def settle(self) -> None:
        for works in self._started:
            while works:
                works.pop().wait()
        self._started.clear()

    def abort(self) -> None:
        self._hang_up()
        close_connections(self.group)

    def close(self) -> None:
        self._stop_watching()
        self._readers.close()
        self._hang_up()
        self._end()

    def _hang_up(self) -> None:
        for channel in self.channels.values():
            channel.close()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class _Watch:
    """A thread that notes when messages arrive, which may be before anyone waits for them.

    Collectives of a stream are taken to run one after the other, as in predictions: each begins where the one before it
    ends.
    """

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._workers = Workers("messages")
        self._free: dict[str, float] = {}

    def see(self, works: list[Message], num_bytes: int, stream: str) -> Callable[[], None]:
        began = time.perf_counter()

        def watch() -> None:
            for work in works:
                work.wait()
            begin, ended = max(began, self._free.get(stream, 0.0)), time.perf_counter()
            self._free[stream] = ended
            self._log.add(stream, begin, ended, num_bytes)

        seen = self._workers.submit(watch)

        def wait_all() -> None:
            seen.result()
            works.clear()  # here: what is freed by another thread is not in what is measured

        return wait_all

    def close(self) -> None:
        self._workers.close()
