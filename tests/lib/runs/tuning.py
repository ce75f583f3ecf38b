"""A model whose plans differ in what they take, and how it is tuned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from tests.lib.users import adamw
from zerofx import Candidate, TuneResult
from zerofx.choices import RecomputeOption

WIDTH = 16


class Noisy(nn.Module):
    """Layers with a buffer that changes, and that draw random numbers; some values are cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Sigmoid(), nn.Dropout(0.5))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def noisy() -> Noisy:
    torch.manual_seed(5)
    return Noisy()


def rows(number: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(1)),)


def tune(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any = None, **options: Any) -> TuneResult:
    return zerofx.tune(
        model,
        optimizer,
        rows() if batch is None else batch,
        **{"backend": "eager", "machine": "cpu", "num_steps": 2, **options},
    )


def peak_of(recompute: RecomputeOption) -> int:
    model = noisy()
    planned = zerofx.plan(model, adamw(model), rows(), machine="cpu", backend="eager", recompute=recompute)
    return planned.plan.peak_bytes["device"]


def _step_seconds(candidate: Candidate) -> float:
    assert candidate.measured is not None
    return candidate.measured.step_seconds


def check(result: TuneResult) -> None:
    """The best is the fastest of those that fit, and every line says what became of it."""
    fitting = [one for one in result.candidates if one.measured and not one.outcome.startswith("does not fit")]
    assert result.best == min(fitting, key=_step_seconds)
    assert result.best.outcome == "best" and sum(one.outcome == "best" for one in result.candidates) == 1
    assert all(one.outcome for one in result.candidates)
    if result.memory_budget is not None:
        assert result.measured.peak_bytes["device"] <= result.memory_budget
