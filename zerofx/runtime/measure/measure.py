"""Measure a step by running it: the same quantities as a plan's prediction.

Memory is counted in allocations, not in resident pages: on CPU from the profiler's record of each of them, on CUDA from
the caching allocator's own maximum. Both start from the memory that the step holds throughout, so that other users of
the device do not count: on CUDA also memory that libraries keep from their first use on, such as a workspace of cuBLAS
for each stream, and that Inductor's kernels take while they are tuned. So memory is measured in the last of several
steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import COMPUTE, HOST
from zerofx.runtime.comm.transport import Pending
from zerofx.runtime.executor import Outcome, Runtime, StepFunction, functions_of, replace_functions
from zerofx.runtime.measure.spans import Span, SpanLog, StreamUse, busy_seconds, stream_uses, transfers_of
from zerofx.runtime.tiers.stored import Stored
from zerofx.scheduler.cost.cpu.peaks import CpuPeak, CudaPeak
from zerofx.scheduler.cost.links import Transfer
from zerofx.units import format_bytes, format_seconds, text_table

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Measurements of ``num_steps`` steps on this rank; fields as in ``Plan``, seconds are medians, ``print`` shows
    all.

    ``exposed_seconds`` is the time in which computation waited for collectives and for copies between tiers.
    ``between_seconds`` is the rest of a step, from its call to its return, in which neither a region computed nor
    computation waited. On a CPU that is Python's share, including the stopwatches. ``model_state_bytes`` counts the
    existing tensors, and gradients as ZeRO does (1910.02054, section 3). ``region_seconds`` are for one call of each
    distinct region, by the region's key. ``timeline`` is one step's: the spans of regions, of collectives and of copies
    between tiers that end in it, at negative seconds if they began in the step before; ``streams`` sums it up.
    ``transfers`` are the collectives and copies of all steps, by stream.
    """

    peak_bytes: dict[str, int]
    model_state_bytes: int
    wire_bytes: int
    step_seconds: float
    exposed_seconds: float
    num_steps: int
    link_bytes: dict[str, int] = field(default_factory=dict)
    region_seconds: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Span, ...] = ()
    transfers: Mapping[str, tuple[Transfer, ...]] = field(default_factory=dict)
    between_seconds: float = 0.0

    @property
    def streams(self) -> dict[str, StreamUse]:
        """The use of each stream in the step of ``timeline``: bytes, seconds, and how many of these were hidden."""
        return stream_uses(self.timeline)

    def __str__(self) -> str:
        lines = [
            *([f"peak on the {tier}", format_bytes(size)] for tier, size in self.peak_bytes.items()),
            ["time of a step", format_seconds(self.step_seconds)],
            ["waits for communication", format_seconds(self.exposed_seconds)],
            ["neither computes nor waits", format_seconds(self.between_seconds)],
            ["sent in a step", format_bytes(self.wire_bytes)],
            ["parameters, gradients, optimizer states", format_bytes(self.model_state_bytes)],
        ]
        headers = ["per rank", f"measured, {self.num_steps} step{'' if self.num_steps == 1 else 's'}"]
        return text_table(lines, headers)


@dataclass(frozen=True)
class _Run:
    """One measured run; None for unmeasured values. ``own_seconds``: the meter's own overhead."""

    seconds: float
    exposed_seconds: float
    sent_bytes: int
    peak_bytes: int
    profiled: bool
    tier_peaks: dict[str, int]
    link_bytes: dict[str, int]
    region_seconds: dict[str, float]
    timeline: tuple[Span, ...]
    own_seconds: float
    between_seconds: float = 0.0


