"""Gradients by name, whose slices are on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.kept_gradients import unlike_eager_mode
from tests.lib.runs.sharing import SHARING


def _wrong(runs: list[tuple[int, float, dict[str, Any]]]) -> list[str]:
    return [
        f"{stage}, {options}: {text}"
        for stage, bound, options in runs
        for text in unlike_eager_mode("gpt", stage, bound, **options)
    ]


def test_gradients_are_those_of_eager_mode() -> None:
    runs = [(0, 0.0, {}), (3, 0.0, {"max_grad_norm": 0.5}), (3, 1e-5, {"mesh": {"model": 2}, "machine": SHARING})]
    for rank, wrong in enumerate(run_ranks(_wrong, 2, runs)):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
def test_on_a_mesh() -> None:
    mesh = {"replicate": 2, "shard": 2}
    runs = [(1, 1e-6, {"mesh": mesh}), (3, 1e-6, {"mesh": mesh, "states_over": "shard"})]
    for rank, wrong in enumerate(run_ranks(_wrong, 4, runs)):
        assert wrong == [], f"rank {rank}"
