"""Training that is saved, and goes on in new processes: bit for bit what it would have been."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.checkpoints import Outcome, Way, resume, train_and_save

TIERS = [("device", "host", "host"), ("device", "nvme", "device"), ("nvme", "nvme", "device"), ("host", "nvme", "host")]
# A scale that has grown, has been lowered, and is some steps old where it is saved.
GROWING = {"precision": zerofx.Precision("fp16", loss_scale=zerofx.LossScale(2.0**22, growth_interval=4))}
QUICK = [
    Way(0, "bf16", 4, options={"precision": zerofx.Precision("bf16", reduce_dtype="fp32", state_dtype="bf16")}),
    Way(1, None, 1, ("device", "nvme", "host")),
    Way(2, "bf16", 1, ("device", "host", "host")),
    Way(3, "fp16", 4, options=GROWING),
    Way(2, None, 1, options={"delayed_update": 3}),  # what is under way is finished before it is saved
]


def _save_all(ways: list[Way], folder: str) -> list[Outcome]:
    os.environ["ZEROFX_NVME_DIR"] = folder
    return [train_and_save(way, folder) for way in ways]


def _resume_all(ways: list[Way], folder: str, first: int) -> list[Outcome]:
    """Every second way, from `first` on, is resumed by a step that has run before."""
    os.environ["ZEROFX_NVME_DIR"] = folder
    return [resume(way, folder, prepared=number % 2 == first) for number, way in enumerate(ways)]


def _check(ways: list[Way], num_ranks: int, folder: Path, first: int = 1) -> None:
    expected = run_ranks(_save_all, num_ranks, ways, str(folder))
    found = run_ranks(_resume_all, num_ranks, ways, str(folder), first)
    wrong = {
        f"{way} on rank {rank}": differ
        for rank in range(num_ranks)
        for way, a, b in zip(ways, expected[rank], found[rank], strict=True)
        if (differ := a.differences(b))
    }
    assert not wrong
    # Ranks have drawn numbers of their own.
    assert num_ranks == 1 or expected[0][0].losses != expected[1][0].losses


@pytest.mark.sweep(1)
@pytest.mark.parametrize("number", range(len(QUICK)))
def test_two_ranks_go_on_bit_for_bit(number: int, tmp_path: Path) -> None:
    _check([QUICK[number]], 2, tmp_path, first=number % 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_ways_go_on_bit_for_bit(num_ranks: int, tmp_path: Path) -> None:
    ways = [Way(*way) for way in itertools.product(range(4), (None, "bf16"), (1, 4))]
    ways += [Way(*way, options=GROWING) for way in itertools.product(range(4), ("fp16",), (1, 4))]
    ways += [Way(stage, "bf16", 1, options={"delayed_update": 3}) for stage in range(4)]
    ways += [
        Way(stage, "bf16", 1, tiers) for stage in range(4) for tiers in TIERS if stage == 3 or tiers[0] == "device"
    ]
    for first in (0, 1):
        _check(ways, num_ranks, tmp_path / str(first), first)
