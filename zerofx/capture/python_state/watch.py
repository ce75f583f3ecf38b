"""The Python state of one step's objective: what each capture has read of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zerofx.capture.objective.loss import Objective
from zerofx.capture.python_state.reads import Reads
from zerofx.capture.python_state.walk import walk


class PythonState:
    """What the objective of ``model`` may read; hooks that are instances of ``ignored`` are the step's own."""

    def __init__(self, model: nn.Module, objective: Objective, ignored: tuple[type, ...]) -> None:
        self._objective, self._ignored = objective, ignored
        named = {"model": model, "forward": objective.forward, "loss_fn": objective.loss_fn}
        self._roots = {name: root for name, root in named.items() if root is not None}

    def read(self, constants: Iterable[torch.Tensor]) -> Reads:
        """All that has been read in traces so far, with its values now; ``constants`` are those of the step made."""
        memory = frozenset(tensor.untyped_storage().data_ptr() for tensor in constants)
        return Reads(lambda: walk(self._roots, self._objective.executed, self._ignored, memory))
