"""Channels for messages between ranks on CPUs: through gloo, or read from the other rank's memory.

Ranks of one host need no network between them. The sender announces the address of its bytes, the receiver reads them
there (``process_vm_readv``: one copy, no buffer in between) and confirms; both words go over a line of their own
(``lines.py``). MPI libraries do the same among the ranks of a host ("cross-memory attach"). Linux permits it to
processes of one user unless configured otherwise (containers of their own, ``kernel.yama.ptrace_scope``); each pair of
ranks tries it when the channels are opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from zerofx.runtime.comm.same_host.lines import AnnouncingEnd, Calls, ReadingEnd
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.tiers.copies import Workers

# What is read at a time where it is added to: in pieces of 32,768 it took a quarter to two thirds longer.
_PIECE_NUMEL = 524_288
# As much as torch adds on one thread (at::internal::GRAIN_SIZE): the one that reads is not to have others of its own.
_ALONE_NUMEL = 32_768


class Message(Protocol):
    """A message in flight, to be awaited once."""

    def wait(self) -> object:
        """Block until it has arrived, here or there; raises if the other rank has failed."""


class Channel(Protocol):
    """Messages with one other rank. Both sides send and receive in the same order, with the same tags."""

    def send(self, tensor: torch.Tensor, tag: int) -> Message:
        """Send a contiguous tensor, which must not change until the message is awaited."""

    def receive(self, tensor: torch.Tensor, tag: int) -> Message:
        """Receive into a contiguous tensor of the size that is sent."""

    def close(self) -> None:
        """Make the other rank fail if it waits for this one, now or later."""


class GlooChannel:
    """Messages through gloo's connections. ``is_near``: to a rank of this machine, whose memory cannot be read."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, is_near: bool = False) -> None:
        self._group, self._peer, self.is_near = group, peer, is_near

    def send(self, tensor: torch.Tensor, tag: int) -> Message:
        return _Sending(dist.isend(tensor, group=self._group, group_dst=self._peer, tag=tag), self._peer)

    def receive(self, tensor: torch.Tensor, tag: int) -> Message:
        return _Sending(dist.irecv(tensor, group=self._group, group_src=self._peer, tag=tag), self._peer)

    def close(self) -> None:
        """Do nothing: the connections are the group's, and are closed with those."""


class _Sending:
    """A message of gloo's, to or from rank ``peer``."""

    def __init__(self, work: dist.Work | None, peer: int) -> None:
        assert work is not None
        self._work, self._peer = work, peer

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            came = "did not come in time" if "imed out" in str(error) else "is gone"
            raise LostRankError(f"rank {self._peer} {came}: {str(error).splitlines()[0]}") from error


class MemoryChannel:
    """Messages that the receiver reads out of the memory of process ``pid``, on a thread of ``readers``."""

    def __init__(self, there: AnnouncingEnd, here: ReadingEnd, pid: int, readers: Workers) -> None:
        self._there, self._here, self._pid, self._readers = there, here, pid, readers

    def send(self, tensor: torch.Tensor, tag: int) -> Message:
        return _Sent(self._there, self._there.announce(tag, tensor.data_ptr(), tensor.nbytes), tensor)

    def receive(self, tensor: torch.Tensor, tag: int) -> Message:
        return self._receive(tensor, None, None, tag)

    def receive_added(self, total: torch.Tensor, own: torch.Tensor, spare: torch.Tensor | None, tag: int) -> Message:
        """Receive into a flat tensor the sum of the sent tensor and ``own``, which must not change until then.

        It is added piece by piece, while a piece is in the processor's cache. If ``total`` is ``own`` itself, ``spare``
        is as large and holds the received elements.
        """
        return self._receive(total, own, spare, tag)

    def _receive(self, tensor: torch.Tensor, own: torch.Tensor | None, spare: torch.Tensor | None, tag: int) -> Message:
        def read() -> None:
            nonlocal tensor, own, spare
            address, num_bytes = self._here.next(tag)
            assert num_bytes == tensor.nbytes, f"{num_bytes} bytes are sent where {tensor.nbytes} are expected"
            try:
                if own is None:
                    read_memory(self._pid, address, tensor)
                else:
                    _read_added(self._pid, address, tensor, own, spare)
            except OSError as error:
                raise self._here.failure(f"process {self._pid} cannot be read any more: {error}") from error
            # A thread's job outlives the moment at which it is known to be done, and the buffers may be freed then.
            del tensor, own, spare
            self._here.tell_read()

        return _Received(self._readers, read)

    def close(self) -> None:
        self._there.close()
        self._here.close()


