"""Checkpoints that several ranks write while steps go on: whole in the end, or one error on all of them."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import batches
from tests.lib.runs.checkpoints import Way, train
from zerofx import CheckpointError
from zerofx.disk.checkpoint.folder import latest, read_marker

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
