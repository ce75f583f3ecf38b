"""Handling of a step that failed: buckets that were not updated are not counted, and the other ranks are told."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerofx.errors import NonFiniteLossError, RankMismatchError, TierError, ZeroFXError, warn
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.heartbeat import WAYS_TO_WAIT
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.state.optimizer import Advance
from zerofx.session.life import Life
from zerofx.session.taken_over import TakenOver
from zerofx.units import first_few


def undo(
    number: int, taken: TakenOver, life: Life, advance: Advance, versions: Mapping[int, int], error: BaseException
) -> BaseException:
    """After step ``number`` failed: count no step for the buckets that had not been updated, and say which had.

    ``versions`` are those before the step. Returns what to raise: where another rank has failed, its error says more
    than that its messages did not come.
    """
    control = life.control
    agreed = isinstance(error, RankMismatchError) and not taken.runtime.has_communicated
    if not agreed:
        error, failure = _tell(f"run step {number}", f"step {number}", life, error)
    _settle(taken, error)
    updated = taken.find_updated(versions)
    advance.swap(taken.state, [index for index in versions if index not in updated])
    if agreed:
        return error  # all ranks know, and have left the step at the same place
    if updated:
        names = first_few([taken.layout.buckets[index].name for index in updated])
        error.add_note(
            f"zerofx: when step {number} failed, {len(updated)} of {len(versions)} buckets had been updated "
            f"already ({names}): restore a checkpoint before training on"
        )
    else:
        error.add_note(f"zerofx: when step {number} failed, nothing had been updated yet")
    if control.num_ranks == 1:
        _finish_updates(taken, error)
        if isinstance(error, TierError):
            life.failure = failure
    else:
        _say_left(control, error)
    return error


def leave_evaluation(taken: TakenOver, life: Life, error: BaseException) -> BaseException:
    """After an evaluation failed, which has changed nothing that is trained; returns what to raise, as ``undo``."""
    agreed = isinstance(error, RankMismatchError) and not taken.runtime.has_communicated
    if life.control.num_ranks > 1 and not agreed:
        error, _ = _tell("run an evaluation", "an evaluation", life, error)
        _say_left(life.control, error)
    _settle(taken, error)
    return error


def _tell(purpose: str, what: str, life: Life, error: BaseException) -> tuple[BaseException, str]:
    """Let the other ranks fail too, which wait for this one, before anything is waited for here.

    Returns:
        What to raise, and what has failed, in words.
    """
    control, elsewhere = life.control, life.control.failure()
    error = _error_to_raise(purpose, elsewhere, life, error)
    failure = elsewhere or f"{what} failed on rank {control.rank} ({type(error).__name__}: {error})"
    control.fail(failure)
    return error, failure


def _settle(taken: TakenOver, error: BaseException) -> None:
    """Wait for what is on its way between tiers, where the device still can."""
    try:
        taken.runtime.tiers.settle()
    except (ZeroFXError, RuntimeError) as failed:
        error.add_note(f"zerofx: what was on its way between tiers did not arrive ({type(failed).__name__}: {failed})")


def _error_to_raise(purpose: str, elsewhere: str, life: Life, error: BaseException) -> BaseException:
    """The error to raise: ``error``, or if another rank failed first (``elsewhere`` says how) or did not come, that."""
    if not elsewhere and not isinstance(error, LostRankError):
        return error
    mismatch = RankMismatchError(f"expected all ranks to {purpose}, found that {elsewhere or error}")
    if not elsewhere:
        mismatch.add_note(f"zerofx: ranks wait {life.control.rank_timeout_seconds:.0f} s: {WAYS_TO_WAIT}")
    return mismatch


def _say_left(control: Control, error: BaseException) -> None:
    error.add_note(
        f"zerofx: rank {control.rank} left the step that {control.num_ranks} ranks run together, "
        f"which ends it on all of them; restart all ranks from a checkpoint"
    )


def _finish_updates(taken: TakenOver, error: BaseException) -> None:
    """Bring all parameters up to date: a step that failed may have done so with some."""
    taken.state.count_delayed()
    try:
        taken.state.flush()
    except (ZeroFXError, RuntimeError) as failed:
        error.add_note(
            f"zerofx: an update that was under way failed too ({type(failed).__name__}: {failed}): restore a "
            f"checkpoint before training on"
        )


def leave_out(
    number: int,
    taken: TakenOver,
    life: Life,
    advance: Advance,
    versions: Mapping[int, int],
    error: NonFiniteLossError,
    *,
    raises: bool,
) -> torch.Tensor:
    """After all ranks have left step ``number`` before its first update: as if it had not been, with a warning.

    Returns:
        The step's loss on this rank.

    Raises:
        NonFiniteLossError: instead of the warning, if ``raises``.
    """
    (loss,) = take_back(taken, advance, versions)
    taken.update_scale(is_finite=False)
    where = f"{float(loss)} on rank {life.control.rank}" + (
        ", and one that is not finite on another rank" if loss.isfinite() else ""
    )
    text = (
        f"expected a finite loss on every rank in step {number}, found {where}: nothing has been "
        f"updated. Lower the learning rate, or look for an overflow"
    )
    if raises:
        raise NonFiniteLossError(text) from error
    taken.mark_stepped()
    warn(text)
    return loss


def take_back(taken: TakenOver, advance: Advance, versions: Mapping[int, int]) -> list[torch.Tensor]:
    """After all ranks have left a step before its first update: as if it had not been. Returns what it has given."""
    outcome = taken.outcome_left()
    assert not taken.find_updated(versions), "a step is left before its updates"
    advance.swap(taken.state)
    return outcome


def skip(number: int, taken: TakenOver, advance: Advance, versions: Mapping[int, int]) -> list[torch.Tensor]:
    """After all ranks have left step ``number`` for its gradients: as if it had not been, but for the loss's scale.

    Warns where the scale falls below 1, and so no scale will do.

    Returns:
        What the step has given on this rank.
    """
    outcome = take_back(taken, advance, versions)
    assert taken.scaler is not None, "gradients are looked at where the loss is scaled"
    before = taken.scaler.scale
    taken.update_scale(is_finite=False)
    taken.mark_stepped()
    if before >= 1 > taken.scaler.scale:
        warn(
            f"expected gradients that are finite at some scale of the loss, found some that are not at a scale of "
            f"{before:g} in step {number}: look for an overflow in the forward, lower the learning rate, or give "
            f"precision='bf16'"
        )
    return outcome
