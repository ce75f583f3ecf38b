"""Collectives as the emitted step calls them: started, awaited, and counted.

On a CPU (gloo) a collective is point-to-point messages between all pairs of ranks, which is faster than gloo's own
all-gather and reduce-scatter, takes no hidden buffers, and lets the sum be taken in rank order: results depend neither
on timing nor on how parameters are divided into buckets. On CUDA it is NCCL's, on a stream of its own.

Messages go through a gloo group of the step's own: a rank whose step fails closes its connections there, so that the
others fail too rather than wait for it, and the user's process group stays as it is. Under NCCL that is left to
NCCL's own watchdog.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from zerofx.runtime.copies import Workers
from zerofx.runtime.spans import SpanLog
from zerofx.scheduler.streams import COLLECTIVE

T = TypeVar("T")

_PATIENCE_SECONDS = 3600.0  # for a rank that neither comes nor fails: a step on a CPU can take minutes
_NEVER_SENT = 2**31 - 1  # a tag that no message has


@dataclass
class Pending(Generic[T]):
    """Something started: its result (valid once awaited), and what finishes it, given the buffer that it reads."""

    result: T
    finish: Callable[[Any], T]


Group = Literal["all", "node", "across"]


def members_of(group: Group, rank: int, size: int, num_ranks: int) -> list[int]:
    """The ranks of the group that ``rank`` is in, in order.

    ``"all"`` ranks; the ``size`` ranks of its ``"node"``, which are consecutive; or the ``size`` ranks ``"across"``
    nodes that have its place there.
    """
    if group == "node":
        first = rank // size * size
        return list(range(first, first + size))
    return list(range(rank % (num_ranks // size), num_ranks, num_ranks // size))


class Transport(Protocol):
    """Moves slices between ranks. ``sent_to`` counts what this rank has sent to each other, payload only."""

    rank: int
    num_ranks: int
    sent_to: Counter[int]

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]: ...

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        """Gather several slices of one dtype as one collective."""

    def reduce_scatter(self, gradients: torch.Tensor) -> Pending[torch.Tensor]: ...

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        """Gather the parts of the ``size`` ranks of this node."""

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        """Send part i of ``size`` equal parts to the group's rank i; the result has the parts received, in order."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None: ...

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent, payload only."""
        return self.sent_to.total()

    def abort(self) -> None:
        """Behind a step that failed here: let ranks that wait for this one fail. Nothing can be moved after it."""


class Joint:
    """Gathers that start as one collective, and are done as one; each has a buffer, and a name, of its own."""

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending: Pending[None] | None = None

    @property
    def num_parts(self) -> int:
        """Gathers that have not been started."""
        return len(self._parts)

    def add(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        """One more; nothing is moved before ``start``."""
        self._parts.append((full, shard))

        def finish(_source: object) -> torch.Tensor:
            self._finish()
            return full

        return Pending(full, finish)

    def start(self, transport: Transport) -> None:
        fulls, shards = zip(*self._parts, strict=True)
        self._parts.clear()
        self._pending = transport.all_gather_many(fulls, shards)

    def _finish(self) -> None:
        # Only once, and nothing is held behind it: a bucket that is released must not live on in another's name.
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish(None)


class PointToPoint(Transport):
    """Messages between all pairs of ranks of a gloo group that nobody else uses. ``log`` notes how long they take."""

    def __init__(self, group: dist.ProcessGroup, log: SpanLog) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_to = Counter()
        self._group = group
        self._peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        self._next_tag = 0
        self._log = log
        self._watch: _Watch | None = None

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        return self._gathered(full, shard, list(range(self.num_ranks)))

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        return self._gathered(full, part, members_of("node", self.rank, size, self.num_ranks))

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        received = torch.empty_like(parts)
        works: list[dist.Work] = []
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

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        # Their messages leave back to back, which is all that a group of gathers can save here.
        everyone = list(range(self.num_ranks))
        pairs = zip(fulls, shards, strict=True)
        works = [work for full, shard in pairs for work in self._gather(full, shard, everyone)]
        arrived = self._under_way(works, sum(shard.nbytes for shard in shards) * len(self._peers))

        def finish(_source: object) -> None:
            arrived()

        return Pending(None, finish)

    def reduce_scatter(self, gradients: torch.Tensor) -> Pending[torch.Tensor]:
        num_shard = gradients.numel() // self.num_ranks
        received = [gradients.new_empty(num_shard) for _ in self._peers]
        works: list[dist.Work] = []
        if num_shard:
            tag = self._tag()
            slices = gradients.chunk(self.num_ranks)
            works += [self._receive(buffer, peer, tag) for buffer, peer in zip(received, self._peers, strict=True)]
            works += [self._send(slices[peer], peer, tag) for peer in self._peers]
        arrived = self._under_way(works, received[0].nbytes * len(self._peers))

        def finish(source: torch.Tensor | None) -> torch.Tensor:
            assert source is not None
            arrived()
            own = source.narrow(0, self.rank * num_shard, num_shard)
            parts = [*received[: self.rank], own, *received[self.rank :]]
            total = torch.add(parts[0], parts[1], out=received[0])
            for part in parts[2:]:
                total.add_(part)
            received.clear()
            return total

        return Pending(received[0], finish)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=0)
            if self.rank == 0:
                self.sent_to.update(dict.fromkeys(self._peers, tensor.nbytes))

    def abort(self) -> None:
        close_connections(self._group)

    def _gathered(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> Pending[torch.Tensor]:
        arrived = self._under_way(self._gather(full, shard, members), shard.nbytes * (len(members) - 1))

        def finish(_source: object) -> torch.Tensor:
            arrived()
            return full

        return Pending(full, finish)

    def _gather(self, full: torch.Tensor, shard: torch.Tensor, members: list[int]) -> list[dist.Work]:
        works: list[dist.Work] = []
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

    def _under_way(self, works: list[dist.Work], num_bytes: int) -> Callable[[], None]:
        """What waits for messages, ``num_bytes`` of them sent; as a step is measured, a thread sees them come."""
        if self._log.running and works:
            self._watch = self._watch or _Watch(self._log)
            return self._watch.see(works, num_bytes)
        if self._watch is not None and not self._log.running:
            self._watch.close()
            self._watch = None

        def arrived() -> None:
            while works:
                works.pop().wait()

        return arrived

    def _tag(self) -> int:
        self._next_tag += 1
        return self._next_tag

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        self.sent_to[peer] += tensor.nbytes
        work = dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)
        assert work is not None
        return work


class _Watch:
    """A thread that notes when messages have come: whoever waits for them may come later than they do.

    Collectives are taken to run one behind the other, as in predictions: one begins where the one before it ends.
    """

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._workers = Workers("messages")
        self._free = 0.0

    def see(self, works: list[dist.Work], num_bytes: int) -> Callable[[], None]:
        began = time.perf_counter()

        def watch() -> None:
            while works:
                works.pop(0).wait()
            begin, self._free = max(began, self._free), time.perf_counter()
            self._log.add(COLLECTIVE, begin, self._free, num_bytes)

        seen = self._workers.submit(watch)
        return seen.result

    def close(self) -> None:
        self._workers.close()


class Nccl(Transport):
    """NCCL collectives on a stream of their own.

    A collective starts behind what the compute stream has been given so far, which also makes it safe to reuse memory
    that earlier computation read; computation waits for it only where the step says so. What is sent is counted as a
    ring sends it, to the next rank; of an exchange, to whom it is for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, log: SpanLog) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.sent_to = Counter()
        self._group = group
        self._stream = torch.cuda.Stream(device)
        self._log = log
        self._groups: dict[tuple[Group, int], dist.ProcessGroup] = {}

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        def launch() -> None:
            if full.numel():
                dist.all_gather_into_tensor(full, shard, group=self._group)

        return self._start(full, launch, self._in_ring(shard.nbytes), (full, shard))

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        sent = self._in_ring(sum(shard.nbytes for shard in shards))
        return self._start(None, lambda: gather_coalesced(self._group, fulls, shards), sent, (*fulls, *shards))

    def reduce_scatter(self, gradients: torch.Tensor) -> Pending[torch.Tensor]:
        shard = gradients.new_empty(gradients.numel() // self.num_ranks)

        def launch() -> None:
            if shard.numel():
                dist.reduce_scatter_tensor(shard, gradients, group=self._group)

        return self._start(shard, launch, self._in_ring(shard.nbytes), (shard, gradients))

    def gather_on_node(self, full: torch.Tensor, part: torch.Tensor, size: int) -> Pending[torch.Tensor]:
        group = self._group_of("node", size)

        def launch() -> None:
            if full.numel():
                dist.all_gather_into_tensor(full, part, group=group)

        return self._start(
            full, launch, self._in_ring(part.nbytes, members_of("node", self.rank, size, self.num_ranks)), (full, part)
        )

    def exchange(self, parts: torch.Tensor, size: int, group: Group) -> Pending[torch.Tensor]:
        received, own = torch.empty_like(parts), self._group_of(group, size)
        peers = [peer for peer in members_of(group, self.rank, size, self.num_ranks) if peer != self.rank]

        def launch() -> None:
            if parts.numel():
                dist.all_to_all_single(received, parts, group=own)

        return self._start(received, launch, dict.fromkeys(peers, parts.nbytes // size), (received, parts))

    def _in_ring(self, num_bytes: int, members: Sequence[int] | None = None) -> dict[int, int]:
        """What a ring over ``members`` (all ranks) sends of slices of ``num_bytes``, by rank."""
        members = range(self.num_ranks) if members is None else members
        following = members[(members.index(self.rank) + 1) % len(members)]
        return {following: num_bytes * (len(members) - 1)}

    def _group_of(self, group: Group, size: int) -> dist.ProcessGroup:
        """The group of this rank. All ranks make all groups, at the same place of the step that first needs them."""
        if group == "all":
            return self._group
        if (group, size) not in self._groups:
            everyone = dist.get_process_group_ranks(self._group)
            kinds = {tuple(members_of(group, rank, size, self.num_ranks)) for rank in range(self.num_ranks)}
            for members in sorted(kinds):
                made = dist.new_group([everyone[rank] for rank in members])
                if self.rank in members:
                    assert isinstance(made, dist.ProcessGroup)
                    self._groups[group, size] = made
        return self._groups[group, size]

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, group=self._group, group_src=0)
            if self.rank == 0:
                self.sent_to.update(dict.fromkeys(range(1, self.num_ranks), tensor.nbytes))

    def abort(self) -> None:
        """Nothing: NCCL's watchdog ends ranks that wait too long."""

    def _start(
        self, result: T, launch: Callable[[], None], sent: Mapping[int, int], used: Sequence[torch.Tensor]
    ) -> Pending[T]:
        self.sent_to.update(sent)
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        timed = self._log.running
        begun, done = (torch.cuda.Event(enable_timing=timed) for _ in range(2))
        with torch.cuda.stream(self._stream):
            if timed:
                begun.record(self._stream)
                self._log.add_events(COLLECTIVE, begun, done, sum(sent.values()))
            launch()
            done.record(self._stream)
        for tensor in used:
            tensor.record_stream(self._stream)

        def finish(_source: object) -> T:
            torch.cuda.current_stream().wait_event(done)
            return result

        return Pending(result, finish)


def make_transport(
    group: dist.ProcessGroup | None, device: torch.device, log: SpanLog | None = None
) -> Transport | None:
    """The transport for a device; None for a world of one, where no step has a collective. Collective itself.

    ``log`` notes how long each collective takes, where a step is measured.
    """
    log = log or SpanLog()
    if group is None or dist.get_world_size(group) == 1:
        return None
    if device.type == "cuda":
        return Nccl(group, device, log)
    own = dist.new_group(
        dist.get_process_group_ranks(group), backend="gloo", timeout=timedelta(seconds=_PATIENCE_SECONDS)
    )
    assert isinstance(own, dist.ProcessGroup)
    return PointToPoint(own, log)


def gather_coalesced(group: dist.ProcessGroup, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """Gather slices into a buffer each with one call of the process group, which NCCL makes one launch."""
    outputs, inputs = ([one for one in found if one.numel()] for found in (fulls, shards))
    if outputs:
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group: ranks that wait for it there, or come to, fail at once.

    No call of gloo's does that for a process that lives on, but a message that does not come in time does.
    """
    rank = dist.get_rank(group)
    for peer in range(dist.get_world_size(group)):
        if peer != rank:
            with contextlib.suppress(RuntimeError):
                late = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_NEVER_SENT)
                assert late is not None
                late.wait(timedelta(milliseconds=1))


def is_on_cpu(device: torch.device) -> bool:
    """Whether ``device`` takes the CPU's kernels, and the messages between ranks of ``PointToPoint``."""
    return device.type != "cuda"
