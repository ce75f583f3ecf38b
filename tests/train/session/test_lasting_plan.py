"""A budget that the first step is allowed is enough for the steps after it, whatever their updates take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from zerofx.scheduler.search.problem import BudgetMissedError

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "copies its first gradients": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "has another update from the sixth step on": lambda p: torch.optim.RAdam(p),
    "has the same update in all steps": lambda p: torch.optim.AdamW(p),
}


def question(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 7))
    return model, make(model.parameters()), (torch.randn(3, 10), torch.randn(3, 7))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_least_possible_is_enough_for_every_step(name: str) -> None:
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "backend": "eager", "tile": "none"}
    with pytest.raises(BudgetMissedError) as refusal:
        zerofx.plan(*question(OPTIMIZERS[name]), machine="cpu", memory_budget=1, **options)
    least = refusal.value.least_bytes
    model, optimizer, batch = question(OPTIMIZERS[name])
    with closing(zerofx.compile(model, optimizer, memory_budget=least, **options)) as step:
        for _ in range(8):
            step(*batch)
        assert step.measure(*batch, num_steps=1).peak_bytes["device"] <= least


def test_what_a_later_step_cannot_keep_is_refused_before_the_first() -> None:
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "backend": "eager", "tile": "none"}
    with pytest.raises(BudgetMissedError) as refusal:
        zerofx.plan(*question(OPTIMIZERS["copies its first gradients"]), machine="cpu", memory_budget=1, **options)
    model, optimizer, batch = question(OPTIMIZERS["copies its first gradients"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = zerofx.compile(model, optimizer, memory_budget=refusal.value.least_bytes - 1, **options)
    with pytest.raises(BudgetMissedError):
        step(*batch)
    step.close()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
