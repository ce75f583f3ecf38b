"""Log when each stream of a running step was busy: computation, updates on the host, and copies between tiers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zerofx.ir.streams import COMPUTE, HOST, NVME_READ, NVME_WRITE
from zerofx.scheduler.cost.links import Transfer


@dataclass(frozen=True)
class Span:
    """One stretch of work on a stream: seconds from the start of the step, and bytes moved (0 for computation)."""

    stream: str
    start_seconds: float
    seconds: float
    num_bytes: int = 0

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.seconds


class SpanLog:
    """Notes spans between ``start`` and ``stop``, from any thread; nothing at other times.

    Work that runs on into the next step is that step's, and begins before it: at negative seconds.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._began = 0.0
        self._first: torch.cuda.Event | None = None
        self._spans: list[Span] = []  # from the clock's zero on
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event, int]] = []

    def start(self, device: torch.device) -> None:
        """Start the log of a step, the first or another after ``take``."""
        if not self.is_running:
            self._spans, self._events = [], []
        if device.type == "cuda":
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record(torch.cuda.current_stream(device))
        self.is_running, self._began = True, time.perf_counter()

    @contextlib.contextmanager
    def span(self, stream: str, num_bytes: int = 0) -> Iterator[None]:
        """Log the block as a stretch of the host's work on ``stream``."""
        began = time.perf_counter()
        yield
        self.add(stream, began, time.perf_counter(), num_bytes)

    def add(self, stream: str, began: float, ended: float, num_bytes: int = 0) -> None:
        """Log a stretch of work between two readings of ``time.perf_counter``."""
        if self.is_running:
            self._spans.append(Span(stream, began, ended - began, num_bytes))

    def add_events(self, stream: str, before: torch.cuda.Event, after: torch.cuda.Event, num_bytes: int = 0) -> None:
        """Log a stretch of work of a CUDA device, between two timing events."""
        if self.is_running:
            self._events.append((stream, before, after, num_bytes))

    def take(self) -> tuple[Span, ...]:
        """The step's spans that are over, in order of their start; those that are not stay for the next."""
        (spans, events), began, first = (self._spans, self._events), self._began, self._first
        self._spans, self._events = [], []
        spans = [replace(span, start_seconds=span.start_seconds - began) for span in spans]
        for stream, before, after, num_bytes in events:
            if not after.query():
                self._events.append((stream, before, after, num_bytes))
                continue
            assert first is not None, "a device's events come after the first one"
            start = float(first.elapsed_time(before)) / 1e3
            spans.append(Span(stream, start, float(before.elapsed_time(after)) / 1e3, num_bytes))
        return tuple(sorted(spans, key=lambda span: (span.start_seconds, span.end_seconds)))

    def stop(self) -> None:
        """End the log."""
        self.is_running, self._first, self._spans, self._events = False, None, [], []


@dataclass(frozen=True)
class StreamUse:
    """The use of a stream in a step.

    ``busy_seconds`` is the time in which at least one stretch was running, ``hidden_seconds`` the part of it in which
    regions computed, on the device or the host.
    """

    num_bytes: int
    busy_seconds: float
    hidden_seconds: float


def stream_uses(spans: Sequence[Span]) -> dict[str, StreamUse]:
    """Every stream that was busy, in order of its first stretch."""
    computing = _merge(span for span in spans if span.stream in (COMPUTE, HOST))
    uses = {}
    for stream in dict.fromkeys(span.stream for span in spans):
        own = [span for span in spans if span.stream == stream]
        busy = _merge(own)
        both = sum(
            max(0.0, min(span.end_seconds, other.end_seconds) - max(span.start_seconds, other.start_seconds))
            for span in busy
            for other in computing
        )
        uses[stream] = StreamUse(sum(span.num_bytes for span in own), sum(span.seconds for span in busy), both)
    return uses


def busy_seconds(spans: Sequence[Span]) -> float:
    """The time in which regions computed, on the device or the host."""
    return sum(span.seconds for span in _merge(span for span in spans if span.stream in (COMPUTE, HOST)))


def transfers_of(spans: Iterable[Span]) -> dict[str, tuple[Transfer, ...]]:
    """The transfers of each stream that moves bytes, in order.

    A drive is read and written in blocks, several at a time: there, overlapping stretches are one transfer.
    """
    moving: dict[str, list[Span]] = {}
    for span in spans:
        if span.num_bytes:
            moving.setdefault(span.stream, []).append(span)
    return {
        stream: tuple(
            Transfer(span.num_bytes, span.seconds)
            for span in (_merge(own) if stream in (NVME_READ, NVME_WRITE) else own)
        )
        for stream, own in moving.items()
    }


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Merge stretches into ones without overlap that cover the same time."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start_seconds):
        if merged and span.start_seconds <= merged[-1].end_seconds:
            before = merged[-1]
            seconds = max(before.end_seconds, span.end_seconds) - before.start_seconds
            merged[-1] = replace(before, seconds=seconds, num_bytes=before.num_bytes + span.num_bytes)
        else:
            merged.append(span)
    return merged
