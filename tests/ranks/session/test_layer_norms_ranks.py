"""The norms of each layer's gradients, whose slices are on several ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.layer_norms import unlike_eager_mode


def _wrong(runs: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return [
        f"{stage}, {options}: {text}" for stage, options in runs for text in unlike_eager_mode("gpt", stage, **options)
    ]


def test_norms_are_those_of_eager_mode() -> None:
    for rank, wrong in enumerate(run_ranks(_wrong, 2, [(0, {}), (3, {"max_grad_norm": 0.5})])):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
def test_on_a_mesh() -> None:
    mesh = {"replicate": 2, "shard": 2}
    runs = [(1, {"mesh": mesh}), (3, {"mesh": mesh, "max_grad_norm": 0.5}), (3, {"mesh": mesh, "states_over": "shard"})]
    for rank, wrong in enumerate(run_ranks(_wrong, 4, runs)):
        assert wrong == [], f"rank {rank}"
