"""Layouts on the model axis that the program's seconds do not tell apart: the simulator and the budget choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models.huggingface import mixtral
from tests.ranks.meshes.test_experts import BY_COLUMN
from tests.ranks.meshes.test_sequences import MACHINE, WIDTH, Sequence
from zerofx import MemoryBudgetError
from zerofx.driver.meshes import layouts as layouts_module
from zerofx.driver.meshes.estimates import Estimates
from zerofx.driver.meshes.layouts import best_prices
from zerofx.driver.plan_only import capture_for_plans
from zerofx.optimizers import Optimizers
from zerofx.options import check_options
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.mesh import Mesh

pytestmark = pytest.mark.captures

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


@pytest.mark.slow
def test_a_budget_that_gathered_keys_miss_is_met_by_a_ring() -> None:
    free = planned()
    assert keys(free) == {"R"}, "where memory costs nothing, keys are gathered"
    budget = free.peak_bytes["device"] // 2
    with (
        mock.patch("zerofx.driver.shardings.best_prices", side_effect=lambda *args: args[-1]),
        pytest.raises(MemoryBudgetError),
    ):
        planned(memory_budget=budget)
    tight = planned(memory_budget=budget)
    assert keys(tight) == {"S2/4"}, "each rank hands its keys on"
    assert tight.peak_bytes["device"] <= budget and tight.step_seconds > free.step_seconds


@pytest.mark.days(3)
def test_a_budget_that_holds_all_changes_no_layout() -> None:
    free = planned()
    assert planned(memory_budget=2 * free.peak_bytes["device"]).shardings == free.shardings


def test_all_plans_that_have_the_same_bits_have_one_layout() -> None:
    others: list[dict[str, Any]] = [
        {"stage": 0}, {"prefetch": 0, "recompute": "full"}, {"offload": "auto", "memory_budget": "1GiB"},
        {"stage": 1, "states_over": "shard", "keep_gathered": "all"},
    ]  # fmt: skip
    with mock.patch("zerofx.driver.shardings.best_prices", side_effect=InterruptedError) as asked:
        for options in ({}, *others):
            with pytest.raises(InterruptedError):
                planned(**options)
    first, *rest = [call.args[0].options for call in asked.call_args_list]
    assert len(rest) == len(others) and all(options == first for options in rest)


def test_the_layout_that_is_simulated_fastest_is_taken() -> None:
    """What the program finds cheapest is a layout of several; the simulator says which."""
    seconds = {1.0: 3.0, 0.5: 2.0, 0.0: 2.5}
    layouts = {exposed: (ShardingDecision(str(exposed), (), ()),) for exposed in seconds}

    def judged(_judge: object, layout: tuple[ShardingDecision, ...]) -> layouts_module._Judged:
        return layouts_module._Judged(0.0, seconds[float(layout[0].node)], is_forced=False, seconds_per_byte=0.0)

    with torch.device("meta"):
        model, x = Sequence(), torch.empty(1, NUM_TOKENS, WIDTH)
    options = check_options(stage=3, machine=MACHINE, backend="eager")
    optimizers = Optimizers((torch.optim.SGD(model.parameters(), lr=0.3),))
    captured = capture_for_plans(model, optimizers, (x,), options, verbose=False)

    def taken() -> Prices:
        return best_prices(
            captured.request, captured.captures, lambda *_: captured.captures,
            lambda prices: layouts[prices.exposed], Prices(),
        )  # fmt: skip

    with mock.patch.object(layouts_module.Judge, "judge", judged):
        assert taken() == Prices(exposed=0.5)
        seconds[0.5] = 3.0 * (1 - 1e-4)  # next to nothing
        seconds[0.0] = 3.0
        assert taken() == Prices()


def _experts(top: int, bandwidth: float, tokens: tuple[int, int]) -> tuple[nn.Module, dict[str, Tensor], Machine]:
    """A model, its batch, and nodes of one rank each."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": top}
    with torch.device("meta"):
        model, ids = mixtral(**sizes), torch.empty(tokens, dtype=torch.int64)
    cpu, link = zerofx.Machine.named("cpu"), Link(bandwidth, 1e-7)
    machine = replace(cpu, ranks_per_node=1, intra_node=link, inter_node=link)
    return model, {"input_ids": ids, "labels": ids}, machine


def _planned_experts(top: int, bandwidth: float, tokens: tuple[int, int] = (16, 16), **options: Any) -> zerofx.Plan:
    """On four ranks."""
    model, batch, machine = _experts(top, bandwidth, tokens)
    given = {"backend": "eager", "machine": machine, "mesh": {"model": 4}, "world_size": 4, **options}
    return zerofx.plan(model, torch.optim.SGD(model.parameters(), lr=0.3), batch, **given).plan


def _says(plan: zerofx.Plan) -> str:
    return next(decision.reason for decision in plan.shardings if "experts.down_proj" in decision.parameter)


@pytest.mark.parametrize(
    ("top", "bandwidth", "is_sent"),
    [
        pytest.param(1, 1e7, True, id="slow links"),
        pytest.param(1, 1e12, False, id="fast links", marks=pytest.mark.days(3)),
        pytest.param(6, 1e7, False, id="more experts a token than ranks", marks=pytest.mark.days(3)),
    ],
)
def test_rows_of_experts_are_sent_where_that_is_faster(top: int, bandwidth: float, is_sent: bool) -> None:
    plan = _planned_experts(top, bandwidth)
    assert plan.sends_rows == is_sent
    assert f"rows are {'' if is_sent else 'not '}sent to their experts: a step takes" in str(plan)


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tokens": (1, 15)}, "none that the ranks divide"),
        ({"delayed_update": 1, "offload": "auto"}, "updates are delayed"),
    ],
    ids=str,
)
def test_the_plan_says_why_rows_of_experts_cannot_be_sent(options: dict[str, Any], why: str) -> None:
    plan = _planned_experts(1, 1e7, **options)
    assert not plan.sends_rows and why in _says(plan)


@pytest.mark.days(3)
def test_meshes_are_compared_with_rows_of_experts_sent() -> None:
    """A mesh is estimated as it would be planned, unasked."""
    model, batch, machine = _experts(1, 1e7, (16, 16))
    optimizers = Optimizers((torch.optim.SGD(model.parameters(), lr=0.3),))
    options = check_options(stage=3, machine=machine, backend="eager")
    captured = capture_for_plans(model, optimizers, batch, options, verbose=False)
    estimate = Estimates(captured.request, captured.captures, 4, on_cpu=True).estimate(Mesh(model=4))
    sent, gathered = _planned_experts(1, 1e7), _planned_experts(1, 1e7, shardings=BY_COLUMN)
    assert sent.sends_rows and not gathered.sends_rows
    assert estimate.step_seconds == pytest.approx(sent.step_seconds)
    assert estimate.step_seconds < 0.9 * gathered.step_seconds
