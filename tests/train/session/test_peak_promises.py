"""The promise of memory, for models drawn at random: what is predicted is measured, to the byte, on the eager backend;
and a budget that a refusal calls the least possible can be had, and holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Regression
from tests.lib.random_models import draw
from zerofx.scheduler.search.problem import BudgetMissedError

VARIANTS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "on the host": {"stage": 0, "offload": "host"},
    "parameters on the host": {"stage": 3, "offload": "host"},
    "two micro-batches": {"stage": 3, "accumulate": 2},
    "clipped": {"stage": 0, "max_grad_norm": 1.0},
}


def broken(seed: int, options: dict[str, Any], shares: Sequence[float] = (0.8, 0.05)) -> list[str]:
    """What is not as promised of the model of a seed, in words: without a budget, and with budgets that are some shares
    of what it takes then, or with the least possible where one is refused."""
    free, wrong = _trained(seed, None, options)
    for share in shares:
        try:
            wrong += _trained(seed, int(free * share), options)[1]
        except BudgetMissedError as refusal:
            wrong += _least(seed, refusal.least_bytes, options)
    return wrong


def _least(seed: int, budget: int, options: dict[str, Any]) -> Iterator[str]:
    try:
        yield from _trained(seed, budget, options)[1]
    except BudgetMissedError as again:
        yield f"the least possible is {budget}, and with that {again.least_bytes}"


def _trained(seed: int, budget: int | None, options: dict[str, Any]) -> tuple[int, list[str]]:
    """The peak that is predicted, and what is wrong with it."""
    drawn = draw(seed)
    chosen = {"backend": "eager", "offload": "none", **options, "memory_budget": budget}
    if budget is None:
        chosen["offload"] = "none"
    step = zerofx.compile(drawn.model, drawn.optimizer, loss_fn=drawn.loss_fn, **chosen)
    step(drawn.batch)
    measured = step.measure(drawn.batch, num_steps=2).peak_bytes["device"]
    predicted = step.plan.peak_bytes["device"]
    step.close()
    wrong = []
    if chosen["backend"] == "eager" and measured != predicted:
        wrong.append(f"budget {budget}: predicted {predicted}, measured {measured} ({measured - predicted:+d})")
    if budget is not None and measured > budget:
        wrong.append(f"budget {budget}: measured {measured}")
    return predicted, wrong


@pytest.mark.sweep(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_peaks_are_those_predicted(variant: str) -> None:
    assert broken(list(VARIANTS).index(variant), VARIANTS[variant], ()) == []


class _Marked(Regression):
    """Writes into a small part of a part of something large, the whole of which the kernel that does so copies."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def predict(self, x: Tensor) -> Tensor:
        marks = torch.zeros(20_000) + x.sum()
        marks[:100][10:20] = 1.0
        y: Tensor = self.linear(x) + marks.mean()
        return y


def test_what_is_written_into_a_view_of_a_view_counts_whole() -> None:
    model = _Marked()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=0, backend="eager")
    measured = step.measure(torch.randn(4, DIM), torch.randn(4, DIM), num_steps=2).peak_bytes
    assert measured == step.plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "variant"), [(7, "stage 0"), (17, "parameters on the host")]
)  # 17: parameters come back for what is computed again, and that is the peak of the longest orders alone
def test_the_least_possible_can_be_had(seed: int, variant: str) -> None:
    assert broken(seed, VARIANTS[variant], (0.05,)) == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_promises_hold_for_many_models(variant: str) -> None:
    assert [(seed, wrong) for seed in range(100, 112) if (wrong := broken(seed, VARIANTS[variant]))] == []
