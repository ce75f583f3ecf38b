"""Capture a device's work into CUDA graphs: all torch calls that this takes."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerofx.ir.aliasing import storage_bytes

Launch = Callable[[], None]


class Capturer(Protocol):
    """Captures stretches of work one after the other. They share memory, and are launched in the order of capture."""

    def warm_up(self) -> AbstractContextManager[None]:
        """A block whose work is not captured, in which libraries prepare for the capture."""

    def session(self, *, fresh: bool) -> AbstractContextManager[None]:
        """A block in which all stretches of one step are captured. ``fresh``: no earlier capture is left."""

    def begin(self) -> None:
        """Begin a stretch: from here on work is captured and not done."""

    def end(self) -> Launch:
        """End the stretch; returns the function that launches its work."""

    def give_up(self) -> None:
        """Discard the stretch, after an error inside it."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep it alive: later captures may reuse the memory."""


class CudaCapturer:
    """CUDA graphs of one memory pool, captured on a stream of their own, as torch requires.

    The capture mode is thread-local: other threads (a data loader's that pins memory, NCCL's watchdog) continue with
    work that does not touch the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def session(self, *, fresh: bool) -> Iterator[None]:
        if fresh or self._pool is None:
            # A pool that all graphs have left cannot be entered again.
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self._device)
        gc.collect()  # a graph that is destroyed during a capture would end it
        torch.cuda.empty_cache()  # the pool takes the place of what warming up left in the allocator's cache
        with torch.cuda.stream(self._stream):
            yield

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Launch:
        graph, self._graph = self._graph, None
        assert graph is not None, "a stretch has begun"
        with warnings.catch_warnings():
            # A stretch may only have made a buffer.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        return graph.replay

    def give_up(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            # torch's allocator may go on asking a graph whose capture it was not told the end of.
            self._failed.append(graph)
            with contextlib.suppress(RuntimeError):  # it raises what is being raised already
                graph.capture_end()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = storage_bytes(tensor)
        if not num_bytes:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        flat = torch.as_tensor(_Memory(tensor.data_ptr(), num_bytes), device=tensor.device)
        return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True)
class _Memory:
    """Bytes on a CUDA device, for ``torch.as_tensor``."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }
