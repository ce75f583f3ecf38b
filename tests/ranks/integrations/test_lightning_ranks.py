"""``ZeroFXStrategy`` on several ranks, each with batches of its own, or with those of all that share a computation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.lightning_runs import apart_at_most, fit, ours
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.trainers import as_started_by_torchrun

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of few workers, of short epochs and of torch


def _fitted(strategy: str, folder: str, options: dict[str, Any], samples: int) -> Any:
    as_started_by_torchrun()
    return fit(ours(**options) if strategy == "ours" else strategy, Path(folder), devices=2, samples=samples)


@pytest.mark.days(3)
def test_ranks_train_as_those_of_lightnings_own_strategy(tmp_path: Path) -> None:
    theirs, mine = (run_ranks(_fitted, 2, name, str(tmp_path / name), {}, 8) for name in ("ddp", "ours"))
    assert max(map(apart_at_most, mine, theirs)) < 1e-6


@pytest.mark.days(3)
def test_ranks_that_share_a_computation_are_given_the_same_batches(tmp_path: Path) -> None:
    options = {"mesh": {"model": 2}, "machine": SHARING}
    mine = run_ranks(_fitted, 2, "ours", str(tmp_path / "ranks"), options, 16)
    alone = fit("ddp", tmp_path / "one")
    assert max(apart_at_most(rank, alone) for rank in mine) < 1e-5
