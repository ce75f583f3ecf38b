"""A checkpoint that a thread writes while training goes on.

Ranks meet where it is begun, and where it is finished. Between that, each leaves a note in the checkpoint's folder once
its files are on disk, and rank 0's thread puts the checkpoint in its place when all notes are there: so that it is
there as soon as it is whole, whatever steps do meanwhile.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zerofx.checkpoints.names import ModelNames
from zerofx.checkpoints.pieces import Piece
from zerofx.checkpoints.save import Begun, StepCounts, start, write_files
from zerofx.checkpoints.together import cannot_be_done, on_all
from zerofx.checkpoints.training import OwnedValues, Training
from zerofx.disk.checkpoint.folder import abandon, place_of
from zerofx.disk.checkpoint.shard_file import Written
from zerofx.disk.own_files import write_text
from zerofx.errors import CheckpointError, ZeroFXError
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
    """Begin to write a checkpoint into ``folder``, of all as it is now. Collective.

    ``spare_bytes``: what may be held on the host for it; None for no limit.

    Raises:
        CheckpointError: on all ranks; nothing of ``folder`` has been changed then.
    """
    control = training.control
    begun = start(training, names, numbers, state, folder)
    begun = Begun(begun.content.copied(), begun.part, begun.marker)
    try:
        num_local_ranks = len(control.ranks_of_host("save a checkpoint"))
        snapshot = on_all(
            control,
            "keep what is saved",
            lambda: _snapshot(training, begun.content.parts, spare_bytes, num_local_ranks),
        )
    except BaseException:
        if control.rank == 0:
            abandon(begun.part)
        if training.tiers.snapshot is not None:
            training.tiers.snapshot.end()
        raise
    return Later(training, begun, snapshot, keep, place_of(folder, numbers.num_steps))


def _snapshot(
    training: Training, parts: tuple[OwnedValues, ...], spare_bytes: int | None, num_local_ranks: int
) -> Snapshot:
    values = []
    for part in parts:
        if part.entries:
            first, last = training.owned(part.bucket)
            values.append((part.stored, first - part.first, last - part.first))
    try:
        return Snapshot(values, training.tiers, spare_bytes, num_local_ranks=num_local_ranks)
    except ZeroFXError as error:
        raise CheckpointError(str(error)) from error


class Later:
    """A checkpoint under way. ``place`` is where it is to be; all methods are for the thread that runs the steps."""

    def __init__(self, training: Training, begun: Begun, snapshot: Snapshot, keep: int | None, place: Path) -> None:
        self.place = place
        self._control = training.control
        self._begun, self._snapshot, self._keep = begun, snapshot, keep
        self._stopped = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="zerofx-checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of it is still being written, or, on rank 0, the checkpoint not yet in its place."""
        return self._thread.is_alive()

    def tidy(self) -> None:
        """Give back what has been held for it, once it is written."""
        if not self.is_writing:
            self._snapshot.end()

    def finish(self) -> Path:
        """Wait until it is in its place; returns that. Collective.

        Raises:
            CheckpointError: it could not be written; on all ranks, and others are as they were.
        """
        control = self._control

        def written() -> None:
            self._snapshot.keep_all()
            self._thread.join()
            if self._failure is not None:
                raise CheckpointError(self._failure)

        try:
            control.meet(_FINISH)
            on_all(control, _FINISH, written)
        except BaseException:
            self.abandon()
            raise
        self._snapshot.end()
        self.place = control.from_rank_0(self.place, _FINISH)
        return self.place

    def abandon(self) -> None:
        """Leave it unfinished, on this rank alone."""
        self._stopped.set()
        self._snapshot.stop()
        self._thread.join()
        self._snapshot.end()
        if self._control.rank == 0:
            abandon(self._begun.part)

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        content = self._begun.content
        with suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            written = write_files(content, self._begun.part, self._show)
            self._snapshot.stop()
            self._leave_note({"files": {name: [file.num_bytes, file.digest] for name, file in written.items()}})
            if content.rank == 0:
                self._commit()
        except (OSError, ZeroFXError) as error:
            self._failure = cannot_be_done("write a checkpoint", error)
        except BaseException as error:
            self._failure = f"a checkpoint could not be written ({type(error).__name__}: {error})"
            raise
        finally:
            self._snapshot.stop()
            if self._failure is not None:
                with suppress(OSError):
                    self._leave_note({"failure": self._failure})

    @contextmanager
    def _show(self, part: OwnedValues) -> Iterator[Callable[[Piece], AbstractContextManager[torch.Tensor]]]:
        @contextmanager
        def shown(piece: Piece) -> Iterator[torch.Tensor]:
            with self._snapshot.elements(part.stored, piece.start - part.first, piece.end - part.first) as flat:
                yield piece.view(flat, piece.start)

        yield shown
        self._snapshot.done(part.stored)

    def _note(self, rank: int) -> Path:
        return self._begun.part / f"rank-{rank:05}.json"

    def _leave_note(self, note: dict[str, Any]) -> None:
        write_text(self._note(self._begun.content.rank), json.dumps(note))

    def _commit(self) -> None:
        """On rank 0: wait until all ranks have left their notes, and put the checkpoint in its place."""
        notes: list[dict[str, Any]] = []
        left_at: float | None = None
        for rank in range(self._begun.content.num_ranks):
            while not self._note(rank).exists():
                if self._stopped.wait(_LOOK_SECONDS) or self._control.lost:
                    return
                # A program may end without closing its step; what a rank that is gone does not write is not awaited.
                if not threading.main_thread().is_alive():
                    left_at = left_at or time.monotonic()
                    if time.monotonic() - left_at > self._control.patience_seconds:
                        return
            notes.append(json.loads(self._note(rank).read_text(encoding="utf-8")))
        if any("files" not in note for note in notes):
            return  # the rank that failed says so where all finish
        for rank in range(len(notes)):
            self._note(rank).unlink()
        files = [(name, Written(*about)) for note in notes for name, about in note["files"].items()]
        self.place = self._begun.commit(files, self._keep)
