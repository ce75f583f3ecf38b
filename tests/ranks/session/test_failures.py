"""Bad days of the nvme tier: what a step does, on all ranks, when a drive is full, fails, or the process is killed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, DIM, Case, batches
from tests.lib.runs.offloads import offloading, placing, prepare_case
from tests.lib.runs.training import build
from zerofx.errors import CheckpointError, RankMismatchError, TierError, ZeroFXError, ZeroFXWarning
from zerofx.scheduler.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("drive")


def _step(plan: Plan | None, stage: int = 0, case: Case = CASES["gpt"]) -> tuple[zerofx.Step, tuple[Any, ...]]:
    model = build(case)
    args, _ = next(batches(case, 0, 1))
    return zerofx.compile(model, case.optimizer(model), stage, plan=plan, backend="eager"), args


def _twice(step: zerofx.Step, args: tuple[Any, ...]) -> None:
    """Two steps: a rank may have all it needs for the one that fails on another."""
    for _ in range(2):
        step(*args)


def _limit_files(num_bytes: int) -> None:
    """No file of this process can grow past so many bytes from here on, as on a drive that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_states_are_striped_over_several_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = [tmp_path / name for name in ("first", "second")]
    for one in drives:
        one.mkdir()
    monkeypatch.setenv("ZEROFX_NVME_DIR", os.pathsep.join(map(str, drives)))
    step, args = _step(placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "device"))
    reference, _ = _step(None)
    for _ in range(2):
        assert torch.equal(step(*args), reference(*args))
    assert all(list(one.glob("*/*.bin")) for one in drives)
    step.close()
    assert not any(list(one.iterdir()) for one in drives)


def _change(drive: Path) -> None:
    """Flip a bit in every file."""
    for path in drive.glob("*/*.bin"):
        data = bytearray(path.read_bytes())
        data[0] ^= 1  # what is after the values, up to a whole page, does not matter
        path.write_bytes(data)


def test_a_state_that_was_changed_on_the_drive_is_never_trained_on(drive: Path) -> None:
    step, args = _step(placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "device"))
    step(*args)
    before = step.full_state_dict()
    _change(drive)
    with pytest.raises(TierError, match=rf"expected the hash .* of {drive}/.*\.bin, found .*not what was written"):
        step(*args)
    assert all(torch.equal(before[name], value) for name, value in step.full_state_dict().items())


def test_a_step_whose_drive_has_failed_is_closed_all_the_same(drive: Path, tmp_path_factory: Any) -> None:
    step, args = _step(placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "device"))
    step(*args)
    expected = step.full_state_dict()
    _change(drive)
    with pytest.raises(CheckpointError, match="not what was written") as refused:
        step.save_checkpoint(tmp_path_factory.mktemp("saved"))
    assert "look at the space that is left" not in str(refused.value)
    with pytest.warns(
        ZeroFXWarning, match=r"found that the step could not be closed \(.*lost are the optimizer's states"
    ):
        step.close()
    assert step.is_closed and not list(drive.iterdir())
    torch.testing.assert_close(dict(step.model.state_dict()), expected, rtol=0, atol=0)
    step.close()


def _many_rows(_: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.ones(10_000, DIM), torch.ones(10_000, DIM)), {}


def _full_on_rank_1(drive: str) -> tuple[str, list[str], str, float]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    case = replace(CASES["stack"], batch=_many_rows)
    prepared = prepare_case(case, 2, 2)
    step, args = _step(offloading(prepared, prepared.plan, ["nvme"]), 2, case)
    step.prepare(*args)
    if dist.get_rank() == 1:
        _limit_files(1 << 17)  # less than activations have, and more than the process group's store
    began = time.monotonic()
    with pytest.raises(ZeroFXError) as caught:
        _twice(step, args)
    seconds = time.monotonic() - began
    if dist.get_rank() == 1:
        _limit_files(resource.RLIM_INFINITY)
    with pytest.raises(RankMismatchError) as after:
        step(*args)
    dist.barrier()  # the process group is as it was
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.__notes__, str(after.value), seconds


