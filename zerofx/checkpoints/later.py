"""A checkpoint that a thread writes while training goes on.

Ranks meet at the start and at the end. In between, the thread of each rank reports over the process group's store that
its files are on disk, or that it has failed. Rank 0's thread moves the checkpoint into place when all have reported: so
it is there as soon as it is whole, whatever steps do meanwhile. A thread that makes no progress is waited for as long
as ranks wait for one another, and no longer.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoints.names import ModelNames
from zerofx.checkpoints.pieces import Piece
from zerofx.checkpoints.save import Draft, StepCounts, start, warn_of_left, write_files
from zerofx.checkpoints.together import cannot_be_done, run_on_all, run_on_first
from zerofx.checkpoints.training import OwnedValues, Training
from zerofx.disk.checkpoint.folder import place_of
from zerofx.disk.checkpoint.shard_file import Written
from zerofx.errors import CheckpointError, ZeroFXError
from zerofx.runtime.comm.heartbeat import Heartbeat
from zerofx.runtime.tiers.snapshot import Snapshot

_LOOK_SECONDS = 0.02  # between two looks for the notes of other ranks
_NICENESS = 10  # of the thread: computation goes first where there are not enough cores
_FINISH = "finish a checkpoint"


def save_later(
    training: Training,
    names: ModelNames,
    numbers: StepCounts,
    state: Mapping[str, Any],
    folder: Path,
    keep: int | None,
    spare_bytes: int | None,
) -> Later:
    """Begin to write a checkpoint of the current state into ``folder``. Collective.

    ``spare_bytes``: the host memory that may be held for it; None for no limit.

    Raises:
        CheckpointError: on all ranks; nothing of ``folder`` has been changed then.
    """
    control = training.control
    begun = start(training, names, numbers, state, folder)
    begun = replace(begun, content=begun.content.copy())
    heartbeat = Heartbeat(control.rank_timeout_seconds)
    try:
        num_local_ranks = len(control.ranks_of_host("save a checkpoint"))
        snapshot = run_on_all(
            control,
            "keep what is saved",
            lambda: _snapshot(training, begun.content.parts, spare_bytes, num_local_ranks, heartbeat),
        )
    except BaseException:
        begun.abandon()
        if training.tiers.snapshot is not None:
            training.tiers.snapshot.end()
        raise
    heartbeat.beat()
    return Later(training, begun, snapshot, heartbeat, keep, place_of(folder, numbers.num_steps))


def _snapshot(
    training: Training,
    parts: tuple[OwnedValues, ...],
    spare_bytes: int | None,
    num_local_ranks: int,
    heartbeat: Heartbeat,
) -> Snapshot:
    values = [(part.stored, part.begin - part.first, part.end - part.first) for part in parts if part.entries]
    try:
        return Snapshot(values, training.tiers, spare_bytes, num_local_ranks=num_local_ranks, heartbeat=heartbeat)
    except ZeroFXError as error:
        raise CheckpointError(str(error)) from error


class Later:
    """A checkpoint being written. ``place`` is its final path; all methods are for the thread that runs the steps."""

    def __init__(
        self, training: Training, begun: Draft, snapshot: Snapshot, heartbeat: Heartbeat, keep: int | None, place: Path
    ) -> None:
        self.place = place
        self._control = training.control
        self._begun, self._snapshot, self._keep = begun, snapshot, keep
        self._heartbeat = heartbeat
        self._outcomes = training.control.outcomes(f"checkpoint {begun.part.name}")
        self._stopped, self._written = threading.Event(), threading.Event()
        self._committing = threading.Lock()
        self._committed: tuple[Path, str] | None = None
        self._files: dict[str, Written] = {}
        self._failure: str | None = None
        # A daemon, since Python waits for other threads without end: at the end of a program this one is waited for.
        self._thread = threading.Thread(target=self._run, name="zerofx-checkpoint", daemon=True)
        self._thread.start()
        self._at_exit = weakref.finalize(self, _wait_at_exit, self._thread, snapshot, heartbeat)

    @property
    def is_writing(self) -> bool:
        """True while this rank's part is being written, or, on rank 0, until the checkpoint is in place."""
        return self._thread.is_alive()

    def tidy(self) -> None:
        """Release the memory held for it, once it is written."""
        if not self.is_writing:
            self._snapshot.end()

    def finish(self) -> Path:
        """Wait until it is in place; returns its path. Collective.

        Raises:
            CheckpointError: it could not be wait_for_files; on all ranks, and others are as they were.
        """
        control = self._control

        def wait_for_files() -> dict[str, Written]:
            self._snapshot.keep_all()
            self._await_written()
            if self._failure is not None:
                raise CheckpointError(self._failure)
            return self._files

        try:
            control.meet(_FINISH)
            listed = control.gather(run_on_all(control, _FINISH, wait_for_files), _FINISH)
            files = {name: file for of_rank in listed for name, file in of_rank.items()}
            self.place, left = run_on_first(control, _FINISH, lambda: self._commit(files))
        except BaseException:
            self.abandon()
            raise
        self._end()
        warn_of_left(control, left)
        return self.place

    def abandon(self) -> None:
        """Leave it unfinished, on this rank alone."""
        self._stopped.set()
        self._snapshot.stop()
        while self._thread.is_alive() and self._heartbeat.seconds_left:
            self._thread.join(min(1.0, self._heartbeat.seconds_left))
        self._end()
        self._begun.abandon()

    def _end(self) -> None:
        self._stopped.set()
        self._at_exit.detach()
        self._snapshot.end()
        if self._control.rank == 0 and not self._control.lost:
            self._outcomes.forget()

    def _await_written(self) -> None:
        """Wait until this rank's files are on disk, for as long as the thread makes progress.

        Raises:
            CheckpointError: it hangs.
        """
        while not self._written.wait(min(1.0, self._heartbeat.seconds_left)):
            if not self._heartbeat.seconds_left:
                raise CheckpointError(
                    f"expected to write a checkpoint to {self._begun.part.parent}, found that nothing was written for "
                    f"{self._heartbeat.limit_seconds:.0f} s: look at the drive, or raise ZEROFX_TIMEOUT"
                )

    def _commit(self, files: Mapping[str, Written]) -> tuple[Path, str]:
        """On rank 0: move it into place, unless the other of the two threads that may do so has done it."""
        if not self._committing.acquire(timeout=self._heartbeat.limit_seconds):
            raise CheckpointError(
                f"expected to put a checkpoint in its place in {self._begun.part.parent}, found that this takes longer "
                f"than {self._heartbeat.limit_seconds:.0f} s: look at the drive, or raise ZEROFX_TIMEOUT"
            )
        try:
            if self._committed is None:
                self._committed = self._begun.commit(files, self._keep)
            return self._committed
        finally:
            self._committing.release()

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        content = self._begun.content
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._files = write_files(content, self._begun.part, self._show, self._handle_block)
        except (OSError, ZeroFXError) as error:
            self._failure = cannot_be_done("write a checkpoint", error)
        except BaseException as error:
            self._failure = f"a checkpoint could not be written ({type(error).__name__}: {error})"
            raise
        finally:
            self._snapshot.stop()
            self._heartbeat.beat()
            self._written.set()
            with suppress(RuntimeError):  # a store that has failed: all ranks tell where they finish
                self._tell()
        if content.rank == 0 and self._failure is None:
            with suppress(RuntimeError, OSError):  # likewise; what cannot be committed here is so again there
                self._commit_early()

    def _handle_block(self) -> None:
        self._heartbeat.beat()
        if self._stopped.is_set():
            raise CheckpointError(
                "expected to write a checkpoint while its step goes on, found that the step has failed"
            )

    def _tell(self) -> None:
        if self._failure is not None:
            self._outcomes.fail(self._failure)
        else:
            self._outcomes.tell(json.dumps({name: [f.num_bytes, f.digest] for name, f in self._files.items()}))

    @contextmanager
    def _show(self, part: OwnedValues) -> Iterator[Callable[[Piece], AbstractContextManager[torch.Tensor]]]:
        @contextmanager
        def show_piece(piece: Piece) -> Iterator[torch.Tensor]:
            with self._snapshot.elements(part.stored, piece.start - part.first, piece.end - part.first) as flat:
                yield piece.view(flat, piece.start)

        yield show_piece
        self._snapshot.mark_read(part.stored)

    def _commit_early(self) -> None:
        """On rank 0: move the checkpoint into place as soon as all ranks have written.

        A rank that reports nothing for as long as ranks wait for one another is waited for in ``finish``.
        """
        while self._heartbeat.seconds_left and not self._control.lost and not self._outcomes.has_failed():
            if (outcomes := self._outcomes.read_all()) is not None:
                self._heartbeat.beat()
                listed = [item for text in outcomes for item in json.loads(text).items()]
                self._commit({name: Written(*about) for name, about in listed})
                return
            if self._stopped.wait(_LOOK_SECONDS):
                return


def _wait_at_exit(thread: threading.Thread, snapshot: Snapshot, heartbeat: Heartbeat) -> None:
    """Wait, at the program's exit, for a checkpoint that is being written, while it makes progress."""
    if thread.is_alive():
        snapshot.keep_all()
    while thread.is_alive() and heartbeat.seconds_left:
        thread.join(min(1.0, heartbeat.seconds_left))
