"""Products that a plan takes in fp8: ranks train with the bits of torchao's layers in the same places."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.fp8 import MODELS, RECIPES, unlike_torchao
from zerofx.choices import Fp8Recipe

RUNS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "stage 2, two micro-batches": {"stage": 2, "accumulate": 2, "reduce": "once"},
    "stage 3, on the host": {"stage": 3, "offload": "host", "memory_budget": "least", "tile": "none"},
    "stage 3, computed again": {"stage": 3, "recompute": "full"},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_train_as_with_layers_of_torchao(recipe: Fp8Recipe, kind: str, num_ranks: int) -> None:
    pytest.importorskip("torchao", reason="its layers with products in fp8 are trained, where it is installed")
    for rank, wrong in enumerate(run_ranks(unlike_torchao, num_ranks, kind, recipe, RUNS)):
        assert wrong == {}, f"rank {rank}"
