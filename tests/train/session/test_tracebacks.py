"""Errors that zerofx raises on purpose reach the user with the user's own lines, and no way through zerofx."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx import CaptureError, MemoryBudgetError, OptimizerError

pytestmark = pytest.mark.captures  # whose sharing has a line of its own


class Net(nn.Module):
    """Reads a value where it is told to."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(100, 100), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.reads and y.sum() > 0:
            y = y * 2
        return y.square().mean()


class Strange(torch.optim.SGD):
    """Looks for a state that nobody makes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self.state[parameter]["absent"])


def train(model: nn.Module, **options: Any) -> None:
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", **options)
    step(torch.randn(4, 100))


def plan() -> None:
    model = Net()
    zerofx.plan(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(4, 100),),
        machine="h100-sxm",
        memory_budget=1000,
    )


def compile_strange() -> None:
    model = Net()
    zerofx.compile(model, Strange(model.parameters(), lr=0.1), backend="eager")


def lines_of(call: Callable[[], None], error: type[Exception]) -> list[str]:
    """The lines that Python shows, but for those of this function, from ``call`` on; each error in one line."""
    with pytest.raises(error) as caught:
        call()
    return "".join(traceback.format_exception(caught.value)).splitlines()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: train(Net(), memory_budget=1000), MemoryBudgetError),
        (plan, MemoryBudgetError),
        (lambda: train(Net(reads=True)), CaptureError),
        (compile_strange, OptimizerError),
    ],
    ids=["budget", "plan", "capture", "optimizer"],
)
def test_a_planned_error_shows_the_lines_of_the_user_alone(call: Callable[[], None], error: type[Exception]) -> None:
    lines = lines_of(call, error)
    files = {Path(line.split('"')[1]) for line in lines if line.startswith("  File ")}
    assert files == {Path(__file__)}
    assert lines.count("Traceback (most recent call last):") == 1 + (error is OptimizerError)
    assert len(lines) < 30


def test_the_cause_of_a_users_own_is_shown() -> None:
    lines = lines_of(compile_strange, OptimizerError)
    assert "KeyError: 'absent'" in lines and any('["absent"]' in line for line in lines)


def test_all_lines_are_shown_where_debugging_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "1")
    assert any("scheduler" in line for line in lines_of(plan, MemoryBudgetError))


@pytest.mark.days(3)
def test_a_trainers_user_sees_the_loop_and_what_is_wrong(tmp_path: Path) -> None:
    from tests.lib.runs.trainers import arguments, llama, trainer
    from zerofx.integrations.transformers import ZeroFXTrainer

    trained = trainer(ZeroFXTrainer, llama(), arguments(tmp_path), memory_budget=1000, backend="eager")
    lines = lines_of(trained.train, MemoryBudgetError)
    assert len(lines) < 40 and not any("scheduler" in line for line in lines[:-1])
