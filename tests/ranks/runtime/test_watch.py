"""Ranks that wait where nothing tells them hear of one that fails or is gone, within seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.compiled.cuda_stand_in.streams import on_streams
from tests.lib.distributed import run_ranks, start_ranks
from tests.lib.models import CASES
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import close_connections
from zerofx.runtime.executor import Runtime
from zerofx.torch_private import distributed

# Hearing takes milliseconds. What would end a wait otherwise is gloo's timeout, of 300 s here.
SOON = 20.0


def _watched(how: str) -> tuple[bool, str]:
    """Whether a rank hears soon that rank 1 of three is lost, and what it takes for the reason."""
    control = Control(dist.group.WORLD, 60.0)
    heard = threading.Event()
    control.call_on_failure(heard.set)
    control.watch()
    control.meet("begin")
    if control.rank == 1 and how == "fails":
        control.fail("step 3 failed on rank 1 (ValueError: no)")
    elif control.rank == 1 and how == "breaks off":
        group = control._group
        assert group is not None
        close_connections(group)
    elif how == "closes":
        control.meet("end")
        control.close()
        time.sleep(0.5)  # of a wrong word
        return heard.is_set(), control.lost
    return heard.wait(SOON), control.lost


def test_all_ranks_hear_of_one_that_fails() -> None:
    assert run_ranks(_watched, 3, "fails") == [(True, "step 3 failed on rank 1 (ValueError: no)")] * 3


def test_all_ranks_hear_of_one_that_breaks_off() -> None:
    for heard, lost in run_ranks(_watched, 3, "breaks off"):
        assert heard and lost.endswith("is gone")


def test_nothing_is_heard_where_all_leave() -> None:
    assert run_ranks(_watched, 3, "closes") == [(False, "")] * 3


def _let_go() -> tuple[bool, list[str]]:
    """Of a control that nobody closes: whether another rank hears something, and the threads that are left."""
    controls = [Control(dist.group.WORLD, 60.0)]
    heard = threading.Event()
    controls[0].call_on_failure(heard.set)
    controls[0].watch()
    controls[0].meet("begin")
    if dist.get_rank() == 0:
        controls.clear()
    dist.barrier()
    early = heard.wait(0.5)
    controls.clear()
    dist.barrier()
    deadline = time.monotonic() + SOON
    while any(thread.name == "zerofx-watch" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return early, [thread.name for thread in threading.enumerate() if thread.name == "zerofx-watch"]


def test_a_control_that_is_let_go_of_leaves_without_a_word_of_failure() -> None:
    assert run_ranks(_let_go, 2) == [(False, [])] * 2


def _killed(folder: str) -> None:
    control = Control(dist.group.WORLD, 60.0)
    heard = threading.Event()
    control.call_on_failure(heard.set)
    control.watch()
    control.meet("begin")
    if control.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if heard.wait(SOON):
        _leave(folder, control.lost)


def _leave(folder: str, *texts: str) -> None:
    """End this process, which may wait no more for the others, and say something."""
    Path(folder, str(dist.get_rank())).write_text("\n".join(texts))
    os._exit(1)


def _told(fn: Callable[..., None], num_ranks: int, folder: Path, *args: Any) -> dict[str, list[str]]:
    """What ranks that end by ``_leave`` have said."""
    meeting, told = folder / "meeting", folder / "told"
    meeting.mkdir()
    told.mkdir()
    ranks = start_ranks(fn, num_ranks, meeting, str(told), *args)
    try:
        for process in ranks:
            process.join(2 * SOON)
    finally:
        for process in ranks:
            process.kill()
    return {path.name: path.read_text().splitlines() for path in told.iterdir()}


def test_all_ranks_hear_of_one_that_is_killed(tmp_path: Path) -> None:
    assert _told(_killed, 3, tmp_path) == {"0": ["rank 1 is gone"], "2": ["rank 1 is gone"]}


def _failed_step(folder: str, stage: int) -> None:
    """Says what a rank raises where rank 1 fails in mid-backward, what at the next step, and how soon.

    As with NCCL, a rank that gives its communicators up ends its own waits, and no other rank's.
    """
    case, rank = CASES["gpt"], dist.get_rank()

    def give_up(group: dist.ProcessGroup, _device: torch.device) -> None:
        if rank == 0:
            close_connections(group)

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("rank 1 is to fail here")

    with on_streams(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(distributed, "abort", give_up)
        torch.manual_seed(0)
        model = case.model()
        step = zerofx.compile(model, torch.optim.AdamW(model.parameters()), stage, backend="eager")
        args, kwargs = case.batch(torch.Generator().manual_seed(rank))
        step(*args, **kwargs)
        if rank == 1:
            patched.setattr(Runtime, "reduce_scatter", fail)
            patched.setattr(Runtime, "reduce_scatter_into", fail)
        begun, errors = time.monotonic(), []
        for _ in range(2):
            with pytest.raises((ValueError, zerofx.RankMismatchError)) as raised:
                step(*args, **kwargs)
            errors.append(f"{type(raised.value).__name__}: {raised.value}".splitlines()[0])
        while rank == 1 and not Path(folder, "0").exists() and time.monotonic() - begun < 1.5 * SOON:
            time.sleep(0.1)  # its process is there for as long as the other waits
        _leave(folder, *errors, str(time.monotonic() - begun))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_waits_on_its_device_hears_of_one_that_failed_in_backward(stage: int, tmp_path: Path) -> None:
    told = _told(_failed_step, 2, tmp_path, stage)
    assert told["1"][0] == "ValueError: rank 1 is to fail here"
    *errors, seconds = told["0"]
    for text in errors:
        assert text.startswith("RankMismatchError")
        assert "step 2 failed on rank 1 (ValueError: rank 1 is to fail here)" in text
    assert float(seconds) < SOON
