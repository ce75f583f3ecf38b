"""Messages between ranks on CPUs: out of each other's memory where that is permitted, through gloo elsewhere."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lib.distributed import PATIENCE_SECONDS, run_ranks
from zerofx.runtime.comm.same_host import channels
from zerofx.runtime.comm.same_host.channels import GlooChannel, MemoryChannel, open_channels, read_memory
from zerofx.runtime.comm.same_host.lines import AnnouncingEnd, Calls, ReadingEnd
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.tiers.copies import Workers

linux = pytest.mark.skipif(sys.platform != "linux", reason="process_vm_readv is Linux's")
SIZES = (0, 1, 3, 1000, 300_001)


def _own_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _opened(group: dist.ProcessGroup) -> dict[int, channels.Channel]:
    return open_channels(group, Workers("messages"), PATIENCE_SECONDS)


def _exchanged() -> tuple[list[type], bool]:
    """What kinds the channels are, and whether messages under way in all directions at once arrive as sent."""
    rank, opened = dist.get_rank(), _opened(_own_group())
    received, messages = [], []
    for tag, size in enumerate(SIZES):
        for peer, channel in opened.items():
            into = torch.zeros(size)
            messages.append(channel.receive(into, tag))
            messages.append(channel.send(torch.arange(size) * 10.0 + rank, tag))
            received.append((into, torch.arange(size) * 10.0 + peer))
    for message in messages:
        message.wait()
    return [type(channel) for channel in opened.values()], all(torch.equal(*pair) for pair in received)


def _refused(pid: int, address: int, into: torch.Tensor) -> None:
    raise PermissionError(1, "Operation not permitted")


def _in_four_ways() -> list[tuple[list[type], bool]]:
    """As ranks of one host; where rank 1 may not read; or cannot call; on hosts of their own, rank 0's unknown."""
    plain = _exchanged()
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(channels, "read_memory", _refused)
        refused = _exchanged()
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(Calls, "call", lambda *_, **__: None)
        silent = _exchanged()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(channels, "_machine", dist.get_rank)
        return [plain, refused, silent, _exchanged()]


@linux
def test_pairs_of_ranks_read_each_others_memory_where_both_may_and_send_through_gloo_elsewhere() -> None:
    ways = zip(*run_ranks(_in_four_ways, 3), strict=True)
    expected = [
        [[MemoryChannel, MemoryChannel], [MemoryChannel, MemoryChannel], [MemoryChannel, MemoryChannel]],
        *[[[GlooChannel, MemoryChannel], [GlooChannel, GlooChannel], [MemoryChannel, GlooChannel]]] * 2,
        [[GlooChannel, GlooChannel], [GlooChannel, GlooChannel], [GlooChannel, GlooChannel]],
    ]
    for ranks, kinds in zip(ways, expected, strict=True):
        assert [found for found, _ in ranks] == kinds
        assert all(arrived for _, arrived in ranks)


@linux
def test_reading_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match="No such process"):
        read_memory(ended.pid, 0, torch.empty(1))


@linux
def test_reading_where_nothing_is_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), 8, torch.empty(1))


def _one_lets_go() -> str:
    """What comes of messages to and from a rank that has closed its connections."""
    group = _own_group()
    (channel,) = _opened(group).values()
    if dist.get_rank() == 1:
        channel.close()
        return ""
    with pytest.raises(RuntimeError) as receiving:
        channel.receive(torch.empty(10), 1).wait()
    with pytest.raises(RuntimeError) as sending:
        channel.send(torch.ones(10), 2).wait()
    return f"{receiving.value}; {sending.value}"


@linux
def test_a_message_fails_where_the_other_rank_lets_go() -> None:
    found, _ = run_ranks(_one_lets_go, 2)
    assert re.fullmatch("(the connection to rank 1 is gone: [^;]+(; )?){2}", found)


def _one_dies() -> str:
    (channel,) = _opened(_own_group()).values()
    if dist.get_rank() == 1:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    message = channel.receive(torch.empty(10), 1)
    dist.barrier()
    try:
        message.wait()
    except RuntimeError as error:
        raise LookupError(str(error)) from None
    return "arrived"


@linux
def test_a_message_fails_where_the_other_rank_is_killed() -> None:
    with pytest.raises(LookupError, match="the connection to rank 1 is gone: it was closed"):
        run_ranks(_one_dies, 2)


@linux
def test_a_message_whose_sender_has_ended_names_its_rank() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here, there = socket.socketpair()
    sender, reader, source = AnnouncingEnd(there, 0), ReadingEnd(here, 1), torch.ones(10)
    sender.announce(1, source.data_ptr(), source.nbytes)
    channel = MemoryChannel(sender, reader, ended.pid, Workers("messages"))
    with pytest.raises(LostRankError, match=r"the connection to rank 1 is gone: process \d+ cannot be read any more: "):
        channel.receive(torch.empty(10), 1).wait()


def _one_is_late() -> str:
    (channel,) = open_channels(_own_group(), Workers("messages"), 1).values()
    try:
        if dist.get_rank() == 0:
            channel.receive(torch.empty(10), 1).wait()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@linux
def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    assert run_ranks(_one_is_late, 2) == ["rank 1 did not come in time", ""]


def _added(num_threads: int) -> list[bool]:
    """Whether what is received is the sum of both, in whole pieces and not: apart, and over one of them."""
    rank = dist.get_rank()
    torch.set_num_threads(num_threads)
    (channel,) = _opened(_own_group()).values()
    assert isinstance(channel, MemoryChannel)
    found = []
    for tag, (size, dtype) in enumerate(
        itertools.product((1, 1000, 32_768, 300_001, 1_048_577), (torch.float32, torch.bfloat16))
    ):
        sent = [torch.randn(size, generator=torch.Generator().manual_seed(one)).to(dtype) for one in range(2)]
        own, into = sent[rank].clone(), torch.empty(size, dtype=dtype)
        for message in [channel.receive_added(into, own, None, tag), channel.send(sent[rank], tag)]:
            message.wait()
        found.append(torch.equal(into, sent[0] + sent[1]) and torch.equal(own, sent[rank]))
        for message in [channel.receive_added(own, own, into, tag), channel.send(sent[rank], tag)]:
            message.wait()
        found.append(torch.equal(own, sent[0] + sent[1]))
    return found


@linux
@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_received_can_be_added_to_on_its_way(num_threads: int) -> None:
    assert all(all(found) for found in run_ranks(_added, 2, num_threads))


class _Told:
    """A line that says where `source` is, without another rank."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source

    def next(self, tag: int) -> tuple[int, int]:
        return self.source.data_ptr(), self.source.nbytes

    def tell_read(self) -> None:
        pass


class _Keeper:
    """Runs a job at once, and keeps it as a thread does for a while."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, job: Callable[[], None]) -> Future[None]:
        self.jobs.append(job)
        done: Future[None] = Future()
        job()
        done.set_result(None)
        return done


@linux
def test_a_buffer_is_let_go_of_once_it_has_been_read_into() -> None:
    source, into, readers = torch.arange(4.0), torch.zeros(4), _Keeper()
    line: Any = _Told(source)
    workers: Any = readers
    message = MemoryChannel(line, line, os.getpid(), workers).receive(into, 1)
    message.wait()
    assert torch.equal(into, source)
    held = weakref.ref(into)
    del into
    assert held() is None and readers.jobs
