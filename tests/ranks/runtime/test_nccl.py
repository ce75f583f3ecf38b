"""The transport of GPUs, played over gloo: its groups, and what becomes of it after a failure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.compiled.cuda_stand_in.streams import CPU, on_streams
from tests.lib.distributed import run_ranks
from zerofx.runtime.comm.nccl import Nccl
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.measure.spans import SpanLog


def _transport() -> Nccl:
    world = dist.group.WORLD
    assert world is not None
    return Nccl(world, CPU, SpanLog())


def _gathered_within() -> tuple[list[float], list[float]]:
    """Of replicas with two nodes each: what the ranks of a replica, and then of a node of it, have."""
    with on_streams():
        transport = _transport()
        inner = transport.among([[0, 1], [2, 3]])
        own = torch.tensor([float(transport.rank)])
        within = inner.all_gather_into(torch.empty(2), own).finish(None)
        on_node = inner.gather_on_node(torch.empty(2), own, 2).finish(None)
        return within.tolist(), on_node.tolist()


def test_groups_within_groups_are_of_their_own_ranks() -> None:
    assert run_ranks(_gathered_within, 4) == [([0.0, 1.0],) * 2] * 2 + [([2.0, 3.0],) * 2] * 2


def _broadcast() -> list[bool]:
    values = [torch.arange(4, dtype=torch.int16), torch.ones(3, dtype=torch.complex64), torch.tensor([True, False])]
    with on_streams():
        transport = _transport()
        here = [value.clone() if transport.rank == 0 else torch.zeros_like(value) for value in values]
        transport.broadcast(here)
    return [torch.equal(*pair) for pair in zip(here, values, strict=True)]


def test_any_dtype_is_broadcast() -> None:
    assert run_ranks(_broadcast, 2) == [[True] * 3] * 2


def _recorded() -> list[int]:
    """How many storages the allocator is told of, for slices that lie apart from the whole, and in it."""
    numbers = []
    with on_streams() as streams:
        transport, full, apart = _transport(), torch.zeros(4), torch.zeros(2)
        for shard in (full[2 * transport.rank :][:2], apart):
            transport.all_gather_into(full, shard).finish(None)
            numbers.append(len(streams.recorded))
    return numbers


def test_the_allocator_is_told_only_of_slices_that_may_go_before_they_are_gathered() -> None:
    assert run_ranks(_recorded, 2) == [[0, 1]] * 2


def _after_a_failure() -> list[str]:
    shard = torch.ones(2)
    with on_streams() as streams:
        transport = _transport()
        transport.abort()
        for start in (
            lambda: transport.all_gather_into(torch.empty(4), shard),
            lambda: transport.broadcast([shard]),
            lambda: transport.all_true(True),
            lambda: transport.among([[0], [1]]),
        ):
            with pytest.raises(LostRankError, match="a rank has failed"):
                start()
        # A collective that the other rank does not come to.
        streams.sides[0].work.append(lambda: pytest.fail("it waits for the other rank"))
        transport.close()
        streams.sides[0].work.clear()
    return ["left"]


def test_after_a_failure_nothing_is_started_and_nothing_waited_for() -> None:
    assert run_ranks(_after_a_failure, 2) == [["left"]] * 2
