"""Streams of a GPU, played on a CPU so that races show: a side stream does what it is given as late as it may.

Computation runs at once. A copy or collective that is given to another stream runs only when computation, the host or a
third stream comes to wait for it, or for something after it there; and before that, what its own stream waits for.
So where a wait is missing, or memory is written that is still to be read, other numbers come out than without streams.
A message between two ranks begins when a stream that has nothing else to do is given it, as its other end does then.
Noted as races, since no number tells of them here:

- memory that everybody has let go of before the work that uses it has run, unless the stream was recorded for it: the
  allocator would give it to computation meanwhile;
- work that a thread of the host gives to a stream without having it wait for computation before;
- a collective that runs before another one that was started before it, on whichever stream: on another rank they may
  run in another order, and each wait for the other;
- a collective on the stream that computes, which no other stream waits for.

The classes for CUDA are what runs (``Nccl`` over gloo, ``CudaCopies``), as ``on_streams`` puts them in the places of a
CPU's. Not played: pinned memory, NCCL itself, CUDA graphs, and time.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerofx.runtime.comm import collectives
from zerofx.runtime.comm.nccl import Nccl
from zerofx.runtime.tiers import tiers
from zerofx.runtime.tiers.copies import CudaCopies
from zerofx.torch_private import distributed

CPU = torch.device("cpu")


class Streams:
    """A device's streams: the one that computes, and those that the runtime makes."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.num_given = 0
        self.lock = threading.RLock()  # of the host's threads
        self.recorded: set[tuple[Stream, int]] = set()
        self.collectives: list[int] = []  # that have been started and not run, in their order
        self.compute = Stream(self)
        self.sides: list[Stream] = []
        self._entered = threading.local()

    def side(self, _device: object = None, priority: int = 0) -> Stream:
        self.sides.append(Stream(self))
        return self.sides[-1]

    def current(self, _device: object = None) -> Stream:
        found: Stream = getattr(self._entered, "stream", self.compute)
        return found

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        self._entered.stream = stream
        try:
            with _Copying(stream):
                yield
        finally:
            self._entered.stream = self.compute
            stream.behind_compute.discard(threading.get_ident())

    def start(self, what: str, run: Callable[[], object]) -> Callable[[], None]:
        """A collective that starts now; returns what runs it."""
        number = self.num_given
        self.collectives.append(number)

        def run_in_order() -> None:
            if self.collectives[0] != number:
                self.races.append(f"{what} runs before a collective that was started before it")
            self.collectives.remove(number)
            run()

        return run_in_order

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The memory of ``tensor`` is not reused before what ``stream`` has been given so far."""
        self.recorded.add((stream, tensor.untyped_storage()._cdata))

    def finish(self) -> None:
        """What nobody has waited for runs too."""
        for stream in self.sides:
            stream.synchronize()


class Messages:
    """What one call sends and receives; what is received is written where the call ends."""

    def __init__(self, operations: Sequence[Any]) -> None:
        self._calls = [(each.op, each.peer, each.group) for each in operations]
        self.tensors = [_alias(each.tensor) for each in operations]
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._works: list[Any] | None = None

    def begin(self) -> None:
        self._works = []
        for (call, peer, group), tensor in zip(self._calls, self.tensors, strict=True):
            moved = tensor
            if call is dist.irecv:
                moved = torch.empty_like(tensor)
                self._received.append((tensor, moved))
            self._works.append(call(moved, peer, group=group))

    def end(self) -> None:
        if self._works is None:
            self.begin()
        while self._works:
            self._works.pop().wait()
        for tensor, moved in self._received:
            ctypes.memmove(tensor.data_ptr(), moved.data_ptr(), moved.nbytes)


class Stream:
    """Work in order, of which the first ``num_done`` have run."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.work: list[Callable[[], None]] = []
        self.num_done = 0
        self._lock: contextlib.AbstractContextManager[object] = streams.lock
        self.behind_compute: set[int] = set()  # the host's threads that have had it wait for computation

    def give(
        self,
        what: str,
        run: Callable[[], object],
        used: Sequence[torch.UntypedStorage],
        num_own: int,
        messages: Messages | None = None,
    ) -> None:
        """``run`` uses memory that ``num_own`` tensors made for it here have a name for, each in one of ``used``. It
        ends ``messages``, if there are some."""
        if messages is not None and self.num_done == len(self.work):
            self._lock = contextlib.nullcontext()  # a thread's own: it waits, and others go on
            messages.begin()
        with self._lock:
            self.streams.num_given += 1
            if self is self.streams.compute:
                self.streams.races.append(f"{what} runs on the stream that computes")
            if threading.get_ident() not in self.behind_compute:
                self.streams.races.append(f"{what} begins without waiting for computation")

            def checked() -> None:
                for storage in used:
                    free = torch._C._storage_Use_Count(storage._cdata) <= 1 + num_own
                    if free and (self, storage._cdata) not in self.streams.recorded and storage.nbytes():
                        self.streams.races.append(f"{what} uses memory that has been let go of")
                run()

            self.work.append(checked)
            if self is self.streams.compute:
                self.synchronize()

    def reach(self, position: int) -> None:
        with self._lock:
            while self.num_done < position:
                self.num_done += 1
                work = self.work[self.num_done - 1]
                self.work[self.num_done - 1] = _nothing
                work()

    def synchronize(self) -> None:
        self.reach(len(self.work))

    def wait_event(self, event: Event) -> None:
        self._wait(event.stream, event.position)

    def wait_stream(self, other: Stream) -> None:
        self._wait(other, len(other.work))

    def _wait(self, other: Stream, position: int) -> None:
        if self is self.streams.compute:
            other.reach(position)
        elif other is self.streams.compute:
            self.behind_compute.add(threading.get_ident())
        else:
            self.work.append(lambda: other.reach(position))


