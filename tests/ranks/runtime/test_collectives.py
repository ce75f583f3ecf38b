"""Gathers that start as one collective."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from tests.lib.distributed import run_ranks
from zerofx.ir.buckets import BucketLayout
from zerofx.runtime.comm.collectives import make_transport
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.executor import Runtime
from zerofx.runtime.measure.spans import SpanLog
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.mesh import SHARD, Mesh
from zerofx.torch_private.distributed import gather_many, gather_single, reduce_single

CPU = torch.device("cpu")


class Recorded:
    """A transport of one rank that copies at the end, and remembers what it was asked for."""

    rank, num_ranks, sent_bytes = 0, 1, 0

    def __init__(self) -> None:
        self.started: list[int] = []
        self.finished = 0

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Pending[torch.Tensor]:
        self.started.append(1)
        return Pending(full, lambda _: full.copy_(shard))

    def all_gather_many(self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Pending[None]:
        self.started.append(len(fulls))

        def finish(_: object) -> None:
            self.finished += 1
            for full, shard in zip(fulls, shards, strict=True):
                full.copy_(shard)

        return Pending(None, finish)


def runtime(transport: Recorded) -> Runtime:
    mesh = Mesh()
    communicators = Communicators(transport, mesh, [SHARD])  # type: ignore[arg-type]  # what is used of one
    found = Runtime(BucketLayout((), mesh), communicators, CPU, Tiers(CPU, []))
    found.begin({}, lambda: None)
    return found


def test_nothing_starts_before_the_last_of_them_and_all_are_done_at_once() -> None:
    transport = Recorded()
    ours = runtime(transport)
    shards = [torch.full((4,), float(number)) for number in range(3)]
    first, second = (ours.all_gather(shard, n, 1, 2 - n) for n, shard in enumerate(shards[:2]))
    assert transport.started == []
    third = ours.all_gather(shards[2], 2, 1)
    assert transport.started == [3]
    for pending, shard in ((second, shards[1]), (first, shards[0]), (third, shards[2])):
        assert torch.equal(ours.wait(pending), shard)
    assert transport.finished == 1
    assert torch.equal(ours.wait(ours.all_gather(shards[0], 0, 1)), shards[0])
    assert transport.started == [3, 1]


def test_a_buffer_that_is_released_is_gone_while_others_of_its_group_are_still_pending() -> None:
    ours = runtime(Recorded())
    first, second = ours.all_gather(torch.ones(4), 0, 1, 1), ours.all_gather(torch.ones(4), 1, 1)
    full = ours.wait(first)
    buffer = weakref.ref(full)
    del first, full
    gc.collect()
    assert buffer() is None
    assert torch.equal(ours.wait(second), torch.ones(4))


def test_what_a_failed_step_has_left_is_not_started_by_the_next() -> None:
    transport = Recorded()
    ours = runtime(transport)
    ours.all_gather(torch.ones(4), 0, 1, 1)
    ours.begin({}, lambda: None)
    ours.wait(ours.all_gather(torch.ones(4), 0, 1))
    assert transport.started == [1]


def _gathered() -> list[bool]:
    rank = dist.get_rank()
    transport = make_transport(dist.group.WORLD, CPU, 60.0, SpanLog())
    assert transport is not None
    shards = [torch.full((size,), 10.0 * size + rank) for size in (3, 1, 0, 64)]
    expected = [torch.cat([torch.full((size,), 10.0 * size + r) for r in range(2)]) for size in (3, 1, 0, 64)]
    fulls = [shard.new_empty(2 * shard.numel()) for shard in shards]
    transport.all_gather_many(fulls, shards).finish(None)
    same = [torch.equal(full, wanted) for full, wanted in zip(fulls, expected, strict=True)]
    sent = transport.sent_bytes == sum(shard.nbytes for shard in shards)
    group = dist.group.WORLD
    assert group is not None
    fulls = [shard.new_zeros(2 * shard.numel()) for shard in shards]
    gather_many(group, fulls, shards)
    same += [torch.equal(full, wanted) for full, wanted in zip(fulls, expected, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # names that torch has deprecated
        gather_single(fulls[0].zero_(), shards[0], group=group)
        part = torch.empty_like(shards[0])
        reduce_single(part, fulls[0], group=group)
    return [*same, sent, torch.equal(fulls[0], expected[0]), torch.equal(part, 2 * expected[0].chunk(2)[rank])]


def test_each_of_several_buffers_is_what_a_gather_of_its_own_gives() -> None:
    assert all(all(found) for found in run_ranks(_gathered, 2))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flat": lambda base: base[8:40],
    "a number": lambda base: base[3],
    "empty": lambda base: base[5:5],
    "transposed": lambda base: base.view(8, 8).t(),
    "channels last": lambda base: base.view(2, 4, 4, 2).permute(0, 3, 1, 2),
    "expanded": lambda base: base[8:12, None].expand(4, 5),
    "expanded inside": lambda base: base[8:12].view(2, 1, 2).expand(2, 3, 2),
    "columns": lambda base: base.view(8, 8)[:, 2:4],
    "every other": lambda base: base[::2],
}


def _broadcast(*, reads_memory: bool) -> list[str]:
    """The layouts of which a tensor has not rank 0's values, or what lies next to it has not this rank's."""
    transport = make_transport(dist.group.WORLD, CPU, 60.0, SpanLog(), reads_memory=reads_memory)
    assert transport is not None
    places = torch.arange(64.0)
    bases = {name: places.add(100 * transport.rank) for name in LAYOUTS}
    transport.broadcast([LAYOUTS[name](base) for name, base in bases.items()])
    transport.close()
    covered = {name: torch.isin(places, layout(places).flatten()) for name, layout in LAYOUTS.items()}
    expected = {name: torch.where(covered[name], places, places + 100 * transport.rank) for name in LAYOUTS}
    return [name for name, base in bases.items() if not torch.equal(base, expected[name])]


@pytest.mark.parametrize("reads_memory", [True, False])
def test_a_broadcast_gives_rank_0s_values_in_any_layout_and_changes_nothing_next_to_them(reads_memory: bool) -> None:
    assert run_ranks(functools.partial(_broadcast, reads_memory=reads_memory), 3) == [[], [], []]
