"""Decide, step by step, whether a step's kernels are launched one by one or as CUDA graphs, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.errors import CompilerError, notify
from zerofx.lowering.load import CompiledStep
from zerofx.runtime.cuda_graphs.capturing import Capturer
from zerofx.runtime.cuda_graphs.recording import CannotRecordError, Recording, own_memory, record
from zerofx.runtime.executor import Outcome, Runtime
from zerofx.runtime.measure.measure import Meter

# Kernels are loaded, and libraries choose among them and take their workspaces, in the first steps of each shape.
NUM_WARM_UP_STEPS = 2
# What moves more often than this moves in every step, and recording takes longer than a step.
MOST_RECORDINGS = 8


@dataclass(frozen=True)
class Launches:
    """Kernel launches of a step: so many CUDA graphs with so many calls between them, or one by one.

    ``reason`` says why they are not launched as graphs, or not yet; empty if they are.
    """

    num_graphs: int = 0
    num_calls: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"kernels are launched one by one, not as CUDA graphs: {self.reason}"
        return f"kernels are launched as {self.num_graphs} CUDA graphs with {self.num_calls} calls between them"


@dataclass
class _Entry:
    step: CompiledStep
    obstacle: str
    num_steps: int = 0
    num_recordings: int = 0
    recording: Recording | None = None


class GraphedSteps:
    """Runs compiled steps: the first runs of each as they are, later ones from a recording as long as it fits.

    Args:
        make_capturer: called once, before the first step that is to be captured.
        obstacle: the reason why a step cannot be captured; empty if there is none.
        required: whether a step that turns out to be impossible to capture is an error.
    """

    def __init__(
        self, make_capturer: Callable[[], Capturer], obstacle: Callable[[CompiledStep], str], *, required: bool = False
    ) -> None:
        self._make_capturer = make_capturer
        self._obstacle = obstacle
        self._required = required
        self._capturer: Capturer | None = None
        self._entries: dict[int, _Entry] = {}

    def launches(self, step: CompiledStep) -> Launches:
        """The launches of ``step``."""
        entry = self._entry(step)
        if entry.obstacle:
            return Launches(reason=entry.obstacle)
        if entry.recording is None:
            return Launches(reason=f"they are recorded after {NUM_WARM_UP_STEPS} steps of this batch shape")
        return Launches(entry.recording.num_graphs, entry.recording.num_calls)

    def _entry(self, step: CompiledStep) -> _Entry:
        if id(step) not in self._entries:
            self._entries[id(step)] = _Entry(step, self._obstacle(step))
        return self._entries[id(step)]

    def run(
        self,
        step: CompiledStep,
        runtime: Runtime,
        state: Mapping[str, Any],
        batch: Mapping[str, torch.Tensor],
        meter: Meter | None,
    ) -> Outcome:
        """Run one step; returns its loss, and the norm of gradients that are clipped. ``meter`` measures it, without
        graphs.

        Raises:
            CompilerError: graphs are required, and the step could not be captured; nothing has been changed.
        """
        if meter is not None:
            return meter(step.function_for(runtime), step.emitted.functions, runtime, state, batch)
        entry = self._entry(step)
        if entry.obstacle:
            return step.function_for(runtime)(runtime, state, batch)
        capturer = self._capturer = self._capturer or self._make_capturer()
        if entry.num_steps < NUM_WARM_UP_STEPS:
            entry.num_steps += 1
            with capturer.warm_up():
                outcome = step.function_for(runtime)(runtime, state, batch)
            return own_memory(outcome)  # on the stream of the caller
        if entry.recording is None or not entry.recording.fits(state):
            self._record(capturer, entry, runtime, state, batch)
        if entry.recording is None:
            return step.function_for(runtime)(runtime, state, batch)
        return entry.recording.run(runtime, state, batch)

    def forget(self, step: CompiledStep) -> None:
        """Forget ``step``, which is not run any more."""
        self._entries.pop(id(step), None)

    def clear(self) -> None:
        """Drop all recordings, and their memory."""
        self._entries.clear()

    def _record(
        self,
        capturer: Capturer,
        entry: _Entry,
        runtime: Runtime,
        state: Mapping[str, Any],
        batch: Mapping[str, torch.Tensor],
    ) -> None:
        entry.recording = None
        entry.num_recordings += 1
        if entry.num_recordings > MOST_RECORDINGS:
            entry.obstacle = (
                f"buffers of the model, or states, have been replaced by others {MOST_RECORDINGS - 1} times: write "
                f"into them instead"
            )
            return
        regions = entry.step.regions
        names = entry.step.emitted.functions
        fresh = all(entry_of_shape.recording is None for entry_of_shape in self._entries.values())
        try:
            entry.recording = record(
                capturer,
                entry.step.function,
                {names[region.key]: region.num_outputs for region in regions},
                frozenset(names[region.key] for region in regions if region.is_update),
                runtime,
                state,
                batch,
                fresh=fresh,
            )
        except (RuntimeError, CannotRecordError) as error:
            entry.obstacle = f"recording failed ({str(error).splitlines()[0]})"
            if self._required:
                raise CompilerError(
                    f"expected a step that CUDA graphs can be made of, since cuda_graphs=True, found that "
                    f"{entry.obstacle}: give cuda_graphs='auto' to launch its kernels one by one"
                ) from error
            notify(
                f"the step's kernels are launched one by one: {entry.obstacle}; with cuda_graphs=False nothing is tried"
            )
