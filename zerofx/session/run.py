"""A run of many steps: goes on from where it was, saves as it goes, and leaves in order when it is asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from zerofx.checkpoints.together import run_on_first
from zerofx.checkpoints.user_state import check_state
from zerofx.disk.checkpoint.folder import latest
from zerofx.errors import UsageError
from zerofx.option_checks import check_count
from zerofx.session.step import Step

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ASK_SECONDS = 1.0  # between two times at which ranks ask one another whether to stop
_MOST_STEPS_UNASKED = 100
_SAME_REQUEST_SECONDS = 2.0  # a terminal and torchrun both pass one Ctrl-C on


class Run:
    """A run of a step, whose checkpoints are in ``folder``. Collective to make.

    ::

        run = zerofx.Run(step, "runs/first", every=500, keep=3, state={"scheduler": scheduler, "data": loader})
        for number in run.steps(10_000):
            loss = step(*next(loader))
            scheduler.step()

    It goes on from the latest checkpoint in the folder, if there is one, saved by as many ranks or not: so the same
    script starts a run, and takes it up again after anything.

    Args:
        step: what ``zerofx.compile`` gave, before its first step or after.
        folder: for this run alone; all ranks reach it. Made with the first checkpoint.
        every: how many steps there are from one checkpoint to the next; None for one at the end alone.
        keep: how many checkpoints stay; None for all.
        state: what else is saved and loaded, by name, as for ``step.save_checkpoint``.
        asynchronous: write checkpoints while steps go on, as ``step.save_checkpoint`` says; the last one is waited for.

    Raises:
        UsageError: ``every`` or ``state`` is not as said.
        CheckpointError: the latest checkpoint cannot be loaded; nothing has been changed.
    """

    def __init__(
        self,
        step: Step,
        folder: str | Path,
        *,
        every: int | None = None,
        keep: int | None = None,
        state: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
    ) -> None:
        for name, number in (("every", every), ("keep", keep)):
            if number is not None:
                check_count(name, number, 1, "to be None, or a whole number above 0")
        self.step, self.folder = step, Path(os.path.abspath(folder))
        self.stopped = False  # whether a signal has ended the run before its last step
        self._every, self._keep, self._state = every, keep, check_state(state)
        self._asynchronous = asynchronous
        self._saved_after: int | None = None
        self._asked: float | None = None  # when a signal came, on this rank
        self._control = step.side_channel
        self._control.agree(
            "make a Run",
            f"folder={self.folder}\nevery={every}\nkeep={keep}\nasynchronous={asynchronous}",
            "folder and options of a Run",
            "Give every rank the same.",
        )
        place = run_on_first(self._control, "look for a checkpoint to go on from", lambda: latest(self.folder))
        self.resumed_from: Path | None = None
        if place is not None:
            self.resumed_from = step.load_checkpoint(place, state=self._state)
            self._saved_after = step.num_steps

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are to be done, up to ``total``, from 1 on; in each, call the step once.

        A checkpoint is saved between two of them every so many steps, and one at the end. SIGTERM and Ctrl-C, on any
        rank, end the loop after at most about a second and the step that runs, with a checkpoint; ``stopped`` says so.
        A second Ctrl-C, later than two seconds, interrupts as ever. A loop that is left otherwise saves nothing.

        Raises:
            UsageError: the loop's body has run no step.
            CheckpointError: a checkpoint cannot be written, or one that was begun before could not; training could go
                on.
        """
        step, asking = self.step, _Asking(self._control.num_ranks)
        self.stopped = False
        with self._catch_signals():
            while step.num_steps < total:
                before = (step.num_steps, step.num_skipped)
                yield step.num_steps + 1
                if (step.num_steps, step.num_skipped) == before:
                    raise UsageError(
                        "expected a step in each turn of a loop over run.steps(), found none: call step(batch) there, "
                        "or leave the loop"
                    )
                if asking.is_due():
                    answers = self._control.gather(
                        (self._asked is not None, asking.seconds_per_step()), "ask whether the run is to stop"
                    )
                    asking.note_answer(max(seconds for _, seconds in answers))
                    if any(stops for stops, _ in answers):
                        self.stopped = step.num_steps < total
                        break
                if self._every is not None and step.num_steps % self._every == 0:
                    self.save()
            self.save()
            self.step.finish_saving()

    def save(self) -> Path | None:
        """Save a checkpoint now, between two steps; returns its folder, or None where this step has been saved already.

        With ``asynchronous`` it begins to be written, after the one before.

        Raises:
            CheckpointError: it cannot be written; others are as they were.
        """
        if self._saved_after == self.step.num_steps or not self.step.num_steps:
            return None
        place = self.step.save_checkpoint(
            self.folder, keep=self._keep, state=self._state, asynchronous=self._asynchronous
        )
        self._saved_after = self.step.num_steps
        return place

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """While open, signals that end a process are noted; in threads that are not the main one they cannot be, nor
        where other code than Python's handles them."""
        self._asked = None
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # What Python has not installed it cannot put back.
        before = {
            number: signal.signal(number, self._note) for number in _SIGNALS if signal.getsignal(number) is not None
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
        elif number == signal.SIGINT and now - self._asked > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


class _Asking:
    """When ranks ask one another: all after the same steps, about once a second by the slowest; one rank always."""

    def __init__(self, num_ranks: int) -> None:
        self._left = self._between = 1
        self._most = _MOST_STEPS_UNASKED if num_ranks > 1 else 1
        self._since = time.monotonic()

    def is_due(self) -> bool:
        """True if this is a step to ask after; to be called once a step."""
        self._left -= 1
        return self._left == 0

    def seconds_per_step(self) -> float:
        """Since ranks have asked last."""
        return (time.monotonic() - self._since) / self._between

    def note_answer(self, seconds_per_step: float) -> None:
        """All know of the slowest rank's seconds for a step."""
        self._left = self._between = min(self._most, max(1, round(_ASK_SECONDS / seconds_per_step)))
        self._since = time.monotonic()
