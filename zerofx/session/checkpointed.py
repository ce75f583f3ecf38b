"""Checkpoints that a step saves and loads."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofx.checkpoints.fill import check_histories
from zerofx.checkpoints.later import Later, save_later
from zerofx.checkpoints.load import Loadable, check, load_buffers, load_model, load_rest
from zerofx.checkpoints.names import ModelNames
from zerofx.checkpoints.save import StepCounts, save
from zerofx.checkpoints.together import run_on_all
from zerofx.checkpoints.user_state import check_state
from zerofx.deferred import is_deferred
from zerofx.errors import CheckpointError, RankMismatchError, UsageError, wrap_defects
from zerofx.ir.tensor_parts import named_parameters
from zerofx.option_checks import check_count
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.loss_scaler import check_scale
from zerofx.scheduler.plan.placements import FIRST_CAPACITY
from zerofx.session.batches.micro_batches import MicroBatches
from zerofx.session.life import Life
from zerofx.session.steps import Steps
from zerofx.session.taken_over import Awaited, TakenOver
from zerofx.units import first_few

_SCALE, _CAPACITY, _NEEDED = "loss_scale", "row_capacity", "row_capacity_without_copies"


class Checkpointed:
    """The part of a ``Step`` that saves and loads."""

    model: nn.Module
    num_steps: int
    num_skipped: int
    _life: Life
    _steps: Steps
    _micro_batches: MicroBatches
    _later: Later | None

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Save all that training goes on from, as a checkpoint of its own in the folder ``path``. Collective.

        That is: parameters and persistent buffers, the optimizer's states and hyperparameters, the number of steps,
        the loss's scale, the capacity for rows of experts, each rank's random generators, and ``state``. Each rank
        writes what it owns, a tensor of a bucket at a time, from the tier in which it lies. The checkpoint is there
        whole or not at all, whenever this is interrupted. Delayed updates are finished first, as by ``flush``.
        docs/checkpoints.md has the format.

        Args:
            path: a folder that all ranks can write to; made if it is not there.
            keep: remove all checkpoints in the folder but so many that were saved last, this one among them; None
                keeps all.
            state: more to save, by name: what has ``state_dict()`` and ``load_state_dict()``, such as schedulers and
                data loaders, and numbers, words, tensors, lists and dictionaries: ``{"epoch": 3}``. Each rank saves its
                own.
            asynchronous: return at once, and have a thread write what there is now while steps go on. What a step is
                about to overwrite before it is written is kept on the host, within ``host_budget``, or in another file
                of the nvme tier. A further save waits for this one, as ``finish_saving`` and ``close`` do; what fails
                meanwhile is raised there.

        Returns:
            The checkpoint's own folder, ``path/step-00000100`` after 100 steps: where it is, or is to be.

        Raises:
            UsageError: no step has been prepared yet, or an argument is not as said.
            CheckpointError: it cannot be written, or one that was begun before could not; on all ranks. Other
                checkpoints are as they were.
        """
        if keep is not None:
            check_count("keep", keep, 1, "to be None, or how many checkpoints stay")
        own = check_state(state)
        taken = self._require_model("save a checkpoint")
        self.finish_saving()
        folder = Path(os.path.abspath(path))
        with self._life.claim("save a checkpoint"), wrap_defects("save a checkpoint"), torch.no_grad():
            self._life.control.agree(
                "save a checkpoint",
                f"folder={folder}\nkeep={keep}\nasynchronous={asynchronous}",
                "folder and options of a checkpoint",
                "Give every rank the same.",
            )
            self._finish_updates(taken, "save a checkpoint")
            about = (taken.training, self._names(), self._numbers(), own, folder, keep)
            if not asynchronous:
                return save(*about)
            self._later = save_later(*about, self._steps.spare_host_bytes())
            return self._later.place

    def finish_saving(self) -> Path | None:
        """Wait for a checkpoint that is saved asynchronously; returns its folder, None if there is none. Collective.

        Raises:
            CheckpointError: it could not be written; on all ranks. Other checkpoints are as they were.
        """
        later, self._later = self._later, None
        if later is None:
            return None
        with wrap_defects("finish a checkpoint"), torch.no_grad():
            return later.finish()

    def _end_saving(self) -> CheckpointError | None:
        """Finish a checkpoint that is saved asynchronously, or leave it where a step failed; returns why it is not."""
        if self._later is not None and self._life.failed:
            self._later.abandon()
            self._later = None
        try:
            self.finish_saving()
        except CheckpointError as error:
            return error
        except RankMismatchError:  # a rank does not come, as is found again right after this
            return None
        return None

    @property
    def is_saving(self) -> bool:
        """True while this rank still writes a checkpoint; rank 0 does until it is in its place."""
        return self._later is not None and self._later.is_writing

    def load_checkpoint(
        self, path: str | Path, *, state: Mapping[str, Any] | None = None, weights_only: bool = False
    ) -> Path:
        """Go on from a checkpoint, saved by any number of ranks, at any stage, from any tiers. Collective.

        Before anything is changed, all files are checked against their hashes, and names and shapes against the model.
        Each rank reads what it keeps, a tensor of a bucket at a time, to where that lies. Before the first step
        parameters have their values at once, and the optimizer's states get theirs when the step is prepared.

        With as many ranks, training goes on bit for bit as it would have; with fewer or more, by rounding apart, and
        each rank draws random numbers of its own, or each group of ranks that share a computation does.

        Args:
            path: what ``save_checkpoint`` was given, for the latest one there, or what it returned.
            state: what was saved by name is given back to each: by its ``load_state_dict()``; a dictionary is filled;
                and any other value takes its place in ``state`` itself, as with ``torch.distributed.checkpoint.load``.
            weights_only: take parameters and persistent buffers over, and leave all else as it is.

        Returns:
            The folder of the checkpoint that was loaded.

        Raises:
            CheckpointError: there is none, it is damaged, or it is one of another model or optimizer; on all ranks, and
                nothing has been changed.
        """
        own = check_state(state)
        life, steps, control = self._life, self._steps, self._life.control
        life.check_open("load a checkpoint")
        self._micro_batches.check_empty("load a checkpoint")
        if weights_only and steps.taken is None and is_deferred(self.model):
            raise UsageError(
                "expected weights_only=True once a model without values has some, found it before its first step: give "
                "zerofx.compile weights= in its place"
            )
        self.finish_saving()
        with life.claim("load a checkpoint"), wrap_defects("load a checkpoint"), torch.no_grad():
            control.meet("load a checkpoint")
            with life.lift_guard():
                optimizers = None if weights_only else steps.optimizers
                checked = check(Path(path), self.model, optimizers, own, control, steps.mesh)
            taken = steps.taken
            if not weights_only:
                run_on_all(control, "compare the checkpoint with the step", lambda: self._check_step(checked, taken))
            self._load(checked, taken, own, weights_only=weights_only)
        marker = checked.reader.marker
        if not weights_only:
            self._set_numbers(StepCounts(marker.num_steps, marker.num_skipped, marker.extra.get("numbers", {})))
        return checked.reader.place

    def state_dict(self) -> dict[str, Any]:
        """The step's state for ``torch.distributed.checkpoint``: a ``Step`` is ``Stateful``. Collective.

        ``dcp.save({"step": step}, ...)`` and ``dcp.load({"step": step}, ...)`` work as with any other object, on any
        ranks, as do ``{"model": ..., "optimizer": ...}`` of this dictionary, which have the names and the form that
        DCP's ``get_state_dict`` gives to a plain, DDP or FSDP2 model. Tensors have no values until DCP asks for them,
        so that saving holds one bucket more than training. DCP pickles its own files; ``save_checkpoint`` does not.

        Raises:
            UsageError: no step has been prepared yet.
        """
        # What DCP is made of takes long to import: only who uses it pays.
        from zerofx.checkpoints.stateful import state_of

        taken = self._require_model("take the state of a step")
        with self._life.claim("take the state of a step"), wrap_defects("take the state of a step"), torch.no_grad():
            self._finish_updates(taken, "take the state of a step")
            return state_of(taken.training, self._names(), self._numbers())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a ``state_dict()`` that DCP has loaded into, or one with whole tensors. Collective.

        ``{"model": model.state_dict()}`` sets parameters and buffers alone; with ``"optimizer"``, as DCP's
        ``get_optimizer_state_dict`` gives it, states and hyperparameters as well.

        Raises:
            UsageError: no step has been prepared yet, or there is no ``"model"``.
            CheckpointError: what is given does not fit; on all ranks, and nothing has been changed.
        """
        from zerofx.checkpoints.stateful import MODEL, Loaded

        if not isinstance(state_dict, Mapping) or MODEL not in state_dict:
            shown = first_few(map(repr, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise UsageError(f"expected a state dictionary with 'model', found {shown or 'nothing'}")
        taken = self._require_model("load the state of a step")
        self.finish_saving()
        control = self._life.control
        control.meet("load the state of a step")

        def loaded() -> Loaded:
            given = Loaded(state_dict, taken.training, self._names())
            check_histories(given, taken.layout)
            return given

        with self._life.claim("load the state of a step"), wrap_defects("load the state of a step"), torch.no_grad():
            given = run_on_all(control, "compare the state with the step", loaded)
            taken.load(given, "a state dictionary", lambda: given.finish(taken.training), optimizer=given.has_optimizer)
        self._set_numbers(given.numbers_after(self._numbers()))

    @property
    def side_channel(self) -> Control:
        """The channel by which ranks agree outside of steps."""
        return self._life.control

    def _check_step(self, checked: Loadable, taken: TakenOver | None) -> None:
        """Check what a checkpoint has for this step alone; raises a ``CheckpointError``."""
        if taken is not None:
            check_histories(checked, taken.layout)
        counted = checked.reader.marker.extra.get("numbers", {})
        if self._steps.scaler is not None and _SCALE in counted:
            try:
                check_scale(counted[_SCALE])
            except UsageError as error:
                raise CheckpointError(f"{error}. Nothing has been loaded") from error
        for capacity in (counted.get(name, FIRST_CAPACITY) for name in (_CAPACITY, _NEEDED)):
            if not isinstance(capacity, int | float) or not 0 < capacity < math.inf:
                raise CheckpointError(
                    f"expected the capacity for rows of experts in equal shares, found {capacity!r} in the checkpoint: "
                    f"it was not written by a step. Nothing has been loaded"
                )

    def _load(self, checked: Loadable, taken: TakenOver | None, own: Mapping[str, Any], *, weights_only: bool) -> None:
        """Change what is in memory: where this fails, the step is over."""
        steps, place = self._steps, str(checked.reader.place)

        def load_others() -> None:
            load_buffers(checked)
            if not weights_only:
                load_rest(checked, self.model, steps.optimizers, steps.device, own)

        with self._life.end_on_error(f"{place} was loaded in part"):
            if taken is not None:
                taken.load(checked, place, load_others, optimizer=not weights_only)
                checked.reader.close()
                return
            if not is_deferred(self.model):
                load_model(checked, dict(named_parameters(self.model)))
                load_buffers(checked)
            if not weights_only:
                steps.await_checkpoint(Awaited(checked, self.model, steps.optimizers))
                load_rest(checked, self.model, steps.optimizers, steps.device, own)
            else:
                checked.reader.close()

    def _require_model(self, purpose: str, *, reads: bool = False) -> TakenOver:
        self._life.check_open(purpose, reads=reads)
        self._micro_batches.check_empty(purpose)
        if self._steps.taken is None:
            raise UsageError(
                f"expected to {purpose} once a step has been prepared, found that none has: call step.prepare(batch), "
                f"or step(batch), first"
            )
        return self._steps.taken

    def _finish_updates(self, taken: TakenOver, purpose: str) -> None:
        """Have all that training goes on from in its place on every rank. Collective."""
        self._life.control.meet(purpose)
        with self._life.control.fail_together(purpose):
            taken.optimizer_state.take_loaded()
            taken.state.flush()

    def _numbers(self) -> StepCounts:
        scaler, rows = self._steps.scaler, self._steps.rows
        extra: dict[str, Any] = {} if scaler is None else {_SCALE: scaler.state_dict()}
        if rows.capacity > FIRST_CAPACITY:
            extra[_CAPACITY] = rows.capacity
        num_copies, needed = rows.copies
        if num_copies:
            extra[_NEEDED] = needed
        return StepCounts(self.num_steps, self.num_skipped, extra)

    def _set_numbers(self, numbers: StepCounts) -> None:
        self.num_steps, self.num_skipped = numbers.num_steps, numbers.num_skipped
        if self._steps.scaler is not None and _SCALE in numbers.extra:
            self._steps.scaler.load_state_dict(numbers.extra[_SCALE])
        rows = self._steps.rows
        rows.capacity = max(rows.capacity, numbers.extra.get(_CAPACITY, FIRST_CAPACITY))
        if _NEEDED in numbers.extra:
            rows.copy_experts(numbers.extra[_NEEDED])

    def _names(self) -> ModelNames:
        with self._life.lift_guard():
            return ModelNames.from_model(self.model)