class Event:
    """A place in a stream, once it is recorded; before, nothing to wait for."""

    def __init__(self, streams: Streams) -> None:
        self.stream, self.position = streams.compute, 0

    def record(self, stream: Stream) -> None:
        self.stream, self.position = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.reach(self.position)

    def query(self) -> bool:
        return self.stream.num_done >= self.position

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class _Copying(TorchDispatchMode):
    """Copies are given to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        into, source = args[:2]
        assert into.is_contiguous() and source.is_contiguous() and into.dtype == source.dtype
        there, here, num_bytes = into.data_ptr(), source.data_ptr(), source.nbytes
        used = [into.untyped_storage(), source.untyped_storage()]

        def copy() -> None:
            ctypes.memmove(there, here, num_bytes)

        self._stream.give("a copy", copy, used, 0)
        return into


def _given(streams: Streams, call: Callable[..., Any]) -> Callable[..., None]:
    """A collective that is given to the stream that is current."""

    def give(*tensors: Any, **kwargs: Any) -> None:
        own: list[torch.Tensor] = []

        def alias(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [alias(one) for one in value]
            if not isinstance(value, torch.Tensor):
                return value
            own.append(_alias(value))
            return own[-1]

        given = [alias(one) for one in tensors]
        used, most = _storages(own)
        own.clear()
        run = streams.start(call.__name__, lambda: call(*given, **kwargs))
        streams.current().give(call.__name__, run, used, most)

    return give


def _give_messages(streams: Streams) -> Callable[[list[Any]], list[Any]]:
    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        messages = Messages(operations)
        streams.current().give("a message", messages.end, *_storages(messages.tensors), messages)
        return []

    return batch_isend_irecv


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same memory."""
    with torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _storages(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], int]:
    """The memory of tensors, each once, and the most tensors with one."""
    used = list({each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}.values())
    return used, max(sum(each.untyped_storage()._cdata == s._cdata for each in tensors) for s in used)


def _nothing() -> None:
    """In the place of work that has run: what it held is let go of."""


@contextlib.contextmanager
def on_streams() -> Iterator[Streams]:
    """Inside, steps that are made and run on the CPU move tensors as on a GPU, on streams as late as they may be."""
    streams = Streams()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Stream", streams.side)
        patched.setattr(torch.cuda, "Event", lambda **_: Event(streams))
        patched.setattr(torch.cuda, "stream", streams.entered)
        patched.setattr(torch.cuda, "current_stream", streams.current)
        patched.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream))
        patched.setattr(distributed, "gather_many", _given(streams, _coalesced(distributed.gather_single)))
        patched.setattr(distributed, "gather_single", _given(streams, distributed.gather_single))
        patched.setattr(distributed, "reduce_single", _given(streams, distributed.reduce_single))
        for name in ("all_to_all_single", "all_reduce", "broadcast"):
            patched.setattr(dist, name, _given(streams, getattr(dist, name)))
        patched.setattr(dist, "batch_isend_irecv", _give_messages(streams))
        patched.setattr(collectives, "make_gloo_transport", lambda group, log, _timeout, **_: Nccl(group, CPU, log))
        patched.setattr(tiers, "ThreadCopies", lambda log: CudaCopies(CPU, log))
        yield streams
        streams.finish()


def _coalesced(gather_single: Callable[..., object]) -> Callable[..., None]:
    """Gloo has no gather of several: one after the other, as one piece of work."""

    def gather_many(group: Any, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        for full, shard in zip(fulls, shards, strict=True):
            if full.numel():
                gather_single(full, shard, group=group)

    return gather_many
