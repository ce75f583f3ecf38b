"""The transport of GPUs, played over gloo: its groups, their order, and what becomes of it after a failure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.compiled.cuda_stand_in.streams import CPU, on_streams
from tests.lib.distributed import run_ranks
from zerofx import UsageError
from zerofx.runtime.comm.collectives import check_backend, make_transport
from zerofx.runtime.comm.nccl import Nccl, keeps_order
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.measure.spans import SpanLog
from zerofx.torch_private import distributed


def _transport() -> Nccl:
    world = dist.group.WORLD
    assert world is not None
    return Nccl(world, CPU, SpanLog())


def _gathered_within() -> tuple[list[float], list[float]]:
    """Of replicas with two nodes each: what the ranks of a replica, and then of a node of it, have."""
    with on_streams():
        transport = _transport()
        inner = transport.split([[0, 1], [2, 3]])
        own = torch.tensor([float(transport.rank)])
        within = inner.all_gather_into(torch.empty(2), own).finish(None)
        on_node = inner.gather_on_node(torch.empty(2), own, 2).finish(None)
        return within.tolist(), on_node.tolist()


def test_groups_within_groups_are_of_their_own_ranks() -> None:
    assert run_ranks(_gathered_within, 4) == [([0.0, 1.0],) * 2] * 2 + [([2.0, 3.0],) * 2] * 2


def _races(asked: str) -> tuple[list[str], str]:
    """What is found where a collective of one communicator is awaited that was started after another's."""
    settings = mock.patch.dict(os.environ, NCCL_LAUNCH_ORDER_IMPLICIT=asked)
    version = mock.patch.object(distributed, "nccl_version", return_value=(2, 26, 2))
    with settings, version, on_streams() as streams:
        transport = _transport()
        inner = transport.split([[0, 1]])
        first = transport.all_gather_into(torch.empty(2), torch.ones(1))
        inner.all_gather_into(torch.empty(2), torch.ones(1)).finish(None)
        before = len(streams.collectives)
        first.finish(None)
        return [*streams.races, f"{before} left"], transport.notice


def test_collectives_of_all_communicators_run_in_the_order_in_which_they_were_started() -> None:
    for races, notice in run_ranks(_races, 2, ""):
        assert races == ["0 left"]
        assert "one after the other" in notice and "NCCL_LAUNCH_ORDER_IMPLICIT=1" in notice


def test_the_order_is_left_to_nccl_where_it_has_been_asked_for_it() -> None:
    for (race, left), notice in run_ranks(_races, 2, "1"):
        assert "runs before a collective that was started before it" in race and left == "1 left"
        assert not notice


@pytest.mark.parametrize(
    ("asked", "version", "kept"),
    [("1", (2, 26, 2), True), ("1", (2, 25, 1), False), ("0", (2, 30, 3), False), (None, (2, 30, 3), False)],
)
def test_nccl_keeps_the_order_from_2_26_on(
    asked: str | None, version: tuple[int, ...], kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    if asked is not None:
        monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", asked)
    monkeypatch.setattr(distributed, "nccl_version", lambda: version)
    assert keeps_order() == kept


def _timeouts() -> list[timedelta | None]:
    """Those of the user's group, and of groups that are made for axes of a mesh and for nodes."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=77))
    assert isinstance(group, dist.ProcessGroup)
    with on_streams():
        transport = Nccl(group, CPU, SpanLog())
        inner = transport.split([[0], [1]])
        transport.gather_on_node(torch.empty(2), torch.ones(1), 2).finish(None)
        groups = [group, inner._group, *transport._groups.values()]
        return [distributed.group_timeout(each) for each in groups]


def test_groups_that_are_made_have_the_timeout_of_the_user_s() -> None:
    assert run_ranks(_timeouts, 2) == [[timedelta(seconds=77)] * 3] * 2


def _on_the_stream() -> list[str]:
    """What is given to the stream that computes by what a step is begun and left with."""
    with on_streams() as streams:
        transport = _transport()
        pending = transport.all_gather_into(torch.empty(2), torch.ones(1))
        value = torch.full((2,), float(transport.rank))
        transport.broadcast([value])
        told = [transport.all_true(True), transport.all_true(transport.rank == 0)]
        pending.finish(None)
        return [*streams.races, *map(str, told), str(value.tolist())]


def test_what_a_step_begins_and_is_left_with_is_on_the_stream_of_all_collectives() -> None:
    assert run_ranks(_on_the_stream, 2) == [["True", "False", "[0.0, 0.0]"]] * 2


class _Coalescing:
    """A group that notes how it is asked to gather, and as NCCL's gives nothing to wait for where it is not async."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any
    ) -> None:
        self.asked.append((len(outputs), options.asyncOp))


def test_several_gathers_are_launched_on_the_stream_that_is_current() -> None:
    group = _Coalescing()
    distributed.gather_many(group, [torch.empty(2), torch.empty(0)], [torch.ones(1), torch.ones(0)])  # type: ignore[arg-type]
    assert group.asked == [(1, False)]


def _refused() -> str:
    with pytest.raises(UsageError) as refused:
        make_transport(dist.group.WORLD, torch.device("cuda", 0), 60.0, SpanLog())
    return str(refused.value)


def test_a_backend_that_blocks_the_host_is_refused_for_a_gpu() -> None:
    for text in run_ranks(_refused, 2):
        assert "found gloo, in which the host waits" in text and "cpu:gloo,cuda:nccl" in text
    with pytest.raises(UsageError, match="found none"):
        check_backend("")
    check_backend("nccl")


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
        pending = transport.all_gather_into(torch.empty(4), shard)
        with mock.patch.object(distributed, "abort") as given_up:
            transport.abort()
        assert [call.args[0] for call in given_up.call_args_list] == [dist.group.WORLD]
        for start in (
            lambda: pending.finish(None),
            transport.check_reachable,
            lambda: transport.all_gather_into(torch.empty(4), shard),
            lambda: transport.broadcast([shard]),
            lambda: transport.all_true(True),
            lambda: transport.split([[0], [1]]),
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
