"""The objective of an evaluation: a step's forward without gradients, of a model in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from zerofx.capture.objective.loss import Objective
from zerofx.errors import CaptureError
from zerofx.ir.returned import Returned


class Evaluation(Objective):
    """The objective of an evaluation: all that a step's objective returns, of a model in evaluation mode.

    There need not be a loss: the first tensor that is returned takes its place. ``free_tensors`` and ``executed`` are
    the objective's own.
    """

    trains = False

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective.loss_fn, objective.forward)
        self.free_tensors, self.executed, self.reads = objective.free_tensors, objective.executed, objective.reads
        self.logging = objective.logging

    def copy_for(self, memo: dict[int, Any]) -> Objective:
        return Evaluation(super().copy_for(memo))

    def setting(self, model: nn.Module) -> AbstractContextManager[None]:
        """Put all modules of the model in evaluation mode, as ``eval()`` does."""
        return evaluation_mode(model)

    def parts_of(self, returned: Any) -> tuple[torch.Tensor, Returned, tuple[torch.Tensor, ...]]:
        """The first tensor, the structure of all that is returned, and all its tensors.

        Raises:
            CaptureError: nothing is returned that is a tensor.
        """
        structure, tensors = Returned.from_outputs(returned)
        if not tensors:
            raise CaptureError(
                "expected a forward that returns a tensor to evaluate, or several, found none: return what is to "
                "be looked at"
            )
        return tensors[0], structure, tensors


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While open, ``training`` is false on all modules of a model. None of their methods is called for it."""
    modules = [module for module in model.modules() if module.training]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
