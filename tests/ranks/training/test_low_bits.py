"""Frozen weights of tensor subclasses: adapters next to them are trained as in eager mode, however they are sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.lib.distributed import run_ranks
from tests.lib.runs.low_bits import (
    OF_LIBRARIES,
    RECIPES,
    Counts,
    counts,
    fp8_unlike_eager_mode,
    need,
    unlike_eager_mode,
)  # fmt: skip

RUNS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, two micro-batches": {"stage": 2, "accumulate": 2, "reduce": "once"},
    "stage 3": {"stage": 3},
    "stage 3, on the host": {"stage": 3, "offload": "host", "memory_budget": "least", "tile": "none"},
    "stage 3, two micro-batches, computed again": {"stage": 3, "accumulate": 2, "reduce": "once", "recompute": "full"},
}
OWN = ["flat", "stateful"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_adapters_like_eager_mode(kind: str, run: str, num_ranks: int) -> None:
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode, num_ranks, kind, {run: RUNS[run]})):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.parametrize("kind", OF_LIBRARIES)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_so_with_weights_of_other_libraries(kind: str, num_ranks: int) -> None:
    need(kind)
    for rank, wrong in enumerate(run_ranks(unlike_eager_mode, num_ranks, kind, RUNS)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_products_in_fp8_train_like_eager_mode(recipe: str, num_ranks: int) -> None:
    pytest.importorskip("torchao", reason="its layers with products in fp8 are trained, where it is installed")
    for rank, wrong in enumerate(run_ranks(fp8_unlike_eager_mode, num_ranks, recipe, RUNS)):
        assert wrong == {}, f"rank {rank}"


def _check_counts(kind: str, most: float, sizes: dict[str, int] | None = None) -> None:
    found, plain = run_ranks(_counts_of, 2, kind, sizes or {})[0]
    assert found.wire[0] == found.wire[1] and plain.wire[0] == plain.wire[1]
    assert found.peak[0] == found.peak[1]
    assert 0 < found.wire[1] < most * plain.wire[1]


def _counts_of(kind: str, sizes: dict[str, int]) -> tuple[Counts, Counts]:
    return counts(kind, **sizes), counts("bfloat16", **sizes)


def test_what_is_sent_are_codes_and_scales_and_the_peak_is_as_planned() -> None:
    _check_counts("flat", 0.65)  # of 16 bits a weight 9; adapters and the head are sent whole


@pytest.mark.parametrize(("kind", "most"), [("bitsandbytes", 0.42), ("bitsandbytes, double", 0.40)])
def test_so_are_those_of_four_bits(kind: str, most: float) -> None:
    need(kind)
    _check_counts(kind, most)


@pytest.mark.parametrize(("kind", "most"), [("bitsandbytes", 0.30), ("bitsandbytes, double", 0.28)])
def test_of_a_wide_model_whose_adapters_are_few_three_tenths_are_left(kind: str, most: float) -> None:
    need(kind)
    _check_counts(kind, most, {"width": 1024, "inside": 2048})


def _unlike_on_a_drive(kind: str, drive: str) -> dict[str, list[str]]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    options = {"offload": "nvme", "memory_budget": "least", "tile": "none"}
    return unlike_eager_mode(kind, {"stage 3, on a drive": {"stage": 3, **options}})


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", ["flat", "bitsandbytes, double"])
def test_weights_wait_on_a_drive_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    need(kind)
    for rank, wrong in enumerate(run_ranks(_unlike_on_a_drive, 2, kind, str(tmp_path))):
        assert wrong == {}, f"rank {rank}"
