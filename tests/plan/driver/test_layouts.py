"""Layouts on the model axis that the program's seconds do not tell apart: the simulator and the budget choose."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import zerofx
from tests.ranks.training.test_sequences import MACHINE, WIDTH, Sequence
from zerofx import MemoryBudgetError
from zerofx.driver.meshes.layouts import best_prices
from zerofx.scheduler.cost.sharing import Prices

NUM_TOKENS = 4096


def planned(**options: Any) -> zerofx.Plan:
    """One head on four ranks, which share its tokens."""
    with torch.device("meta"):
        model, x = Sequence(), torch.empty(1, NUM_TOKENS, WIDTH)
    options = {"backend": "eager", "machine": MACHINE, "mesh": {"model": 4}, "offload": "none", **options}
    return zerofx.plan(model, torch.optim.SGD(model.parameters(), lr=0.3), (x,), **options).plan


def keys(plan: zerofx.Plan) -> set[str]:
    """How keys lie where attention reads them."""
    return {d.inputs[1] for d in plan.shardings if "attention" in d.node and "backward" not in d.node}


def test_a_budget_that_gathered_keys_miss_is_met_by_a_ring() -> None:
    free = planned()
    assert keys(free) == {"R"}, "where memory costs nothing, keys are gathered"
    budget = free.peak_bytes["device"] // 2
    with (
        mock.patch("zerofx.driver.sharing.best_prices", side_effect=lambda *args: args[-1]),
        pytest.raises(MemoryBudgetError),
    ):
        planned(memory_budget=budget)
    tight = planned(memory_budget=budget)
    assert keys(tight) == {"S2/4"}, "each rank hands its keys on"
    assert tight.peak_bytes["device"] <= budget and tight.step_seconds > free.step_seconds


def test_a_budget_that_holds_all_changes_no_layout() -> None:
    free = planned()
    assert planned(memory_budget=2 * free.peak_bytes["device"]).shardings == free.shardings


def test_the_layout_that_is_simulated_fastest_is_taken() -> None:
    """Of all prices that are tried none gives a layout that the simulator has a shorter step for."""
    tried: dict[float, zerofx.Plan] = {}
    for exposed in (1.0, 0.5, 0.0):
        with mock.patch("zerofx.driver.sharing.best_prices", return_value=Prices(exposed)):
            tried[exposed] = planned(precision="bf16")
    with mock.patch("zerofx.driver.sharing.best_prices", side_effect=best_prices) as asked:
        chosen = planned(precision="bf16")
    assert asked.call_count == 1
    assert chosen.step_seconds <= min(plan.step_seconds for plan in tried.values()) * (1 + 1e-3)
