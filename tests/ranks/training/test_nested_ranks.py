"""Optimizers that step others on two ranks: in slices, on the host, averaged, saved, and resumed on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.optimizers import Scaled, SlowWeights
from tests.lib.runs.training import world
from zerofx import EMA, UsageError

pytestmark = pytest.mark.usefixtures("drive")

DIM = 24
Make = Callable[[nn.Module], Any]


class Net(nn.Module):
    """Layers alike with uneven ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = (self.head(x) - y).square().mean()
        return loss


def _batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + world()[0])
    return torch.randn(4, DIM, generator=generator), torch.randn(4, 5, generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def _slow(model: nn.Module) -> SlowWeights:
    return SlowWeights(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))


def _scaled_slow(model: nn.Module) -> Scaled:
    return Scaled(_slow(model))


def _slow_whole(model: nn.Module) -> SlowWeights:
    return SlowWeights(torch.optim.Adafactor(model.parameters(), lr=0.05))


def _train_eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(*_batch(number)).backward()
        for parameter in model.parameters() if world()[1] > 1 else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world()[1])
        optimizer.step()


def _unlike(name: str, mine: Any, expected: Any) -> list[str]:
    try:
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    except AssertionError as error:
        return [f"{name}: {error}"]
    return []


def _wrong(make: Make, options: dict[str, Any], folder: str) -> list[str]:
    """What is not as eager mode has it: parameters and states, those read meanwhile, and what is read of a member."""
    plain, mine = _model(), _model()
    expected, optimizer = make(plain), make(mine)
    step = zerofx.compile(mine, optimizer, backend="eager", **options)
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wrong: list[str] = []
    for number in range(7):
        _train_eagerly(plain, expected, range(number, number + 1))
        averaged.update_parameters(plain)
        step(*_batch(number))
        if number in (3, 4):
            saved = copy.deepcopy(optimizer.state_dict())
            wrong += _unlike(f"states at {number}", saved, expected.state_dict())
        if number == 3:
            inner = copy.deepcopy(optimizer.inner.state_dict())
            wrong += _unlike("states of one within", inner, expected.inner.state_dict())
            step.save_checkpoint(folder)
            torch.save(saved, f"{folder}.pt")
    wrong += _unlike("parameters", step.full_state_dict(), dict(plain.state_dict()))
    if "average" in options:
        with step.averaged_parameters():
            wrong += _unlike("average", dict(mine.state_dict()), dict(averaged.module.state_dict()))
    optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    step(*_batch(7))
    optimizer.inner.load_state_dict(copy.deepcopy(inner))  # the outer one's stay
    _train_eagerly(plain, expected, range(7, 8))
    expected.inner.load_state_dict(copy.deepcopy(inner))
    _train_eagerly(plain, expected, range(8, 10))
    for number in range(8, 10):
        step(*_batch(number))
    step.close()
    wrong += _unlike("parameters after close", dict(mine.state_dict()), dict(plain.state_dict()))
    return wrong + _unlike("states after close", optimizer.state_dict(), expected.state_dict())


def _resumed(make: Make, options: dict[str, Any], folder: str) -> list[str]:
    """What is not as it was saved, of states that wait for the first step."""
    model = _model()
    optimizer = make(model)
    step = zerofx.compile(model, optimizer, backend="eager", **options)
    step.load_checkpoint(folder)
    saved = torch.load(f"{folder}.pt")
    for refused in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(UsageError, match=r"call step\.prepare\(batch\) first"):
            refused()
    step.prepare(*_batch(0))
    wrong = _unlike("states", optimizer.state_dict(), saved)
    step.close()
    return wrong


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "stage 3": (_slow, {"stage": 3}),
    "three": (_scaled_slow, {"stage": 3}),
    "on the host": (_slow, {"stage": 3, "offload": "host", "memory_budget": 24_000}),
    "averaged": (_slow, {"stage": 3, "average": EMA(0.9)}),
    "whole updates": (_slow_whole, {"stage": 3}),
}


def _run(of: Callable[..., list[str]], name: str, folder: str) -> list[str]:
    return of(*CASES[name], folder)


@pytest.mark.days(3)
@pytest.mark.parametrize("name", CASES)
def test_a_nest_on_two_ranks_is_as_by_itself(name: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    assert run_ranks(_run, 2, _wrong, name, folder) == [[], []]
    assert _run(_resumed, name, folder) == []
