"""Collectives on a CPU: messages between all pairs of ranks.

This is faster than gloo's own all-gather and reduce-scatter, takes no hidden buffers, and sums in rank order: results
depend neither on timing nor on how parameters are divided into buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist

from zerofx.runtime.comm.connections import Connections, number_tags
from zerofx.runtime.comm.same_host.channels import MemoryChannel, Message
from zerofx.runtime.comm.same_host.shared import SharedBuckets, share_memory
from zerofx.runtime.comm.transport import (
    Group,
    Groups,
    Pending,
    Pieces,
    Transport,
    copy_own_pieces,
    members_of,
)
from zerofx.runtime.measure.spans import SpanLog


def make_gloo_transport(
    group: dist.ProcessGroup, log: SpanLog, rank_timeout_seconds: float, *, reads_memory: bool
) -> PointToPoint:
    """The transport among all ranks of a gloo group that nobody else uses; arguments as for ``Connections``."""
    connections = Connections(group, log, rank_timeout_seconds, reads_memory=reads_memory)
    shared = share_memory(group, connections.reads_all)
    return PointToPoint(connections, range(connections.num_ranks), shared)


class PointToPoint(Transport):
    """Messages between all pairs of the ranks ``members``, a subset of the ranks of ``connections``."""

    def __init__(self, connections: Connections, members: Sequence[int], shared: SharedBuckets | None = None) -> None:
        self._connections, self._members, self._shared = connections, list(members), shared
        self.rank, self.num_ranks = self._members.index(connections.rank), len(self._members)
        self.sent_to, self.notice = connections.sent_to, connections.notice
        self._peers = [member for member in self._members if member != connections.rank]
        self._tag = number_tags(connections.open_group())
        # Of messages that only two ranks know of, which number those of each way by themselves.
        group = connections.open_group()
        self._sent_tags: dict[int, Callable[[], int]] = defaultdict(lambda: number_tags(group))
        self._received_tags: dict[int, Callable[[], int]] = defaultdict(lambda: number_tags(group))

    def split(self, groups: Groups) -> PointToPoint:
        (members,) = (group for group in groups if self._connections.rank in group)
        return PointToPoint(self._connections, members)

    def share(self, shard: torch.Tensor) -> torch.Tensor:
        return self._shared.share(shard) if self._shared is not None else shard

    def read_in_place(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor | None:
        whole = self._shared.read(full, shard) if self._shared is not None else None
        if whole is not None:
            for peer in self._peers:  # each reads it, and no less than if it were sent
                self.sent_to[peer] += shard.nbytes
        return whole

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        return self._start_gather(full, shard, self._members)

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        return self._start_gather(full, part, self._group_members("node", size))

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        # Their messages leave back to back, which is all that a group of gathers can save here.
        pairs = zip(fulls, shards, strict=True)
        works = [work for full, shard in pairs for work in self._gather(full, shard, self._members)]
        arrived = self._track(works, sum(shard.nbytes for shard in shards) * len(self._peers))
        return Pending.from_waits(None, arrived)

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
                pairs = zip(received, self._peers, strict=True)
                works += [self._connections.receive(buffer, peer, tag) for buffer, peer in pairs]
            works += [
                self._connections.send(slices[place], member, tag)
                for place, member in enumerate(self._members)
                if place != self.rank
            ]
        arrived = self._track(works, received[0].nbytes * len(self._peers))

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
            members = self._group_members(group, size)
            own = members.index(self._connections.rank)
            sent, into = parts.chunk(size), received.chunk(size)
            others = [place for place in range(size) if place != own]
            works += [self._connections.receive(into[place], members[place], tag) for place in others]
            works += [self._connections.send(sent[place], members[place], tag) for place in others]
            into[own].copy_(sent[own])
        arrived = self._track(works, parts.nbytes // size * (size - 1))
        return Pending.from_waits(received, arrived)

    def exchange_pieces(self, result: torch.Tensor, sent: Pieces, into: Pieces, most: int) -> Pending[torch.Tensor]:
        sent, into = copy_own_pieces(self.rank, sent, into)
        works = [self._connections.receive(piece, self._members[n], self._received_tags[n]()) for n, piece in into]
        works += [self._connections.send(piece, self._members[n], self._sent_tags[n]()) for n, piece in sent]
        num_bytes = sum(piece.nbytes for _, piece in sent)
        arrived = self._connections.track(works, num_bytes, self.stream, only_sent=not into)
        return Pending.from_waits(result, arrived)

    def shift(self, value: torch.Tensor) -> Pending[torch.Tensor]:
        received, following = torch.empty_like(value), (self.rank + 1) % self.num_ranks
        works: list[Message] = []
        if value.numel():
            tag = self._tag()
            works = [
                self._connections.receive(received, self._members[self.rank - 1], tag),
                self._connections.send(value, self._members[following], tag),
            ]
        arrived = self._track(works, value.nbytes)
        return Pending.from_waits(received, arrived)

    def all_reduce(self, value: torch.Tensor, reduction: str) -> Pending[torch.Tensor]:
        flat = value.reshape(-1)
        each = -(-flat.numel() // self.num_ranks)
        into = flat.new_empty(each * self.num_ranks)
        result = into[: flat.numel()]
        own = _slice(flat, self.rank, each)
        parts = into[: own.numel() * self.num_ranks].chunk(self.num_ranks) if own.numel() else ()
        tag = self._tag()
        works = [self._connections.receive(parts[n], peer, tag) for n, peer in self._others() if own.numel()]
        sent = [(peer, _slice(flat, number, each)) for number, peer in self._others()]
        works += [self._connections.send(part, peer, tag) for peer, part in sent if part.numel()]
        if own.numel():
            parts[self.rank].copy_(own)
        arrived = self._track(works, sum(part.nbytes for _, part in sent))

        def finish(_source: object) -> torch.Tensor:
            arrived()
            summed = _slice(result, self.rank, each)
            for part in parts[1:]:
                _REDUCED[reduction](parts[0], part, out=parts[0])
            if self.rank and summed.numel():
                summed.copy_(parts[0])
            tag = self._tag()
            slices = [(peer, _slice(result, number, each)) for number, peer in self._others()]
            works = [self._connections.receive(part, peer, tag) for peer, part in slices if part.numel()]
            works += [self._connections.send(summed, peer, tag) for peer, _ in slices if summed.numel()]
            self._track(works, summed.nbytes * len(slices))()
            return result.view(value.shape)

        return Pending(result, finish)

    def broadcast_dense(self, tensors: Sequence[torch.Tensor]) -> None:
        works: list[Message] = []  # all under way at once: a collective of gloo's for each would wait for its threads
        for tensor in tensors:
            tag = self._tag()
            if self.rank == 0:
                works += [self._connections.send(tensor, peer, tag) for peer in self._peers]
            else:
                works.append(self._connections.receive(tensor, self._members[0], tag))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._track(works, num_bytes * len(self._peers) if self.rank == 0 else 0)()

    def all_true(self, here: bool) -> bool:
        # Memory of Python's: what is planned is the device's.
        own, *flags = (torch.frombuffer(bytearray([here]), dtype=torch.uint8) for _ in self._members)
        channels, tag = [self._connections.channels[peer] for peer in self._peers], self._tag()
        works = [channel.receive(flag, tag) for channel, flag in zip(channels, flags, strict=True)]
        works += [channel.send(own, tag) for channel in channels]
        for work in works:
            work.wait()
        return here and all(map(bool, flags))

    def settle(self) -> None:
        self._connections.settle()

    def abort(self) -> None:
        self._connections.abort()

    def close(self) -> None:
        if len(self._members) == self._connections.num_ranks:  # the world's transport closes what all share
            self._connections.close()

    def _track(self, works: list[Message], num_bytes: int) -> Callable[[], None]:
        return self._connections.track(works, num_bytes, self.stream)

    def _others(self) -> list[tuple[int, int]]:
        """All members but this rank, with their positions."""
        return [(number, member) for number, member in enumerate(self._members) if number != self.rank]

    def _group_members(self, group: Group, size: int) -> list[int]:
        return [self._members[place] for place in members_of(group, self.rank, size, self.num_ranks)]

    def _start_gather(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> Pending[torch.Tensor]:
        arrived = self._track(self._gather(full, shard, members), shard.nbytes * (len(members) - 1))
        return Pending.from_waits(full, arrived)

    def _gather(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> list[Message]:
        works: list[Message] = []
        slices = dict(zip(members, full.chunk(len(members)), strict=True)) if full.numel() else {}
        if slices:
            tag = self._tag()
            peers = [peer for peer in members if peer != self._connections.rank]
            works += [self._connections.receive(slices[peer], peer, tag) for peer in peers]
            works += [self._connections.send(shard, peer, tag) for peer in peers]
            own = slices[self._connections.rank]
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
        return works

    def _adder(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], Message] | None:
        """A function that receives and adds in one step; only for two ranks, whose sum has no order."""
        channel = self._connections.channels[self._peers[0]] if len(self._peers) == 1 else None
        return channel.receive_added if isinstance(channel, MemoryChannel) else None


_REDUCED: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
)


def _slice(flat: torch.Tensor, number: int, each: int) -> torch.Tensor:
    """Slice ``number`` of a flat tensor, of ``each`` elements or the rest."""
    return flat[min(number * each, flat.numel()) : (number + 1) * each]
