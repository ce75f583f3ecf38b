"""Frozen weights of tensor subclasses: adapters next to them are trained as in eager mode, however they are sharded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.low_bits import OF_LIBRARIES, unlike_eager_mode

RUNS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, two micro-batches": {"stage": 2, "accumulate": 2, "reduce": "once"},
    "stage 3": {"stage": 3},
    "stage 3, on the host": {"stage": 3, "offload": "host", "memory_budget": "least", "tile": "none"},
    "stage 3, two micro-batches, computed again": {"stage": 3, "accumulate": 2, "reduce": "once", "recompute": "full"},
}
OWN = ["flat", "stateful"]


def _of_library(kind: str) -> Any:
    pytest.importorskip(OF_LIBRARIES[kind], reason="its weights are trained too, where it is installed")


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_adapters_like_eager_mode(kind: str, num_ranks: int) -> None:
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode, num_ranks, kind, RUNS)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.parametrize("kind", OF_LIBRARIES)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_so_with_weights_of_other_libraries(kind: str, num_ranks: int) -> None:
    _of_library(kind)
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode, num_ranks, kind, RUNS)):
        assert wrong == {}, f"rank {rank}"
