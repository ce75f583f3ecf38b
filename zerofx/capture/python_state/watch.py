"""The Python state of one step's objective: the reads of each capture."""

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
    """The state that the objective of ``model`` may read; hooks of the classes ``ignored`` are the step's own."""

    def __init__(self, model: nn.Module, objective: Objective, ignored: tuple[type, ...]) -> None:
        self._objective, self._ignored, self._numbers = objective, ignored, Numbers()
        named = {"model": model, "forward": objective.forward, "loss_fn": objective.loss_fn}
        self._latest: tuple[int, Reads] | None = None
        self._own: set[str] = set()
        objective.reads = self._reads_of_run
        self._roots = {name: root for name, root in named.items() if root is not None}

    def note(self, changes: Sequence[Change]) -> None:
        """Learn from the changes for which a capture is made again: a number that changed twice becomes an input.

        Raises:
            UsageError: a number keeps changing that cannot be an input, or that a step relies on.
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
    def substitute_numbers(self) -> Iterator[None]:
        """While open, stand-ins replace the numbers that steps have as inputs."""
        outside = self._objective.free_tensors
        if outside.tape.is_open:
            yield
            return
        outside.tape = Tape(is_open=bool(self._numbers.paths))
        self._objective.effects.clear()
        if not self._numbers.paths:
            yield
            return
        self._numbers.find(self._state(frozenset()))
        with self._numbers.substitute(outside.tape):
            yield

    def leaves_alone(self, forward: Forward, reads: Reads) -> bool:
        """True if the changes since ``reads`` leave the forward as it was."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                now = record_forward(forward).text()
                with reads.restore_captured() as is_whole:
                    return is_whole and record_forward(forward).text() == now
        except Exception:  # noqa: BLE001 - what the forward raises is said where it is captured
            return False

    def read(self, constants: Iterable[torch.Tensor]) -> Reads:
        """All reads of the traces so far, with their current values; ``constants`` are those of the captured step."""
        memory = frozenset(tensor.untyped_storage().data_ptr() for tensor in constants)
        unread = frozenset(f"model.{name}" for name in self._objective.unread)
        tape = self._objective.free_tensors.tape
        return Reads(lambda: self._state(memory), self._numbers, tape, unread, self._own)

    def _reads_of_run(self) -> Reads:
        """The state at the start of a run; walked through again if it, or the known code, has changed."""
        num_known = len(self._objective.executed.globals)
        if self._latest is None or self._latest[0] != num_known or self._latest[1].changes():
            self._latest = num_known, Reads(lambda: self._state(frozenset()), self._numbers, Tape(is_open=False))
        return self._latest[1]

    def _state(self, constants: frozenset[int]) -> State:
        return walk(self._roots, self._objective.executed, self._ignored, constants)