class Meter:
    """Wraps a step's function, and measures each call."""

    def __init__(self, device: torch.device, num_steps: int) -> None:
        self._device = device
        self._num_steps = num_steps
        self._runs: list[_Run] = []
        self._state: Mapping[str, Any] = {}
        self._log: SpanLog | None = None

    def close(self) -> None:
        """Log nothing any more."""
        if self._log is not None:
            self._log.stop()

    @property
    def num_runs(self) -> int:
        """Runs that have been measured so far."""
        return len(self._runs)

    def __call__(
        self,
        function: StepFunction,
        functions: Mapping[str, str],
        runtime: Runtime,
        state: Mapping[str, Any],
        batch: Mapping[str, torch.Tensor],
    ) -> Outcome:
        """Run ``function`` once. Memory is measured in the last of ``num_steps`` runs, which the profiler slows on CPU.

        ``functions`` are the names of its region functions, by region key.
        """
        entered = time.perf_counter()
        self._state = state
        last = len(self._runs) == self._num_steps - 1
        log = self._log = runtime.tiers.log
        waits, regions = _Stopwatch(self._device), _Stopwatch(self._device, log)
        timed = _TimedRuntime(runtime, waits)
        called = functions_of(function, functions.values())
        function = replace_functions(
            function, {name: _TimedRegion(called[name], key, regions) for key, name in functions.items()}
        )
        sent, moved = runtime.sent_bytes, dict(runtime.tiers.moved_bytes)
        runtime.tiers.reset_peak()
        peak = (CudaPeak(self._device) if self._device.type == "cuda" else CpuPeak()) if last else None
        _synchronise(self._device)
        with peak or contextlib.nullcontext():
            log.start(self._device)
            try:
                began = time.perf_counter()
                outcome = function(timed, state, batch)  # type: ignore[arg-type]  # has a runtime's methods
                _synchronise(self._device)
                seconds = time.perf_counter() - began
            finally:
                timeline = log.take()
        held = persistent_bytes((*state.values(), *batch.values()))
        self._runs.append(
            _Run(
                seconds,
                sum(sum(spans) for spans in waits.spans().values()),
                runtime.sent_bytes - sent,
                held + runtime.arena.num_bytes + peak.num_bytes if peak is not None else 0,
                profiled=isinstance(peak, CpuPeak),
                tier_peaks={tier: size for tier, size in runtime.tiers.peak_bytes.items() if size},
                link_bytes={
                    stream: size - moved[stream]
                    for stream, size in runtime.tiers.moved_bytes.items()
                    if size > moved[stream]
                },
                region_seconds={key: statistics.fmean(spans) for key, spans in regions.spans().items()},
                timeline=timeline,
                own_seconds=time.perf_counter() - entered - seconds,
            )
        )
        return outcome

    @contextlib.contextmanager
    def whole_step(self) -> Iterator[None]:
        """A block that runs one step, from its call to its return; a step that is broken off is not measured."""
        num_before, began = self.num_runs, time.perf_counter()
        yield
        if self.num_runs == num_before:
            return
        run = self._runs[-1]
        known = busy_seconds(run.timeline) + run.exposed_seconds + run.own_seconds
        self._runs[-1] = replace(run, between_seconds=max(0.0, time.perf_counter() - began - known))

    def result(self, step: StepGraph, layout: BucketLayout, stage: int) -> Measurement:
        """The measurement over all runs."""
        timed = [run for run in self._runs if not run.profiled] or self._runs
        return Measurement(
            peak_bytes={"device": max(run.peak_bytes for run in self._runs), **self._runs[-1].tier_peaks},
            model_state_bytes=self._model_state_bytes(step, layout, stage),
            wire_bytes=self._runs[-1].sent_bytes,
            step_seconds=statistics.median(run.seconds for run in timed),
            exposed_seconds=statistics.median(run.exposed_seconds for run in timed),
            num_steps=len(self._runs),
            link_bytes=self._runs[-1].link_bytes,
            region_seconds=_medians([run.region_seconds for run in timed]),
            timeline=timed[-1].timeline,
            transfers=_concatenate(transfers_of(run.timeline) for run in timed),
            between_seconds=statistics.median(run.between_seconds for run in timed),
        )

    def _model_state_bytes(self, step: StepGraph, layout: BucketLayout, stage: int) -> int:
        counted = (Role.FULL, Role.SHARD, Role.MASTER, Role.STATE)
        held = [self._state[node.name] for node in step.placeholders() if placeholder(node).role in counted]
        gradients = sum(
            bucket.gradient_slice_bytes if stage >= 2 else bucket.gradient_bytes
            for bucket in layout.buckets
            if bucket.trainable
        )
        slower = sum(stored.lease.num_bytes for stored in held if isinstance(stored, Stored))
        return persistent_bytes(held) + slower + gradients


