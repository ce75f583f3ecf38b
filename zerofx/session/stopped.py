"""What becomes of a step that has stopped on its way: undone where it can be, and told to all ranks where it cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerofx.capture.checks import names
from zerofx.errors import NonFiniteLossError, RankMismatchError, TierError, ZeroFXError, warn
from zerofx.runtime.comm.patience import WAYS_TO_WAIT
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.state.optimizer import Advance
from zerofx.session.step_builder import StepBuilder


class StoppedStep(StepBuilder):
    """Undoes what a step has begun, for ``Step`` to inherit."""

    def _versions(self) -> dict[int, int]:
        """How often each bucket's stored values have been changed: tells which were updated in a step that failed."""
        assert self._layout is not None and self._state is not None
        return {b.index: self._state.buckets[b.index].version for b in self._layout.buckets if b.trainable}

    def _undo(self, advance: Advance, versions: Mapping[int, int], error: BaseException) -> BaseException:
        """After a step that failed: count no step for the buckets that had not been updated, and say which had.

        Returns what to raise: where another rank has failed, its error says more than that its messages did not come.
        """
        assert self._layout is not None and self._state is not None and self._runtime is not None
        self._runtime.tiers.settle()
        now = self._versions()
        advance.swap(self._state, [index for index in versions if now[index] == versions[index]])
        if isinstance(error, RankMismatchError) and not self._runtime.has_communicated:
            return error  # all ranks know, and have left the step at the same place
        number = self.num_steps + 1
        elsewhere = self._control.failure()
        if elsewhere or isinstance(error, LostRankError):
            error = RankMismatchError(f"expected all ranks to run step {number}, found that {elsewhere or error}")
            if not elsewhere:
                error.add_note(f"zerofx: ranks wait {self._control.patience_seconds:.0f} s: {WAYS_TO_WAIT}")
        updated = [self._layout.buckets[index].name for index in versions if now[index] != versions[index]]
        if updated:
            error.add_note(
                f"zerofx: when step {number} failed, {len(updated)} of {len(versions)} buckets had been updated "
                f"already ({names(updated)}): restore a checkpoint before training on"
            )
        else:
            error.add_note(f"zerofx: when step {number} failed, nothing had been updated yet")
        failure = elsewhere or f"step {number} failed on rank {self._control.rank} ({type(error).__name__}: {error})"
        if self._control.num_ranks == 1:
            self._finish_updates_behind(error)
            if isinstance(error, TierError):
                self._failure = failure
        else:
            self._control.fail(failure)
            error.add_note(
                f"zerofx: rank {self._control.rank} left the step that {self._control.num_ranks} ranks run together, "
                f"which ends it on all of them; restart all ranks from a checkpoint"
            )
        return error

    def _finish_updates_behind(self, error: BaseException) -> None:
        """Bring all parameters up to date: a step that failed may have done so with some."""
        assert self._state is not None
        self._state.count_delayed()
        try:
            self._state.flush()
        except (ZeroFXError, RuntimeError) as failed:
            error.add_note(
                f"zerofx: a delayed update failed too ({type(failed).__name__}: {failed}): restore a checkpoint before "
                f"training on"
            )

    def _leave_out(self, advance: Advance, versions: Mapping[int, int], error: NonFiniteLossError) -> torch.Tensor:
        """After a step that all ranks have left before its first update: as if it had not been."""
        assert self._runtime is not None and self._state is not None
        self._runtime.finish_collectives()
        self._runtime.tiers.settle()
        assert versions == self._versions(), "a step is left before its updates"
        advance.swap(self._state)
        loss, self._runtime.stopped_loss = self._runtime.stopped_loss, None
        assert loss is not None
        self._gradients.put()
        where = f"{float(loss)} on rank {self._control.rank}" + (
            ", and one that is not finite on another rank" if loss.isfinite() else ""
        )
        text = (
            f"expected a finite loss on every rank in step {self.num_steps + 1}, found {where}: nothing has been "
            f"updated. Lower the learning rate, or look for an overflow"
        )
        if self.options.on_nonfinite == "raise":
            raise NonFiniteLossError(text) from error
        self.num_skipped += 1
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as in _after_step
        warn(text)
        return loss
