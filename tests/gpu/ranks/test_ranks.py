"""Ranks that share one GPU, or have one each, joined by NCCL: they train what plain torch does, and one that fails
or dies ends the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.gpu.ranks.cases import RUNS, run
from tests.gpu.ranks.joined import join, run_on_one_card, settings, skip_without
from tests.lib.devices import moved
from tests.lib.distributed import start_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.training import build
from zerofx.runtime.executor import Runtime

pytestmark = pytest.mark.gpu

SOON = 10.0  # seconds for the others to hear of a rank that fails; torch's watchdog takes 60 here


@pytest.fixture(autouse=True)
def _several_ranks_on_one_gpu() -> None:
    skip_without()


@pytest.mark.parametrize("name", RUNS)
def test_ranks_on_one_gpu(name: str) -> None:
    num_ranks = RUNS[name].num_ranks
    skip_without(num_ranks)
    assert run_on_one_card(run, num_ranks, "cuda", name) == [[]] * num_ranks


def test_communicators_overlap_where_nccl_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(4)
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    assert run_on_one_card(run, 4, "cuda", "two communicators") == [[]] * 4


def _lost(folder: str, how: str) -> None:
    """Says what rank 0 raises where rank 1 is lost in mid-backward, and how long after."""
    rank = dist.get_rank()
    join("cuda", folder)
    case = moved(CASES["gpt"], torch.device("cuda"))
    model = build(case)
    step = zerofx.compile(model, case.optimizer(model), 3, backend="eager")
    ((args, kwargs),) = batches(case, rank, 1)
    float(step(*args, **kwargs))

    def lose(*_: object, **__: object) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("rank 1 is to fail here")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(Runtime, "reduce_scatter", lose)
            patched.setattr(Runtime, "reduce_scatter_into", lose)
        begun, text = time.monotonic(), ""
        for _ in range(2):  # a loss that is read after the failure may be any number
            try:
                float(step(*args, **kwargs))
            except (ValueError, zerofx.RankMismatchError) as error:
                text = text or f"{type(error).__name__}: {error}".splitlines()[0]
        Path(folder, str(rank)).write_text(f"{time.monotonic() - begun:.1f}\n{text}")
    while rank == 1 and not Path(folder, "0").exists() and time.monotonic() - begun < 2 * SOON:
        time.sleep(0.1)
    os._exit(1)


@pytest.mark.parametrize("how", ["failed", "killed"])
def test_a_rank_that_is_lost_ends_the_others_within_seconds(how: str, tmp_path: Path) -> None:
    meeting, told = tmp_path / "meeting", tmp_path / "told"
    meeting.mkdir()
    told.mkdir()
    with settings("cuda"):
        ranks = start_ranks(_lost, 2, meeting, str(told), how)
    try:
        for process in ranks:
            process.join(60.0 + 2 * SOON)
    finally:
        for process in ranks:
            process.kill()
    seconds, text = (told / "0").read_text().splitlines()
    assert float(seconds) < SOON and text.startswith("RankMismatchError")
    assert ("rank 1 is to fail here" if how == "failed" else "rank 1 is gone") in text