def persistent_bytes(values: Iterable[Any]) -> int:
    """Bytes of distinct memory on the device that tensors address; a view of another adds nothing.

    Numbers have none, nor have values stored in a slower tier.
    """
    spans = sorted((v.data_ptr(), v.data_ptr() + storage_bytes(v)) for v in values if isinstance(v, torch.Tensor))
    total = reached = 0
    for start, end in spans:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _concatenate(runs: Iterable[Mapping[str, tuple[Transfer, ...]]]) -> dict[str, tuple[Transfer, ...]]:
    joined: dict[str, tuple[Transfer, ...]] = {}
    for run in runs:
        for stream, transfers in run.items():
            joined[stream] = joined.get(stream, ()) + transfers
    return joined


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for run in runs for key in run)
    return {key: statistics.median(run[key] for run in runs if key in run) for key in keys}


class _Stopwatch:
    """Spans of time by name: of the host, or of a CUDA device's compute stream; also noted in ``log``, if given."""

    def __init__(self, device: torch.device, log: SpanLog | None = None) -> None:
        self._log = log or SpanLog()
        self._on_cuda = device.type == "cuda"
        self._seconds: dict[str, list[float]] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self, name: str, stream: str = COMPUTE) -> Iterator[None]:
        if self._on_cuda and stream == COMPUTE:
            # The host runs ahead of a CUDA device; the time of the device's stream is between these two events.
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            yield
            after.record()
            self._events.append((name, before, after))
            self._log.add_events(stream, before, after)
        else:
            began = time.perf_counter()
            with self._log.span(stream):
                yield
            self._seconds.setdefault(name, []).append(time.perf_counter() - began)

    def spans(self) -> dict[str, list[float]]:
        """Seconds of every span; on CUDA, once the device is synchronised."""
        seconds = {name: list(spans) for name, spans in self._seconds.items()}
        for name, before, after in self._events:
            seconds.setdefault(name, []).append(float(before.elapsed_time(after)) / 1e3)
        return seconds


@dataclass(frozen=True)
class _TimedRegion:
    """A region function with a stopwatch."""

    function: Callable[[list[Any]], Any]
    key: str
    watch: _Stopwatch

    def __call__(self, inputs: list[Any]) -> Any:
        with self.watch.measure(self.key):
            return self.function(inputs)

    def run_on_host(self, inputs: list[Any]) -> Any:
        with self.watch.measure(self.key, HOST):
            return self.function(inputs)


class _TimedRuntime:
    """A runtime that also measures how long computation waits for pending operations."""

    def __init__(self, runtime: Runtime, waits: _Stopwatch) -> None:
        self._runtime = runtime
        self._waits = waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def wait(self, pending: Pending[T], source: object = None) -> T:
        with self._waits.measure("wait"):
            return self._runtime.wait(pending, source)

    def host(self, function: Callable[[list[Any]], Any], inputs: list[Any], bucket: int) -> None:
        self._runtime.host(function.run_on_host if isinstance(function, _TimedRegion) else function, inputs, bucket)

    def settle(self, bucket: int, held: Sequence[object] = (), *, back: bool = False) -> None:
        with self._waits.measure("settle"):
            self._runtime.settle(bucket, held, back=back)

    def broadcast(self, buffers: list[torch.Tensor]) -> None:
        with self._waits.measure("broadcast"):
            self._runtime.broadcast(buffers)


def _synchronise(device: torch.device) -> None:
    # Of what the step's caller reads: copies may run on into the next step, as they do where nobody measures.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
