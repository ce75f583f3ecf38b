"""The end of a step: its model and optimizer are made whole again, or as whole as one rank can make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from zerofx.errors import RankMismatchError, TierError, ZeroFXError, warn
from zerofx.ir.tensor_parts import named_parameters
from zerofx.session.guards import LossWatch, guard_model
from zerofx.session.life import Life
from zerofx.session.taken_over import TakenOver

_INSTEAD = "its step failed and is closed: build the model anew, and load a checkpoint"


def end(taken: TakenOver, life: Life, losses: LossWatch) -> RankMismatchError | None:
    """Give model and optimizer back: together, or each rank what it has where a step failed.

    Returns:
        Which rank did not come, if one did not.

    Raises:
        RankMismatchError: another world has taken the place of the step's; nothing has been given back.
    """
    absence: RankMismatchError | None = None
    if not life.failed:
        try:
            life.check_world()
            life.control.meet("close the step")
            losses.warn(life.control.rank, wait=True)
            with life.control.fail_together("close the step"):
                taken.give_back()
            let_go(taken.model, taken.guards)
        except RankMismatchError as error:
            if not life.failed:
                raise
            absence = error
        except TierError as error:
            life.failure = f"the step could not be closed ({error})"
    if life.failed:
        give_back_alone(taken, life.failed)
    return absence


def end_connections(taken: TakenOver, life: Life) -> RankMismatchError | None:
    """Close what ranks send over, once none gathers from another any more; returns which rank did not come."""
    absence: RankMismatchError | None = None
    if not life.failed:
        try:
            life.control.meet("end the connections of a closed step")
        except RankMismatchError as error:
            absence = error
    taken.runtime.close()
    return absence


def let_go(model: nn.Module, guards: Sequence[Any]) -> None:
    """Leave a model whose parameters are whole with memory and hooks of its own."""
    for guard in guards:
        guard.remove()
    for _, parameter in named_parameters(model):
        parameter.data = parameter.data.clone()


def give_back_alone(taken: TakenOver, why: str) -> None:
    """Give model and optimizer back what this rank has whole, after a step that failed; a warning says what is lost.

    A model without its parameters refuses to be called, saved or copied. ``why`` completes "found that ...".
    """
    model, state, lost = taken.model, taken.state, []
    try:
        if state.is_sharded:
            raise TierError("parts of them are on other ranks")
        state.flush()
        state.show_parameters()
        let_go(model, taken.guards)
    except (ZeroFXError, RuntimeError) as error:
        lost.append(f"the model's parameters ({error})")
        state.hide_parameters()
        for guard in taken.guards:
            guard.remove()
        guard_model(model, lambda: False, _INSTEAD)
    try:
        taken.optimizer_state.give_back(alone=True)
    except (ZeroFXError, RuntimeError) as error:
        lost.append(f"the optimizer's states ({error})")
    if lost:
        warn(
            f"expected to give back all that was trained, found that {why}: lost are {' and '.join(lost)}. Build model "
            f"and optimizer anew, and load a checkpoint"
        )
