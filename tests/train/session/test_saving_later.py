"""Checkpoints that are written while steps go on: they have what there was, to the bit, and disturb nothing."""

from __future__ import annotations

import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import zerofx
from tests.lib.models import batches
from tests.lib.runs.checkpoints import Way, outcome, train
from zerofx import CheckpointError
from zerofx.disk.checkpoint.folder import latest, read_marker
from zerofx.disk.checkpoint.marker import Marker
from zerofx.disk.checkpoint.shard_file import ShardWriter

QUICK = [
    Way(3, "fp16", options={"precision": zerofx.Precision("fp16", loss_scale=2.0**8), "max_grad_norm": 0.1}),
    Way(1, "bf16", 1, ("device", "nvme", "device")),
    Way(3, "bf16", 1, ("host", "nvme", "host")),
]
MORE_WAYS = [
    Way(0, "bf16", 4),
    Way(3),
    Way(2, "bf16", options={"delayed_update": 2}),
    Way(1, None, 1, ("device", "host", "host")),
    Way(1, "bf16", 1, ("device", "host", "device")),
    Way(3, None, 1, ("nvme", "nvme", "device")),
]
WAYS = [*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in MORE_WAYS)]
MORE = 3  # steps while a checkpoint is written


@contextmanager
def writing_waits(monkeypatch: pytest.MonkeyPatch, wait: threading.Event) -> Iterator[None]:
    """Nothing is written by a thread before `wait` is set, nor in one go after it."""
    draw, write = random.Random(3), ShardWriter.write

    def later(writer: ShardWriter, *about: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            wait.wait()
            time.sleep(draw.choice([0.0, 0.0, 0.002]))
        write(writer, *about)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "write", later)
        yield


def check(place: Path, expected: Marker) -> None:
    """What was written is what a checkpoint at the same moment had."""
    found = read_marker(place)
    assert found.files == expected.files and found.optimizer == expected.optimizer and found.extra == expected.extra
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint.json", *sorted(found.files)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_saved_is_what_there_was(
    way: Way, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, scheduler = way.step()
    given = list(batches(way.case, 0, 3 + 2 * MORE))
    train(step, scheduler, given[:3])
    counter = {"batches": torch.tensor([3])}
    expected = read_marker(step.save_checkpoint(tmp_path / "at once", state={"s": scheduler, "c": counter}))
    written = threading.Event()
    with writing_waits(monkeypatch, written):
        place = step.save_checkpoint(tmp_path / "later", state={"s": scheduler, "c": counter}, asynchronous=True)
        counter["batches"].fill_(-1)
        losses = train(step, scheduler, given[3 : 3 + MORE])
        assert step.is_saving
        written.set()
        assert step.finish_saving() == place and not step.is_saving and step.finish_saving() is None
        check(place, expected)
        expected = read_marker(step.save_checkpoint(tmp_path / "at once", state={"s": scheduler}))
        place_2 = step.save_checkpoint(tmp_path / "later", state={"s": scheduler}, asynchronous=True)
        losses += train(step, scheduler, given[3 + MORE :])  # while it writes
        step.finish_saving()
        check(place_2, expected)
    # Steps meanwhile are those that there would have been, from then on as well.
    after = outcome(step, losses)
    step.close()
    again, scheduler = way.step(seed=9)
    again.load_checkpoint(place, state={"s": scheduler, "c": counter})
    assert counter["batches"].item() == 3
    losses = train(again, scheduler, given[3 : 3 + MORE])
    again.flush()  # as saving does
    assert outcome(again, losses + train(again, scheduler, given[3 + MORE :])).differences(after) == []
    again.close()


def test_nothing_is_held_once_it_is_written(tmp_path: Path, drive: Path) -> None:
    way = Way(1, "bf16", 1, ("device", "nvme", "device"))
    step, scheduler = way.step()
    given = list(batches(way.case, 0, 8))
    train(step, scheduler, given[:3])
    before = step.tiers()
    for number in range(2):
        step.save_checkpoint(tmp_path / "run", asynchronous=True)
        train(step, scheduler, given[3 + number : 4 + number])
    step.finish_saving()
    assert step.tiers() == before
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000003", "step-00000004"]
    step.close()


def test_closing_finishes_what_is_being_saved(tmp_path: Path) -> None:
    way = Way(3)
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, 0, 2))
    place = step.save_checkpoint(tmp_path, asynchronous=True)
    step.close()
    assert latest(tmp_path) == place


def _failing(step: zerofx.Step, folder: Path) -> None:
    """Begin to save where nothing can be written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        step.save_checkpoint(folder, asynchronous=True)
        deadline = time.monotonic() + 60
        while step.is_saving and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_fails_is_raised_where_it_is_waited_for(tmp_path: Path) -> None:
    way = Way(3)
    step, scheduler = way.step()
    given = list(batches(way.case, 0, 6))
    train(step, scheduler, given[:2])
    first = step.save_checkpoint(tmp_path)
    calls: list[Callable[[], object]] = [
        step.finish_saving,
        lambda: step.save_checkpoint(tmp_path),
        lambda: step.load_checkpoint(tmp_path),
    ]
    for number, call in enumerate(calls):
        _failing(step, tmp_path)
        train(step, scheduler, given[2 + number : 3 + number])
        with pytest.raises(CheckpointError, match="look at the space that is left"):
            call()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", first.name]
    _failing(step, tmp_path)
    with pytest.raises(CheckpointError, match="look at the space that is left"):
        step.close()
    assert latest(tmp_path) == first


def test_what_else_changes_parameters_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    way = Way(3)
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, 0, 2))
    wait = threading.Event()
    with writing_waits(monkeypatch, wait):
        step.save_checkpoint(tmp_path, asynchronous=True)
        held = step._steps.taken.state.buckets[0]  # type: ignore[union-attr]
        held.flat["exp_avg"].add_(1)  # type: ignore[union-attr]
        wait.set()
        with pytest.raises(CheckpointError, match="changed by steps alone while they are saved"):
            step.finish_saving()
    step.close()


def test_without_space_on_the_host_saving_is_refused(tmp_path: Path, drive: Path) -> None:
    tiers = ("device", "nvme", "device")
    needed = Way(1, "bf16", 1, tiers).step()[0]
    needed.prepare(*next(batches(Way().case, 0, 1))[0])
    way = Way(1, "bf16", 1, tiers, options={"host_budget": needed.compiled.lowered.simulation.live.host_block_bytes})
    needed.close()
    step, scheduler = way.step()
    train(step, scheduler, batches(way.case, 0, 2))
    with pytest.raises(CheckpointError, match="raise host_budget, or save without asynchronous=True"):
        step.save_checkpoint(tmp_path / "run", asynchronous=True)
    assert not step.is_saving and list((tmp_path / "run").iterdir()) == []
    step.save_checkpoint(tmp_path / "run")
    step.close()
