"""Collectives on a CPU: messages between all pairs of ranks.

That is faster than gloo's own all-gather and reduce-scatter, takes no hidden buffers, and lets the sum be taken in rank
order: results depend neither on timing nor on how parameters are divided into buckets.

The gloo group is the step's own: a rank whose step fails closes its connections there, and its lines to other ranks of
its host, so that the others fail too rather than wait for it, and the user's process group stays as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from zerofx.ir.streams import COLLECTIVE
from zerofx.runtime.comm.groups import close_connections, destroyed_with
from zerofx.runtime.comm.patience import wait_for
from zerofx.runtime.comm.same_host.channels import GlooChannel, MemoryChannel, Message, open_channels
from zerofx.runtime.comm.same_host.shared import share_memory
from zerofx.runtime.comm.transport import Group, LostRankError, Pending, Transport, members_of
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.copies import Workers

_SLOW = (
    "rank {} and rank {} run on one machine and cannot read each other's memory, so that what they send goes through "
    "gloo, which is slower: run them in one container and as one user, and see that kernel.yama.ptrace_scope is 0"
)


class PointToPoint(Transport):
    """Messages between all pairs of ranks of a gloo group that nobody else uses.

    ``log`` notes how long they take; ``patience_seconds`` is the group's timeout. ``reads_memory``: whether ranks of
    one host may read each other's memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, log: SpanLog, patience_seconds: float, *, reads_memory: bool = True
    ) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_to = Counter()
        self._group, self._patience_seconds = group, patience_seconds
        self._end = destroyed_with(self, group)
        self._peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self._next_tag = 0
        self._readers = Workers("messages")
        self._channels = open_channels(group, self._readers, patience_seconds, reads_memory=reads_memory)
        near = [
            peer for peer, channel in self._channels.items() if isinstance(channel, GlooChannel) and channel.is_near
        ]
        self.notice = _SLOW.format(self.rank, ", ".join(map(str, near))) if near and reads_memory else ""
        self._shared = share_memory(
            group, all(isinstance(channel, MemoryChannel) for channel in self._channels.values())
        )
        self._log = log
        self._watch: _Watch | None = None
        self._started: list[list[Message]] = []  # what has not been awaited yet

    def share(self, shard: torch.Tensor) -> torch.Tensor:
        return self._shared.share(shard) if self._shared is not None else shard

    def read_in_place(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor | None:
        whole = self._shared.read(full, shard) if self._shared is not None else None
        if whole is not None:
            for peer in self._peers:  # each reads it, and no less than if it were sent
                self.sent_to[peer] += shard.nbytes
        return whole

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        return self._gathered(full, shard, list(range(self.num_ranks)))

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        return self._gathered(full, part, members_of("node", self.rank, size, self.num_ranks))

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        # Their messages leave back to back, which is all that a group of gathers can save here.
        everyone = list(range(self.num_ranks))
        pairs = zip(fulls, shards, strict=True)
        works = [work for full, shard in pairs for work in self._gather(full, shard, everyone)]
        arrived = self._under_way(works, sum(shard.nbytes for shard in shards) * len(self._peers))

        def finish(_source: object) -> None:
            arrived()

        return Pending(None, finish)

    def reduce_scatter(self, gradients: torch.Tensor, *, in_place: bool = False) -> Pending[torch.Tensor]:
        num_shard = gradients.numel() // self.num_ranks
        received = [gradients.new_empty(num_shard) for _ in self._peers]
        adds = self._adder()
        works: list[Message] = []
        if num_shard:
            tag = self._tag()
            slices = gradients.chunk(self.num_ranks)
            own = slices[self.rank]
            if adds:
                works.append(adds(own, own, received[0], tag) if in_place else adds(received[0], own, None, tag))
            else:
                works += [self._receive(buffer, peer, tag) for buffer, peer in zip(received, self._peers, strict=True)]
            works += [self._send(slices[peer], peer, tag) for peer in self._peers]
        arrived = self._under_way(works, received[0].nbytes * len(self._peers))

        def finish(source: torch.Tensor | None) -> torch.Tensor:
            assert source is not None
            arrived()
            own = source.narrow(0, self.rank * num_shard, num_shard)
            into = own if in_place else received[0]
            if not adds:
                parts = [*received[: self.rank], own, *received[self.rank :]]
                total = parts[0]
                for part in parts[1:-1]:
                    total = torch.add(total, part, out=received[0])
                torch.add(total, parts[-1], out=into)
            received.clear()
            return into

        return Pending(received[0], finish)

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        received = torch.empty_like(parts)
        works: list[Message] = []
        if parts.numel():
            tag = self._tag()
            members = members_of(group, self.rank, size, self.num_ranks)
            own = members.index(self.rank)
            sent, into = parts.chunk(size), received.chunk(size)
            others = [place for place in range(size) if place != own]
            works += [self._receive(into[place], members[place], tag) for place in others]
            works += [self._send(sent[place], members[place], tag) for place in others]
            into[own].copy_(sent[own])
        arrived = self._under_way(works, parts.nbytes // size * (size - 1))

        def finish(_source: object) -> torch.Tensor:
            arrived()
            return received

        return Pending(received, finish)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._broadcast(tensor)
            if self.rank == 0:
                self.sent_to.update(dict.fromkeys(self._peers, tensor.nbytes))

    def all_true(self, here: bool) -> bool:
        # Memory of Python's: what is planned is the device's.
        flag = torch.frombuffer(bytearray([here]), dtype=torch.uint8)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None
        try:
            wait_for(work, self._patience_seconds)
        except RuntimeError as error:
            who = f"rank {self._peers[0]}" if len(self._peers) == 1 else "a rank"
            raise LostRankError(f"{who} did not come in time, or is gone: {str(error).splitlines()[0]}") from error
        return bool(flag[0])

    def settle(self) -> None:
        for works in self._started:
            while works:
                works.pop().wait()
        self._started.clear()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, group=self._group, group_src=0, async_op=True)
        assert work is not None
        try:
            wait_for(work, self._patience_seconds)
        except RuntimeError as error:
            who = "rank 0" if self.rank else f"rank {self._peers[0]}" if len(self._peers) == 1 else "a rank"
            raise LostRankError(f"{who} did not come in time, or is gone: {str(error).splitlines()[0]}") from error

    def abort(self) -> None:
        self._hang_up()
        close_connections(self._group)

    def close(self) -> None:
        self._stop_watching()
        self._readers.close()
        self._hang_up()
        self._end()

    def _gathered(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> Pending[torch.Tensor]:
        arrived = self._under_way(self._gather(full, shard, members), shard.nbytes * (len(members) - 1))

        def finish(_source: object) -> torch.Tensor:
            arrived()
            return full

        return Pending(full, finish)

    def _gather(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> list[Message]:
        works: list[Message] = []
        slices = dict(zip(members, full.chunk(len(members)), strict=True)) if full.numel() else {}
        if slices:
            tag = self._tag()
            peers = [peer for peer in members if peer != self.rank]
            works += [self._receive(slices[peer], peer, tag) for peer in peers]
            works += [self._send(shard, peer, tag) for peer in peers]
            own = slices[self.rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
        return works

    def _adder(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], Message] | None:
        """What receives and adds at once: of two ranks, whose sum has no order."""
        channel = self._channels[self._peers[0]] if len(self._peers) == 1 else None
        return channel.receive_added if isinstance(channel, MemoryChannel) else None

    def _under_way(self, works: list[Message], num_bytes: int) -> Callable[[], None]:
        """What waits for messages, ``num_bytes`` of them sent; as a step is measured, a thread sees them come."""
        self._started = [*(work for work in self._started if work), works]
        if self._log.running and works:
            self._watch = self._watch or _Watch(self._log)
            return self._watch.see(works, num_bytes)
        if not self._log.running:
            self._stop_watching()

        def arrived() -> None:
            while works:
                works.pop().wait()

        return arrived

    def _hang_up(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _tag(self) -> int:
        self._next_tag += 1
        return self._next_tag

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        self.sent_to[peer] += tensor.nbytes
        return self._channels[peer].send(tensor, tag)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Message:
        return self._channels[peer].receive(tensor, tag)


class _Watch:
    """A thread that notes when messages have come: whoever waits for them may come later than they do.

    Collectives are taken to run one after the other, as in predictions: one begins where the one before it ends.
    """

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._workers = Workers("messages")
        self._free = 0.0

    def see(self, works: list[Message], num_bytes: int) -> Callable[[], None]:
        began = time.perf_counter()

        def watch() -> None:
            for work in works:
                work.wait()
            begin, self._free = max(began, self._free), time.perf_counter()
            self._log.add(COLLECTIVE, begin, self._free, num_bytes)

        seen = self._workers.submit(watch)

        def arrived() -> None:
            seen.result()
            works.clear()  # here: what is freed by another thread is not in what is measured

        return arrived

    def close(self) -> None:
        self._workers.close()
