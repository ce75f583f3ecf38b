"""Plans within a budget: they fit, they are monotonic, and they train the same bits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zerofx
from tests.lib.budgets import Chain, convnet, encoder_decoder, gpt, least_and_most, llama, planned, same_bits, trained
from tests.lib.graphs import captured
from zerofx.errors import MemoryBudgetError
from zerofx.scheduler.analysis.saved_values import saved_storages
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.activations import menu, segments

BUDGETS = (1.0, 0.6, 0.3, 0.1, 0.0)  # between the least possible and what keeping everything takes


SLOW = pytest.mark.slow


@functools.cache
def bounds_of_gpt() -> tuple[int, int]:
    return least_and_most(*gpt())


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(gpt, marks=SLOW),
        convnet,
        pytest.param(llama, marks=SLOW),
        pytest.param(encoder_decoder, marks=SLOW),
    ],
)
def test_at_every_budget_the_plan_fits_and_trains_the_same_bits(make: Any) -> None:
    model, batch = make()
    least, most = least_and_most(model, batch)
    reference: list[Tensor] = []
    peaks, num_whole = [], 0
    for share in BUDGETS:
        budget = least + int(share * (most - least))
        step, results = trained(model, batch, memory_budget=budget)
        reference = reference or results
        if step.plan.slices:  # a BLAS may sum otherwise for other numbers of columns
            torch.testing.assert_close(results[:3], reference[:3], rtol=1e-5, atol=1e-6)
        else:
            num_whole += 1
            assert same_bits(results, reference)
        predicted = step.plan.peak_bytes["device"]
        assert predicted <= budget
        peaks.append(predicted)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == least
    assert num_whole >= len(BUDGETS) - 1


@pytest.mark.slow
def test_what_a_refusal_says_is_possible_does_not_depend_on_the_budget_and_is() -> None:
    """With parameters in slices: far below the budget as just below it."""
    model, batch = gpt()
    least, most = bounds_of_gpt()
    for budget in (least // 2, least - 1):
        with pytest.raises(MemoryBudgetError, match=rf"\({least} bytes\)"):
            planned(model, batch, budget)
    found = planned(model, batch, least)
    assert found.peak_bytes["device"] == least < most
    assert found.slices


@pytest.mark.days(3)
def test_a_budget_below_the_least_possible_says_what_is_and_what_is_live_there() -> None:
    model, batch = gpt()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(MemoryBudgetError, match=r"least possible is .* at \w+, where these are live: .*optimizer") as e:
        zerofx.compile(
            model, torch.optim.AdamW(model.parameters()), backend="eager", memory_budget=1000, example_batch=batch
        )
    assert "To lower it: a smaller micro-batch" in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_of_a_single_sample_no_smaller_micro_batch_is_asked_for() -> None:
    model, batch = gpt()
    with pytest.raises(MemoryBudgetError, match="To lower it: a smaller sample"):
        planned(model, tuple(each[:1] for each in batch), 1000)


def test_without_recompute_a_budget_asks_for_the_option() -> None:
    model, batch = gpt()
    with pytest.raises(MemoryBudgetError, match="recompute='auto'"):
        planned(model, batch, 1000, recompute="none")


@pytest.mark.days(3)
def test_every_recomputed_value_has_a_reason_with_its_price() -> None:
    model, batch = gpt()
    least, most = bounds_of_gpt()
    made = planned(model, batch, (least + most) // 2, backend="inductor")
    assert made.recomputes
    assert all("frees" in decision.reason and "of computation" in decision.reason for decision in made.recomputes)


def test_earlier_layers_are_recomputed_first() -> None:
    model, batch = gpt()
    least, most = bounds_of_gpt()
    made = planned(model, batch, most - (most - least) // 10, backend="inductor")
    layers = {decision.reason.split(" for ")[1].split(":")[0] for decision in made.recomputes}
    assert layers and layers <= {"layers.0", "layers.1"}
    for decision in made.recomputes:
        assert any(f"for {layer}:" in decision.reason for layer in layers if decision.layer.startswith(layer))


def test_a_menu_keeps_less_and_computes_more_at_every_level() -> None:
    model, batch = gpt()
    step = captured(model, *batch)
    parts = [part for part in segments(step) if part.unit]
    assert [part.unit for part in parts] == [f"layers.{i}" for i in range(3)]
    assert len({part.key for part in parts}) == 1
    levels = menu(parts[0], Machine.named("cpu"))
    assert len(levels) > 2
    for before, after in itertools.pairwise(levels):
        assert after.num_bytes < before.num_bytes and after.seconds > before.seconds
    crossing = saved_storages(step)
    assert all(parts[0].values[i] in crossing for i in levels[0].saved)


OPERATORS = st.lists(st.sampled_from(["linear", "tanh", "sigmoid", "sin", "cos"]), min_size=1, max_size=6).filter(
    lambda names: "linear" in names
)


@pytest.mark.days(3)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(names=OPERATORS, depth=st.integers(1, 3), share=st.floats(0, 1))
def test_random_chains_fit_their_budget_and_train_the_same_bits(names: list[str], depth: int, share: float) -> None:
    torch.manual_seed(0)
    model = Chain(8, tuple(names), depth)
    batch = (torch.randn(16, 8),)
    least, most = least_and_most(model, batch)
    budget = least + int(share * (most - least))
    (_, expected), (step, found) = (trained(model, batch, 2, memory_budget=limit) for limit in (None, budget))
    assert step.plan.peak_bytes["device"] <= budget
    assert same_bits(found, expected)


@pytest.mark.slow
def test_sharded_plans_are_monotonic_in_the_budget() -> None:
    model, batch = gpt()
    options: dict[str, Any] = {"world_size": 2, "backend": "inductor"}
    least, most = least_and_most(model, batch, **options)
    budgets = [least + int(share * (most - least)) for share in BUDGETS]
    peaks = [planned(model, batch, budget, **options).peak_bytes["device"] for budget in budgets]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == least
