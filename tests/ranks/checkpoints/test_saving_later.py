"""Checkpoints that several ranks write while steps go on: whole in the end, or one error on all of them."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import batches
from tests.lib.runs.checkpoints import Way, train
from zerofx import CheckpointError
from zerofx.checkpoints import later
from zerofx.checkpoints.save import write_files
from zerofx.disk.checkpoint.folder import begin, latest, read_marker

WAYS = [Way(0), Way(2, "bf16"), Way(3, "bf16", 1, ("device", "nvme", "device"))]


def _saved_both_ways(folder: str) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = folder
    wrong = []
    for way in WAYS:
        step, scheduler = way.step()
        given = list(batches(way.case, dist.get_rank(), 6))
        train(step, scheduler, given[:2])
        for number in (2, 4):
            expected = step.save_checkpoint(Path(folder, f"{way} at once"), state={"s": scheduler})
            place = step.save_checkpoint(Path(folder, f"{way} later"), state={"s": scheduler}, asynchronous=True)
            train(step, scheduler, given[number : number + 2])
            if number == 4:
                assert step.finish_saving() == place
        if read_marker(place).files != read_marker(expected).files:
            wrong.append(str(way))
        step.close()
    return wrong


def test_all_ranks_write_what_there_was(tmp_path: Path) -> None:
    assert run_ranks(_saved_both_ways, 2, str(tmp_path)) == [[], []]


def _failing(folder: str, rank: int) -> list[str]:
    way, errors = Way(3), []
    step, scheduler = way.step()
    given = list(batches(way.case, dist.get_rank(), 4))
    train(step, scheduler, given[:1])
    first = step.save_checkpoint(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for call in (step.finish_saving, step.close):
        if dist.get_rank() == rank:  # whose drive is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        step.save_checkpoint(folder, asynchronous=True)
        train(step, scheduler, given[1:3])
        with pytest.raises(CheckpointError) as raised:
            call()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        errors.append(str(raised.value))
        dist.barrier()
        assert latest(Path(folder)) == first and len(list(Path(folder).iterdir())) == 2
    return errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_drive_is_one_error_on_all_ranks(tmp_path: Path, rank: int) -> None:
    first, second = run_ranks(_failing, 2, str(tmp_path), rank)
    assert first == second and all(f"on rank {rank} of 2" in text for text in first)


def _left_by_one(folder: str) -> str:
    way = Way(3)
    step, scheduler = way.step()
    given = list(batches(way.case, dist.get_rank(), 3))
    train(step, scheduler, given[:1])
    step.save_checkpoint(folder, asynchronous=True)
    error = ""
    try:
        if dist.get_rank() == 1:
            raise ValueError("of the user's")
        train(step, scheduler, given[1:])
    except ValueError:
        step._life.control.fail("rank 1 has failed")
    except zerofx.RankMismatchError as raised:
        error = str(raised)
    step.close()
    return error


@pytest.mark.filterwarnings("ignore:expected to give back all that was trained")
def test_a_step_that_has_failed_is_closed_all_the_same(tmp_path: Path) -> None:
    errors = run_ranks(_left_by_one, 2, str(tmp_path))
    assert "rank 1" in errors[0]


def _left_in_the_lurch(folder: str, kind: str) -> tuple[str, float]:
    """A rank's thread fails, hangs, or its file is removed: the seconds until nobody waits any more."""
    os.environ["ZEROFX_TIMEOUT"] = "4"
    way, rank = Way(3), dist.get_rank()
    step, scheduler = way.step()
    given = list(batches(way.case, rank, 3))
    train(step, scheduler, given[:1])
    first = step.save_checkpoint(folder)
    patched, hang = pytest.MonkeyPatch(), threading.Event()

    def fails(content: Any, part: Path, *about: Any) -> Any:
        if kind == "hangs":
            hang.wait()
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "removed":
            shutil.rmtree(part)
        return write_files(content, part, *about)

    if rank == 1:
        patched.setattr(later, "write_files", fails)
    began = time.monotonic()
    step.save_checkpoint(folder, asynchronous=True)
    if rank == 0 and kind != "hangs":
        while step.is_saving:
            assert time.monotonic() - began < 60
            time.sleep(0.05)
    error = ""
    try:
        step.finish_saving()
    except (CheckpointError, zerofx.RankMismatchError) as raised:
        error = str(raised)
    seconds = time.monotonic() - began
    patched.undo()
    assert latest(Path(folder)) == first
    if kind != "hangs":
        train(step, scheduler, given[1:2])
        assert step.save_checkpoint(folder).name == "step-00000002"
    hang.set()
    step.close()
    return error, seconds


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", ["full", "removed", "hangs"])
@pytest.mark.filterwarnings("ignore:expected to give back all that was trained")
def test_no_rank_waits_without_end_for_one_that_cannot_write(tmp_path: Path, kind: str) -> None:
    for error, seconds in run_ranks(_left_in_the_lurch, 2, str(tmp_path), kind):
        assert seconds < 60 and re.search(r"on rank [01] of 2" if kind == "removed" else "on rank 1 of 2", error)
        assert kind == "hangs" or "expected to write a checkpoint" in error


def _two_runs(folder: str) -> int:
    """Both ranks as runs of their own in one folder, which have a checkpoint under way at once."""
    way, rank = Way(3), dist.get_rank()
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, rank, 1))
    unfinished = []
    for number in range(3):
        if rank == number % 2:
            unfinished.append(begin(Path(folder), 9))
        dist.barrier()
        if rank != number % 2:
            begin(Path(folder), 9).abandon()
        dist.barrier()
        assert all(one.path.is_dir() for one in unfinished)
    for one in unfinished:
        one.abandon()
    step.close()
    return len(unfinished)


def test_a_second_run_leaves_what_another_one_writes(tmp_path: Path) -> None:
    assert run_ranks(_two_runs, 2, str(tmp_path)) == [2, 1]
    assert list(tmp_path.iterdir()) == []
