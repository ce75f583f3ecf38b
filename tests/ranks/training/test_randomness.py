"""Dropout on several ranks: whose masks differ, and what is drawn again for the same seed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.training import build

CASE, STEPS = CASES["dropout"], 3


def _plain(seed: int) -> list[Tensor]:
    """Losses under DistributedDataParallel, of the same batches on all ranks."""
    model = build(CASE)
    optimizer, runner = CASE.optimizer(model), DistributedDataParallel(model)
    torch.manual_seed(seed)
    losses = []
    for args, _ in batches(CASE, 0, STEPS):
        optimizer.zero_grad()
        loss = CASE.loss(runner(*args))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _compiled(seed: int, **options: Any) -> tuple[list[Tensor], list[str]]:
    """The same through ``zerofx.compile``, and the warnings."""
    model = build(CASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zerofx.errors.ZeroFXWarning)
        step = zerofx.compile(model, CASE.optimizer(model), 3, **{"backend": "eager", **options})
        torch.manual_seed(seed)
        losses = [step(*args).clone() for args, _ in batches(CASE, 0, STEPS)]
        step.close()
    return losses, [str(warning.message) for warning in caught]


def _losses() -> dict[str, list[float]]:
    rank = dist.get_rank()
    found = {"alike": _compiled(5), "by rank": _compiled(5 + rank), "again": _compiled(5 + rank)}
    found["recomputed"] = _compiled(5 + rank, recompute="full")
    for name, (losses, _) in found.items():
        if name in ("alike", "by rank"):
            expected = _plain(5 + (rank if name == "by rank" else 0))
            assert all(map(torch.equal, losses, expected)), name
    told = {name: told for name, (_, told) in found.items() if told}
    assert list(told) == (["alike"] if rank == 0 else []), told
    if rank == 0:
        (message,) = told["alike"]
        assert "all 2 ranks draw the same random numbers" in message and "torch.manual_seed(seed + rank)" in message
    assert _without_draws() == []
    return {name: [float(loss) for loss in losses] for name, (losses, _) in found.items()}


def test_masks_are_those_of_eager_mode_and_a_warning_says_where_ranks_have_the_same() -> None:
    first, second = run_ranks(_losses, 2)
    # Batches are the same, so that losses differ by masks alone.
    assert first["alike"][0] == second["alike"][0] and first["by rank"][0] != second["by rank"][0]
    for one in (first, second):
        assert one["by rank"] == one["again"] == one["recomputed"]
    assert second["by rank"] != second["alike"]  # which has another seed


def _without_draws() -> list[str]:
    """The warnings of a step that draws nothing, on ranks that are seeded alike."""
    model = build(CASES["stack"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zerofx.errors.ZeroFXWarning)
        step = zerofx.compile(model, CASES["stack"].optimizer(model), 3, backend="eager")
        torch.manual_seed(5)
        for args, _ in batches(CASES["stack"], 0, 2):
            step(*args)
            torch.rand(3)  # what is drawn outside of a step is nobody's concern
        step.close()
    return [str(warning.message) for warning in caught]
