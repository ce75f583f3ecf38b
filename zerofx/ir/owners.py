"""Owners of whole parameters: the ranks that update them, and each one's place in what its owner has of a bucket.

A bucket whose update needs whole parameters is cut into equal slices as others are. For the update every parameter is
put together on one of the ranks along ``states_over``, its owner, in a flat buffer of what that rank owns, in the
bucket's order. Where nothing is cut, the one owner has the bucket as it is.

Owners are chosen by longest processing time: the costliest parameter first, to the rank that has least to do so far,
over all buckets; ties go to fewer bytes and then to the lower rank, so that all ranks choose alike.

Where the values that the optimizer updates have another dtype than those that the graph computes with, they stay whole
at their owners from step to step, as states do.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerofx.ir.buckets import Bucket, Slot


@dataclass(frozen=True)
class OwnedSlot:
    """A parameter in its owner's buffer: its slot, where it begins there, and the elements of the bucket that it takes
    with the padding after it."""

    slot: Slot
    offset: int
    num_taken: int


@dataclass(frozen=True)
class Message:
    """A run of a bucket's elements between the slice of ``slice_rank`` and the buffer of ``owner``: where it begins in
    each, in elements."""

    slice_rank: int
    owner: int
    in_slice: int
    in_owned: int
    numel: int


@dataclass(frozen=True)
class Owners:
    """The owners of a bucket's parameters by rank along ``states_over``, each with what it owns; ``part_numel``: the
    elements of a slice, or of the bucket where nothing is cut."""

    ranks: tuple[tuple[OwnedSlot, ...], ...]
    part_numel: int

    @property
    def are_apart(self) -> bool:
        """True if parameters are cut into slices, which are sent to their owners and back."""
        return len(self.ranks) > 1

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each one's buffer."""
        if not self.are_apart:
            return (self.part_numel,)
        return tuple(owned[-1].offset + owned[-1].num_taken if owned else 0 for owned in self.ranks)

    @property
    def numel(self) -> int:
        """Elements of the largest of these."""
        return max(self.numels)

    @cached_property
    def num_moved(self) -> int:
        """Elements that are not in their owner's own slice."""
        if not self.are_apart:
            return 0
        listed = [(rank * self.part_numel, each.slot) for rank, owned in enumerate(self.ranks) for each in owned]
        ends = [(min(slot.offset + slot.numel, begin + self.part_numel), begin, slot) for begin, slot in listed]
        return sum(slot.numel - max(0, end - max(slot.offset, begin)) for end, begin, slot in ends)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The runs in which slices have the parameters; none where nothing is cut."""
        pairs = [(rank, owned) for rank, listed in enumerate(self.ranks) for owned in listed] if self.are_apart else []
        return tuple(message for rank, owned in pairs for message in _messages(self.part_numel, rank, owned))

    @property
    def most_messages(self) -> int:
        """The most messages between two ranks, one way."""
        return max(Counter((m.slice_rank, m.owner) for m in self.messages).values(), default=0)

    @cached_property
    def rank_of_each(self) -> tuple[int, ...]:
        """The owner of each parameter, in the bucket's order; none where nothing is cut."""
        if not self.are_apart:
            return ()
        places = [(each.slot.offset, each.slot.name, rank) for rank, owned in enumerate(self.ranks) for each in owned]
        return tuple(rank for *_, rank in sorted(places))

    def gaps(self, rank: int, numel: int) -> list[tuple[int, int]]:
        """``(start, end)`` of the elements of a rank's slice, of ``numel``, that belong to no parameter."""
        gaps, end = [], 0
        for message in sorted((m for m in self.messages if m.slice_rank == rank), key=lambda m: m.in_slice):
            if message.in_slice > end:
                gaps.append((end, message.in_slice))
            end = message.in_slice + message.numel
        return [*gaps, (end, numel)] if end < numel else gaps

    def owner_of(self, name: str) -> int:
        """The rank that owns a parameter."""
        return next(rank for rank, owned in enumerate(self.ranks) for each in owned if each.slot.name == name)


def assign_owners(buckets: Sequence[Bucket], stage: int, cost: Callable[[Bucket, Slot], float]) -> dict[int, Owners]:
    """Owners of the parameters of ``buckets``, by bucket index; ``cost`` in seconds, FLOPs or any other unit."""
    assigned: dict[int, Owners] = {}
    loads: dict[int, list[float]] = {}  # by the number of ranks, each one's so far
    for bucket in buckets:
        if not bucket.is_cut(stage):
            owned = tuple(OwnedSlot(slot, slot.offset, taken) for slot, taken in _slots_with_padding(bucket))
            assigned[bucket.index] = Owners((owned,), bucket.numel)
            continue
        num_ranks = bucket.mesh.size(bucket.states_over)
        load = loads.setdefault(num_ranks, [0.0] * num_ranks)
        assigned[bucket.index] = _assign(bucket, num_ranks, load, cost)
    return assigned


def _assign(bucket: Bucket, num_ranks: int, load: list[float], cost: Callable[[Bucket, Slot], float]) -> Owners:
    taken = dict(enumerate(_slots_with_padding(bucket)))
    order = sorted(taken, key=lambda index: (-cost(bucket, taken[index][0]), -taken[index][1], index))
    heap = [(load[rank], 0, rank) for rank in range(num_ranks)]
    heapq.heapify(heap)
    owner_of: dict[int, int] = {}
    for index in order:
        slot, elements = taken[index]
        seconds, num_elements, rank = heapq.heappop(heap)
        owner_of[index] = rank
        load[rank] = seconds + cost(bucket, slot)
        heapq.heappush(heap, (load[rank], num_elements + elements, rank))
    ranks: list[list[OwnedSlot]] = [[] for _ in range(num_ranks)]
    ends = [0] * num_ranks
    for index, (slot, elements) in taken.items():
        rank = owner_of[index]
        ranks[rank].append(OwnedSlot(slot, ends[rank], elements))
        ends[rank] += elements
    return Owners(tuple(map(tuple, ranks)), bucket.part_numel)


def _slots_with_padding(bucket: Bucket) -> Iterator[tuple[Slot, int]]:
    """The slots of a bucket, each with its elements and the padding up to the next; none after the last."""
    following = [slot.offset for slot in bucket.slots[1:]]
    for slot, end in zip(bucket.slots, [*following, None], strict=True):
        yield slot, (slot.offset + slot.numel if end is None else end) - slot.offset


def _messages(each: int, owner: int, owned: OwnedSlot) -> Iterator[Message]:
    """The runs in which slices of ``each`` elements have a parameter."""
    begin, end = owned.slot.offset, owned.slot.offset + owned.slot.numel
    for rank in range(begin // each, -(-end // each)) if end > begin else ():
        first, last = max(begin, rank * each), min(end, (rank + 1) * each)
        yield Message(rank, owner, first - rank * each, owned.offset + first - begin, last - first)
