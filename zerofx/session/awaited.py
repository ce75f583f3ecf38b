"""A checkpoint that was loaded before the first step: its optimizer states wait for the buckets that they belong in."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerofx.checkpoints.load import Loadable, entries_of, load_buffers
from zerofx.errors import UsageError
from zerofx.session.taken_over import TakenOver


class Awaited:
    """Has put stand-ins of what was saved into ``optimizer.state``, by which the update is captured.

    They take no memory. Until the first step has been prepared, ``optimizer.state_dict()`` and ``load_state_dict()``
    are refused.
    """

    def __init__(self, checked: Loadable, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._checked = checked
        parameters = dict(model.named_parameters())
        optimizer.state.clear()
        for own, entry in entries_of(checked, parameters).items():
            optimizer.state[parameters[own]] = entry
        self._handles = [
            optimizer.register_state_dict_pre_hook(_refuse),
            optimizer.register_load_state_dict_pre_hook(_refuse),
        ]

    def take_over(self, taken: TakenOver) -> None:
        """Give a model and an optimizer that have just been taken over their values. Collective."""
        checked = self._checked
        taken.load(checked, str(checked.reader.place), lambda: load_buffers(checked))

    def end(self) -> None:
        """The states are where they belong, or another checkpoint has been loaded."""
        for handle in self._handles:
            handle.remove()
        self._checked.reader.close()


def _refuse(*_: Any) -> None:
    raise UsageError(
        "expected the optimizer's states to be asked for, or set, once those of the loaded checkpoint have their "
        "place, found that no step has been prepared since: call step.prepare(batch) first"
    )
