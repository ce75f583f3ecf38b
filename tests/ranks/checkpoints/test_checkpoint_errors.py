"""Checkpoints that cannot be written or loaded on one rank: one error on all, and nothing has changed."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import batches
from tests.lib.runs.checkpoints import Way, train
from zerofx import CheckpointError


def _error(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except CheckpointError as error:
        return str(error)
    return "nothing"


def _bad_days(folder: str) -> dict[str, str]:
    rank, way = dist.get_rank(), Way(3, "bf16")
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, rank, 2))
    first = step.save_checkpoint(folder)
    errors = {}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # whose drive is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    errors["full"] = _error(lambda: step.save_checkpoint(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors["state"] = _error(lambda: step.save_checkpoint(folder, state={"x": {"a": _error if rank else 1}}))
    assert [path.name for path in Path(folder).glob("*step*")] == [first.name]
    second = step.save_checkpoint(folder)
    whole = step.full_state_dict()
    dist.barrier()
    if rank == 0:
        for place, name in ((first, "state-00001"), (second, "model-00001")):
            path = place / f"{name}-of-00002.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    dist.barrier()
    train(step, scheduler, batches(way.case, rank, 1))
    latest = step.full_state_dict()
    errors["flipped"] = _error(lambda: step.load_checkpoint(folder))
    errors["of rank 1"] = _error(lambda: step.load_checkpoint(first))
    errors["nowhere"] = _error(lambda: step.load_checkpoint(folder if rank == 0 else "nowhere"))
    assert all(torch.equal(value, latest[name]) for name, value in step.full_state_dict().items())
    assert any(not torch.equal(value, latest[name]) for name, value in whole.items())
    train(step, scheduler, batches(way.case, rank, 1))
    step.close()
    return errors


def test_all_ranks_raise_one_error(tmp_path: Path) -> None:
    first, second = run_ranks(_bad_days, 2, str(tmp_path))
    assert first == second
    assert "on rank 1 of 2" in first["full"] and "look at the space that is left" in first["full"]
    assert "found a builtins.function at state.x.a" in first["state"]
    assert "model-00001-of-00002.safetensors" in first["flipped"]
    assert "state-00001-of-00002.safetensors" in first["of rank 1"]
    assert "found nothing there" in first["nowhere"]


def _other_checkpoints(folder: str) -> list[str]:
    step, _ = Way().step()
    step.prepare(*next(batches(Way().case, 0, 1))[0])
    places = [step.save_checkpoint(folder), step.save_checkpoint(folder)]
    rank, messages = dist.get_rank(), []
    for place, weights_only in ((places[rank], False), (places[0], rank == 1)):
        with pytest.raises(zerofx.RankMismatchError) as caught:
            step.load_checkpoint(place, weights_only=weights_only)
        messages.append(str(caught.value))
    return messages


def test_ranks_that_load_different_checkpoints_or_parts_of_one_are_told(tmp_path: Path) -> None:
    messages, others = run_ranks(_other_checkpoints, 2, str(tmp_path))
    assert messages == others and all("expected the same checkpoint on every rank" in text for text in messages)
    assert "rank 1: weights_only=True" in messages[1]


def _disagreeing(folder: str) -> list[str]:
    """Errors where one rank of three, the first or the last, asks for something else; each step is closed by it."""
    rank, messages = dist.get_rank(), []
    for odd in (0, 2):
        for own, others in (
            ({"path": f"{folder}/own"}, {"path": f"{folder}/run"}),
            ({"path": folder, "asynchronous": True}, {"path": folder}),
            ({"path": folder, "keep": 2}, {"path": folder, "keep": 3}),
        ):
            step, scheduler = Way().step()
            train(step, scheduler, batches(Way().case, rank, 1))
            began = time.monotonic()
            with pytest.raises(zerofx.RankMismatchError) as caught:
                step.save_checkpoint(**(own if rank == odd else others))
            assert time.monotonic() - began < 30
            messages.append(f"{odd} {caught.value}")
            step.close()
        step, _ = Way().step()
        with pytest.raises(zerofx.RankMismatchError) as caught:
            zerofx.Run(step, folder, every=2 if rank == odd else 3)
        messages.append(f"{odd} {caught.value}")
        step.abandon()
    assert not list(Path(folder).rglob("*.safetensors"))
    return messages


@pytest.mark.days(3)
def test_ranks_that_save_differently_are_told_at_once_and_the_odd_one_is_named(tmp_path: Path) -> None:
    first, *others = run_ranks(_disagreeing, 3, str(tmp_path))
    assert others == [first, first] and len(first) == 8
    for text, what in zip(first, 2 * ["folder=", "asynchronous=", "keep=", "every="], strict=True):
        assert f"found another on rank {text[0]}:" in text and what in text


def _elsewhere(folder: str) -> str:
    step, _ = Way().step()
    step.prepare(*next(batches(Way().case, 0, 1))[0])
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    os.chdir(own)
    with pytest.raises(zerofx.RankMismatchError) as caught:
        step.save_checkpoint("run")
    return str(caught.value)


def test_a_relative_path_is_one_folder_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_elsewhere, 2, str(tmp_path))
    assert first == second and f"{tmp_path}/0/run" in first and f"{tmp_path}/1/run" in first
