"""A sequence four times as long as fits on one rank within a budget trains on four ranks within it, as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.budgets import adamw, least_bytes, planned
from tests.lib.distributed import run_ranks
from tests.lib.runs.offloads import check_measured
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import Trained, differences
from zerofx import MemoryBudgetError

NUM_TOKENS = 128  # what one rank has room for


def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(64, 64, 2, 4, 4 * NUM_TOKENS)


def batch(num_tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(64, (1, num_tokens + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _trained(budget: int, options: dict[str, Any]) -> list[str]:
    """What is unlike one process without a budget; bytes and the peak are asserted to be those predicted."""
    shared, given = model(), batch(4 * NUM_TOKENS)
    step = zerofx.compile(shared, adamw(shared), 3, mesh={"model": 4}, memory_budget=budget, **options)
    losses = [step(*given).clone() for _ in range(3)]
    found = step.measure(*given, num_steps=2)
    check_measured(found, step.plan, 4096, share=0.01 if options["backend"] == "eager" else 0.03)
    assert found.peak_bytes["device"] <= budget * 1.01
    step.close()
    whole = model()
    optimizer, expected = adamw(whole), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = whole(*given)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    return differences(Trained(expected, {}), Trained(losses, {}), 1e-5)


WAYS = {
    "all kept": {"recompute": "none"},
    "computed again": {},
    "compiled": {"backend": "inductor"},
}


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "way", [name if name == "all kept" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_four_ranks_train_four_times_the_sequence_that_fits_on_one(way: str) -> None:
    options: dict[str, Any] = {"machine": SHARING, "backend": "eager", "offload": "none", **WAYS[way]}
    budget = least_bytes(model(), batch(NUM_TOKENS), **options)
    with pytest.raises(MemoryBudgetError):
        planned(model(), batch(4 * NUM_TOKENS), budget, **options)
    assert run_ranks(_trained, 4, budget, options) == [[]] * 4
