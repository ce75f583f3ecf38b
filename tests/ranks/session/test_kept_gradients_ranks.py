"""Gradients by name, whose slices are on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.kept_gradients import unlike_eager_mode
from tests.lib.runs.sharing import SHARING


def _wrong(stage: int, bound: float, options: dict[str, Any]) -> list[str]:
    return unlike_eager_mode("gpt", stage, bound, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("stage", "bound", "options"),
    [(0, 0.0, {}), (3, 0.0, {"max_grad_norm": 0.5}), (3, 1e-5, {"mesh": {"model": 2}, "machine": SHARING})],
)
def test_gradients_are_those_of_eager_mode(stage: int, bound: float, options: dict[str, Any]) -> None:
    for rank, wrong in enumerate(run_ranks(_wrong, 2, stage, bound, options)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (3, {"states_over": "shard"})])
def test_on_a_mesh(stage: int, options: dict[str, Any]) -> None:
    options = {"mesh": {"replicate": 2, "shard": 2}, **options}
    for rank, wrong in enumerate(run_ranks(_wrong, 4, stage, 1e-6, options)):
        assert wrong == [], f"rank {rank}"
