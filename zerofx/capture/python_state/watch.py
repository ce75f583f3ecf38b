"""The Python state of one step's objective: what each capture has read of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from zerofx.capture.by_layer.forward_record import record_forward
from zerofx.capture.objective.loss import Objective
from zerofx.capture.python_state.numbers import Tape
from zerofx.capture.python_state.reads import Change, Numbers, Reads, State
from zerofx.capture.python_state.walk import walk
from zerofx.capture.traceable import Forward
from zerofx.errors import UsageError
from zerofx.units import first_few


class PythonState:
    """What the objective of ``model`` may read; hooks that are instances of ``ignored`` are the step's own."""

    def __init__(self, model: nn.Module, objective: Objective, ignored: tuple[type, ...]) -> None:
        self._objective, self._ignored, self._numbers = objective, ignored, Numbers()
        named = {"model": model, "forward": objective.forward, "loss_fn": objective.loss_fn}
        self._latest: tuple[int, Reads] | None = None
        objective.reads = self._reads_of_run
        self._roots = {name: root for name, root in named.items() if root is not None}

    def note(self, changes: Sequence[Change]) -> None:
        """Learn from what a capture is made anew for: a number that has changed twice is an input from then on.

        Raises:
            UsageError: a number goes on changing that is no input, or that a step goes on with as it is.
        """
        if fixed := [change for change in changes if self._numbers.is_fixed(change.path)]:
            raise UsageError(
                f"expected a number that changes from step to step where another can take its place (an attribute, an "
                f"item of a list), found {first_few(map(str, fixed))} in a tuple or in a function's defaults: keep it "
                f"elsewhere, pass it as a tensor in the batch, or keep it in a buffer"
            )
        if settled := [change for change in changes if change.is_settled]:
            raise UsageError(
                f"expected a number that changes from step to step to be one that tensors are added to, or multiplied "
                f"or divided by, found {first_few(map(str, settled))}, which the forward uses otherwise: compute with "
                f"tensors (torch.cos for math.cos), pass it as a tensor in the batch, or keep it in a buffer"
            )
        self._numbers.note(changes)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """While open, stand-ins are in the places of numbers that steps have as inputs."""
        outside = self._objective.outside
        if outside.tape.is_open:
            yield
            return
        outside.tape = Tape(is_open=bool(self._numbers.paths))
        self._objective.effects.clear()
        if not self._numbers.paths:
            yield
            return
        self._numbers.find(self._state(frozenset()))
        with self._numbers.stood_for(outside.tape):
            yield

    def leaves_alone(self, forward: Forward, reads: Reads) -> bool:
        """Whether what has changed since ``reads`` leaves a forward as it was with those values."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                now = record_forward(forward).text()
                with reads.as_captured() as is_whole:
                    return is_whole and record_forward(forward).text() == now
        except Exception:  # noqa: BLE001 - what the forward raises is said where it is captured
            return False

    def read(self, constants: Iterable[torch.Tensor]) -> Reads:
        """All that has been read in traces so far, with its values now; ``constants`` are those of the step made."""
        memory = frozenset(tensor.untyped_storage().data_ptr() for tensor in constants)
        unread = frozenset(f"model.{name}" for name in self._objective.unread)
        return Reads(lambda: self._state(memory), self._numbers, self._objective.outside.tape, unread)

    def _reads_of_run(self) -> Reads:
        """The state at the begin of a run; walked through again where it, or the code that is known, has changed."""
        num_known = len(self._objective.executed.globals)
        if self._latest is None or self._latest[0] != num_known or self._latest[1].changes():
            self._latest = num_known, Reads(lambda: self._state(frozenset()), self._numbers, Tape(is_open=False))
        return self._latest[1]

    def _state(self, constants: frozenset[int]) -> State:
        return walk(self._roots, self._objective.executed, self._ignored, constants)
