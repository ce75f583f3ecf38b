"""The Python state of one step's objective: what each capture has read of it."""

from __future__ import annotations

from torch import nn

from zerofx.capture.objective.loss import Objective
from zerofx.capture.python_state.reads import Reads, State
from zerofx.capture.python_state.walk import walk


class PythonState:
    """What the objective of ``model`` may read; hooks that are instances of ``ignored`` are the step's own."""

    def __init__(self, model: nn.Module, objective: Objective, ignored: tuple[type, ...]) -> None:
        self._objective, self._ignored = objective, ignored
        named = {"model": model, "forward": objective.forward, "loss_fn": objective.loss_fn}
        self._roots = {name: root for name, root in named.items() if root is not None}

    def read(self) -> Reads:
        """All that has been read in traces so far, with its values now."""
        return Reads(self._state)

    def _state(self) -> State:
        return walk(self._roots, self._objective.executed, self._ignored)
