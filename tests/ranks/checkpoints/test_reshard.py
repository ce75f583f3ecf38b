"""Checkpoints of some ranks, stage and dtypes that are loaded by others: the values are those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.distributed import run_ranks
from tests.lib.models import batches
from tests.lib.runs.checkpoints import Way, train
from tests.lib.runs.training import world
from zerofx.disk.checkpoint.reader import CheckpointReader

WAYS = [Way(stage, precision) for stage in range(4) for precision in (None, "bf16")]


def _save(folder: str, ways: list[Way]) -> None:
    """Train each way for two steps, and save it, with the whole state next to it as plain torch has it."""
    rank, num_ranks = world()
    for way in ways:
        step, scheduler = way.step()
        train(step, scheduler, batches(way.case, rank, 2))
        place = step.save_checkpoint(Path(folder, f"{num_ranks} of {way}"))
        # Of buffers each rank has its own, as under DistributedDataParallel without broadcasts.
        torch.save((step.full_state_dict(), step.optimizer.state_dict()), place / f"whole-{rank}.pt")
        step.close()


def _load(folder: str, ways: list[Way]) -> list[str]:
    """Load all that was saved with each way, before the first step or after some."""
    wrong = []
    for way in ways:
        step, scheduler = way.step(3)
        for path in sorted(Path(folder).iterdir()):
            place = step.load_checkpoint(path)
            step.prepare(*next(batches(way.case, 0, 1))[0])
            own = place / f"whole-{world()[0]}.pt"
            model, optimizer = torch.load(own if own.exists() else place / "whole-0.pt")
            wrong += [f"{path.name} by {way}: {what}" for what in _differences(step, model, optimizer)]
            train(step, scheduler, batches(way.case, world()[0], 1))
        step.close()
    return wrong


def _differences(step: Any, model: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> list[str]:
    found = step.full_state_dict()
    wrong = [name for name, value in model.items() if not torch.equal(value, found[name])]
    states = step.optimizer.state_dict()["state"]
    for index, entry in optimizer["state"].items():
        wrong += [f"{name} of {index}" for name, value in entry.items() if not torch.equal(value, states[index][name])]
    return wrong


@pytest.mark.days(3)
def test_ranks_come_and_go(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), WAYS[::5])
    run_ranks(_save, 3, str(tmp_path), WAYS[3:4])
    for num_ranks, ways in ((3, WAYS[4:5]), (1, WAYS[1:2])):
        assert run_ranks(_load, num_ranks, str(tmp_path), ways) == [[]] * num_ranks


def test_one_rank_writes_whole_tensors_and_others_boxes(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), WAYS[6:7])
    (place,) = tmp_path.glob("*/step-*")
    reader = CheckpointReader(place)
    shards = [reader.shard(kind, rank) for kind in ("model", "state") for rank in (0, 1)]
    boxes = [placed.entry for shard in shards for listed in shard.placed.values() for placed in listed]
    weights = [entry for entry in boxes if entry.name == "up.weight"]
    assert sum(entry.box.numel for entry in weights) == 7 * 8
    assert all(entry.shape == (7, 8) for entry in weights)


@pytest.mark.slow
def test_all_numbers_of_ranks_stages_and_dtypes(tmp_path: Path) -> None:
    for num_ranks in (1, 2, 3, 4):
        run_ranks(_save, num_ranks, str(tmp_path), WAYS)
    for num_ranks in (1, 2, 3, 4):
        assert run_ranks(_load, num_ranks, str(tmp_path), WAYS) == [[]] * num_ranks