class _Sent:
    """A message that has been announced: its tensor stays alive until the receiver confirms."""

    def __init__(self, line: AnnouncingEnd, number: int, tensor: torch.Tensor) -> None:
        self._line, self._number, self._kept = line, number, tensor

    def wait(self) -> None:
        self._line.await_read(self._number)


class _Received:
    """A message that a thread of ``readers`` reads."""

    def __init__(self, readers: Workers, read: Callable[[], None]) -> None:
        self._done = readers.submit(read)

    def wait(self) -> None:
        self._done.result()


class _Piece(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def read_memory(pid: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous tensor from another process of this machine, starting at ``address``.

    Raises:
        OSError: there is no such process or address, or it may not be read.
    """
    done = 0
    while done < into.nbytes:
        here = _Piece(into.data_ptr() + done, into.nbytes - done)
        there = _Piece(address + done, into.nbytes - done)
        num_bytes = _process_vm_readv()(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if num_bytes <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += num_bytes


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    return function


def _read_added(pid: int, address: int, total: torch.Tensor, own: torch.Tensor, spare: torch.Tensor | None) -> None:
    size = _PIECE_NUMEL if torch.get_num_threads() == 1 else _ALONE_NUMEL
    for piece, mine in zip(total.split(size), own.split(size), strict=True):
        arrived = piece if spare is None else spare[: piece.numel()]
        read_memory(pid, address, arrived)
        torch.add(arrived, mine, out=piece)
        address += piece.nbytes


def open_channels(
    group: dist.ProcessGroup, readers: Workers, rank_timeout_seconds: float, *, reads_memory: bool = True
) -> dict[int, Channel]:
    """This rank's channels to all others, by rank in ``group``. All its ranks call it, and agree for each pair.

    ``rank_timeout_seconds`` is the time a rank of this host is waited for; for others it is the group's own timeout.
    ``reads_memory``: whether memory is read at all, or all messages go through gloo.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    peers = [peer for peer in range(num_ranks) if peer != rank]
    with contextlib.closing(Calls(rank_timeout_seconds)) as calls:
        word = torch.tensor([secrets.randbits(62)], device="cpu")
        here = torch.tensor([os.getpid(), word.data_ptr(), int(word), _machine(), calls.name], device="cpu")
        words = [of_rank.tolist() for of_rank in _from_all(group, here)]
        there: dict[int, AnnouncingEnd] = {}
        for peer in peers:
            if reads_memory and _can_read(words[peer][:4], _machine()):
                line = calls.call(peer, name=words[peer][4], process=words[peer][0])
                if line is not None:
                    there[peer] = line
        reads = torch.tensor([peer in there for peer in range(num_ranks)], device="cpu")
        every = _from_all(group, reads)  # which also keeps ``word`` until all have tried
        both = [peer for peer in peers if every[rank][peer] and every[peer][rank]]
        lines = calls.take({peer: words[peer][0] for peer in both})
    machine = _machine()
    channels: dict[int, Channel] = {
        peer: GlooChannel(group, peer, is_near=bool(machine) and words[peer][3] == machine) for peer in peers
    }
    for peer in both:
        channels[peer] = MemoryChannel(there[peer], lines[peer], words[peer][0], readers)
    return channels


def _from_all(group: dist.ProcessGroup, here: torch.Tensor) -> list[torch.Tensor]:
    of_ranks = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, here, group=group)
    return of_ranks


def _can_read(words: Sequence[int], machine: int) -> bool:
    """True if the word that another rank has announced is found at its address; False if machines are unknown."""
    pid, address, word, its_machine = words
    if not machine or machine != its_machine:
        return False
    read = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        read_memory(pid, address, read)
    except OSError:
        return False
    return int(read) == word


def _machine() -> int:
    """A number that is the same for all processes under one running kernel; 0 if unknown, or without such reads."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if sys.platform != "linux" or not boot_id.exists():
        return 0
    return int(boot_id.read_text().strip().replace("-", ""), 16) % 2**62