def test_a_drive_that_fills_up_on_one_rank_ends_the_step_on_all(drive: Path) -> None:
    zero, one = run_ranks(_full_on_rank_1, 2, str(drive))
    assert one[0].startswith("TierError: expected to write bytes 0 to") and "File too large" in one[0]
    assert zero[0].startswith("RankMismatchError: expected all ranks to run step 1, found that step 1 failed on rank 1")
    assert "File too large" in zero[0] and "set ZEROFX_NVME_DIR to other drives" in zero[0]
    for error, notes, after, seconds in (zero, one):
        assert any("nothing had been updated yet" in note for note in notes), error
        assert "step 1 failed on rank 1" in after and "restart all ranks" in after
        assert seconds < 30, "nobody waits for a timeout"
    assert not list(drive.iterdir())


def _unreadable_on_rank_1(drive: str) -> tuple[str, str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    prepared = prepare_case(CASES["gpt"], 0, 2)
    step, args = _step(placing(prepared, "nvme", "device"), 0)
    step(*args)
    if dist.get_rank() == 1:
        for path in Path(drive).glob(f"zerofx-{os.getpid()}-*/*.bin"):
            path.unlink()
    with pytest.raises(ZeroFXError) as caught:
        _twice(step, args)
    with pytest.raises(RankMismatchError) as after:
        step.full_state_dict()
    return str(caught.value), str(after.value)


def _closed_with_a_failed_drive(drive: str) -> tuple[bool, str, list[str]]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    step, args = _step(placing(prepare_case(CASES["gpt"], 0, 2), "nvme", "device"), 0)
    step(*args)
    if dist.get_rank() == 1:
        for path in Path(drive).glob(f"zerofx-{os.getpid()}-*/*.bin"):
            path.unlink()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RankMismatchError) as caught:
            step.close()
    step.close()
    return step.is_closed, str(caught.value), [str(warning.message) for warning in told]


def test_a_step_is_closed_on_all_ranks_though_the_drive_of_one_fails_there(drive: Path) -> None:
    zero, one = run_ranks(_closed_with_a_failed_drive, 2, str(drive))
    for is_closed, error, _ in (zero, one):
        assert is_closed and "rank 1 could not" in error and "No such file" in error
    assert any("lost are the optimizer's states" in text for text in one[2])
    assert not list(drive.iterdir())


def test_a_drive_that_fails_on_one_rank_ends_the_step_on_all(drive: Path) -> None:
    for error, after in run_ranks(_unreadable_on_rank_1, 2, str(drive)):
        assert "No such file" in error
        assert "failed on rank 1" in after
    assert not list(drive.iterdir())


_IS_KILLED = """
import os, signal, sys, threading, time
import torch, zerofx
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import placing, prepare_case
from tests.lib.runs.training import build
case = CASES["gpt"]
model = build(case)
args, _ = next(batches(case, 0, 1))
step = zerofx.compile(
    model, case.optimizer(model), 0, plan=placing(prepare_case(case, 0, 1), "nvme", "device"), backend="eager"
)
step(*args)
torch.save(step.full_state_dict(), sys.argv[1])
started = step._steps.taken.runtime.copy_into
def killed(*given):
    started(*given)
    os.kill(os.getpid(), signal.SIGKILL)  # while states are on their way back to the drive
step._steps.taken.runtime.copy_into = killed
step(*args)
"""


@pytest.mark.days(3)
def test_a_process_killed_in_mid_step_leaves_its_checkpoint_and_the_next_run_starts_clean(
    drive: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = tmp_path_factory.mktemp("saved") / "model.pt"
    # Another number of threads may sum in another order.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", _IS_KILLED, str(saved)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    left = sorted(drive.iterdir())
    assert len(left) == 2
    step, args = _step(placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "device"))
    with pytest.warns(ZeroFXWarning, match=f"which were killed have left in {drive}"):
        step.prepare(*args)
    assert not set(left) & set(drive.iterdir())
    reference, _ = _step(None)
    assert torch.equal(step(*args), reference(*args))
    expected = step.full_state_dict()
    found = torch.load(saved)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    step.close()
    assert not list(drive.iterdir())


def test_two_jobs_share_a_folder_without_touching_each_others_files(drive: Path) -> None:
    plan = placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "device")
    (first, args), (second, _) = _step(plan), _step(plan)
    for _ in range(3):
        assert torch.equal(first(*args), second(*args))
    first.close()
    reference, _ = _step(None)
    for _ in range(4):
        expected = reference(*args)
    assert torch.equal(second(*args), expected)
    second.close()
    assert not list(drive.iterdir())
