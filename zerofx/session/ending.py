"""What becomes of a model and an optimizer whose step is over: whole again, or as whole as one rank can make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from zerofx.errors import TierError, ZeroFXError, warn
from zerofx.runtime.state.optimizer_state import OptimizerState
from zerofx.runtime.state.state import TrainingState
from zerofx.session.guards import guard_model

_INSTEAD = "its step failed and is closed: build the model anew, and load a checkpoint"


def let_go(model: nn.Module, guards: Sequence[Any]) -> None:
    """Leave a model whose parameters are whole with memory and hooks of its own."""
    for guard in guards:
        guard.remove()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def give_back_alone(
    model: nn.Module, state: TrainingState, optimizer_state: OptimizerState, guards: Sequence[Any], why: str
) -> None:
    """Give model and optimizer back what this rank has whole, after a step that failed; a warning says what is lost.

    A model without its parameters refuses to be called, saved or copied. ``why`` completes "found that ...".
    """
    lost = []
    try:
        _check_whole(state)
        state.flush()
        state.show_parameters()
        let_go(model, guards)
    except (ZeroFXError, RuntimeError) as error:
        lost.append(f"the model's parameters ({error})")
        state.hide_parameters()
        for guard in guards:
            guard.remove()
        guard_model(model, lambda: False, _INSTEAD)
    try:
        optimizer_state.give_back(alone=True)
    except (ZeroFXError, RuntimeError) as error:
        lost.append(f"the optimizer's states ({error})")
    if lost:
        warn(
            f"expected to give back all that was trained, found that {why}: lost are {' and '.join(lost)}. Build model "
            f"and optimizer anew, and load a checkpoint"
        )


def _check_whole(state: TrainingState) -> None:
    if state.sharded:
        raise TierError("parts of them are on other ranks")
