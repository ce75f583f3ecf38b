"""Copies between device and host that overlap with computation, on a stream for each direction."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from zerofx.codegen.kernels.current_device import device_guard
from zerofx.ir.streams import TO_DEVICE, TO_HOST
from zerofx.runtime.measure.spans import SpanLog

NUM_LAUNCHERS = 32  # copies that may wait at once for what comes before them, each of which leaves its link to others


class Copy(Protocol):
    """A copy under way."""

    def join(self) -> None:
        """Block this thread until the bytes are there."""

    def finish(self) -> None:
        """Hold computation until the bytes are there; raises what went wrong."""

    @property
    def is_busy(self) -> bool:
        """True if its bytes may still be read and written: on CUDA also after ``finish``."""


class Copies(Protocol):
    """Starts copies of bytes; those of one stream run one after the other, each once it may begin."""

    def start(
        self, stream: str, source: torch.Tensor, destination: torch.Tensor, after: Callable[[], None] | None = None
    ) -> Copy:
        """Copy ``source`` to ``destination`` (uint8, of one length), once ``after`` has returned if it is given."""

    def settle(self) -> None:
        """Block until nothing is under way."""

    def close(self) -> None:
        """End all threads."""


class Workers:
    """Threads that run jobs in the order they are given."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"zerofx-{name}")
        self._running: set[Future[None]] = set()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future = self._executor.submit(job)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def settle(self) -> None:
        concurrent.futures.wait(list(self._running))

    def close(self) -> None:
        self._executor.shutdown()


class ThreadCopies:
    """Copies on a CPU machine: a thread for each direction, and others for what is given to it once it may begin."""

    def __init__(self, log: SpanLog) -> None:
        self._log = log
        self._launcher = Workers("launch", NUM_LAUNCHERS)
        self._workers = {stream: Workers(stream) for stream in (TO_HOST, TO_DEVICE)}

    def start(
        self, stream: str, source: torch.Tensor, destination: torch.Tensor, after: Callable[[], None] | None = None
    ) -> Copy:
        def run() -> None:
            # It lets go of the tensors before it is known to be done, so that computation frees their memory.
            nonlocal source, destination
            try:
                with self._log.span(stream, source.nbytes):
                    destination.copy_(source)
            finally:
                del source, destination

        def launch() -> None:
            nonlocal after
            assert after is not None
            try:
                after()
            finally:
                del after
            self._workers[stream].submit(run).result()

        return FutureCopy(self._workers[stream].submit(run) if after is None else self._launcher.submit(launch))

    def settle(self) -> None:
        for workers in (self._launcher, *self._workers.values()):
            workers.settle()

    def close(self) -> None:
        for workers in (self._launcher, *self._workers.values()):
            workers.close()


class FutureCopy:
    """A copy that a future stands for, or an update on the host, which reads and writes its memory as copies do."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def join(self) -> None:
        self._future.result()

    finish = join

    @property
    def is_busy(self) -> bool:
        return not self._future.done()


class CudaCopies:
    """Copies between a CUDA device and pinned memory: a CUDA stream for each direction.

    A copy starts after what the compute stream has been given when it is issued. A copy to the device whose source is
    still to be read from a file, or to be updated, is launched by a thread, once it has been. Threads begin on device
    0, where what they do would make a context (some hundred MB) that no plan has: they say which device they are for.
    """

    def __init__(self, device: torch.device, log: SpanLog) -> None:
        self._device, self._log = device, log
        self._streams = {stream: torch.cuda.Stream(device) for stream in (TO_HOST, TO_DEVICE)}
        self._launcher = Workers("launch", NUM_LAUNCHERS)
        self._launching = threading.Lock()  # what one copy gives its stream stays together

    def start(
        self, stream: str, source: torch.Tensor, destination: torch.Tensor, after: Callable[[], None] | None = None
    ) -> Copy:
        timed = self._log.is_running
        # Who waits for it is a thread of the host's, which would spin on a core that updates there need.
        reached, done = torch.cuda.Event(), torch.cuda.Event(enable_timing=timed, blocking=True)
        reached.record(torch.cuda.current_stream(self._device))

        def launch() -> None:
            if after is not None:
                after()
            with self._launching, device_guard(self._device), torch.cuda.stream(self._streams[stream]):
                self._streams[stream].wait_event(reached)
                begun = torch.cuda.Event(enable_timing=timed)
                begun.record(self._streams[stream])
                destination.copy_(source, non_blocking=True)
                done.record(self._streams[stream])
            if timed:
                self._log.add_events(stream, begun, done, source.nbytes)

        if after is None:
            launch()
            return _CudaCopy(self._device, done, None)
        return _CudaCopy(self._device, done, self._launcher.submit(launch))

    def settle(self) -> None:
        self._launcher.settle()
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        self.settle()
        self._launcher.close()


class _CudaCopy:
    def __init__(self, device: torch.device, done: torch.cuda.Event, launched: Future[None] | None) -> None:
        self._device = device
        self._done = done
        self._launched = launched

    def join(self) -> None:
        if self._launched is not None:
            self._launched.result()
        with device_guard(self._device):
            self._done.synchronize()

    def finish(self) -> None:
        if self._launched is not None:
            self._launched.result()
        torch.cuda.current_stream(self._device).wait_event(self._done)

    @property
    def is_busy(self) -> bool:
        # An event that is still to be recorded counts as reached.
        return (self._launched is not None and not self._launched.done()) or not self._done.query()
