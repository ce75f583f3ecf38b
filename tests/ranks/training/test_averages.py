"""Averages of weights that updates keep: the bits of torch's ``AveragedModel``, on any ranks, in any tier, resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.training import world
from zerofx import EMA, SWA, Precision, UsageError
from zerofx.averages import Average, num_before

pytestmark = pytest.mark.usefixtures("drive")

DIM = 24
Batch = tuple[Tensor, Tensor]
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Layers alike, one of which is not trained, and a norm that counts in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)])
        self.norm = nn.BatchNorm1d(DIM)
        self.get_parameter("layers.1.0.bias").requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = (self.norm(x) - y).square().mean()
        return loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.05)


def _batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * number + world()[0])
    return torch.randn(4, DIM, generator=generator), torch.randn(4, DIM, generator=generator)


def _averaged(model: nn.Module, average: Average) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average.decay) if isinstance(average, EMA) else None)


def _unlike(name: str, found: Mapping[str, Tensor], expected: nn.Module) -> list[str]:
    """Parameters that are not those of an average; buffers are the model's, which torch copies as it averages."""
    named = dict(expected.state_dict()) | {key: found[key] for key, _ in expected.named_buffers()}
    assert found.keys() == named.keys()
    return [f"{name}: {key}" for key in named if not torch.equal(found[key].cpu(), named[key].cpu())]


def _compile(average: Average, optimizer_of: OptimizerOf, **options: Any) -> zerofx.Step:
    torch.manual_seed(0)
    model = Net()
    return zerofx.compile(model, optimizer_of(model), average=average, backend="eager", **options)


def _train(step: zerofx.Step, averaged: AveragedModel, steps: range) -> None:
    """Run ``steps``, whose whole parameters torch averages as well, as the step is asked to."""
    average = step.options.average
    assert average is not None
    for number in steps:
        step(*_batch(number))
        if num_before(average, number) is not None:
            with step.full_parameters():
                averaged.update_parameters(step.model)


def _wrong(
    case: str, average: Average, optimizer_of: OptimizerOf, options: Mapping[str, Any], folder: str
) -> list[str]:
    """What is not as ``AveragedModel`` has it: read whole, in slices, evaluated, saved and loaded by these ranks."""
    step = _compile(average, optimizer_of, **options)
    averaged = _averaged(copy.deepcopy(step.model), average)
    with pytest.raises(UsageError, match="once a step"), step.averaged_parameters():
        pass
    _train(step, averaged, range(1, 5))
    before, states = step.full_state_dict(), step.optimizers[0].state_dict()["state"]
    expected, wrong = averaged.module, list[str]()
    with step.averaged_parameters() as model:
        wrong += _unlike("whole", model.state_dict(), expected)
        with pytest.raises(UsageError, match="inside"):
            step(*_batch(0))
    with step.averaged_parameters(whole=False):
        wrong += _unlike("in slices", step.full_state_dict(), expected)
        if step.options.compute_dtype is None and average.every == 1:  # buffers are those of the average
            wrong += [] if torch.equal(step.evaluate(*_batch(9)), _evaluated(expected, _batch(9))) else ["evaluated"]
        for refused in (lambda: step(*_batch(0)), lambda: step.save_checkpoint(folder), step.optimizers[0].state_dict):
            with pytest.raises(UsageError, match=r"outside averaged_parameters\(\)"):
                refused()
    after = step.full_state_dict()
    wrong += [f"changed {name}" for name in before if not torch.equal(before[name], after[name])]
    again = step.optimizers[0].state_dict()["state"]
    wrong += [
        f"changed {name}" for index in states for name, value in states[index].items()
        if isinstance(value, Tensor) and not torch.equal(value, again[index][name])
    ]  # fmt: skip
    step.save_checkpoint(folder)
    _train(step, averaged, range(5, 7))
    with step.averaged_parameters():
        wrong += _unlike("later", step.model.state_dict(), averaged.module)
    measured = step.measure(*_batch(7), num_steps=2).peak_bytes["device"]
    if optimizer_of is not _adafactor and measured != step.plan.peak_bytes["device"]:
        wrong.append(f"peak: {measured} bytes, planned {step.plan.peak_bytes['device']}")
    step.close()
    return [f"{case}, {each}" for each in wrong]


def _evaluated(model: nn.Module, batch: Batch) -> Tensor:
    alone = copy.deepcopy(model).eval()
    with torch.no_grad():
        loss: Tensor = alone(*batch)
    return loss


def _wrong_resumed(
    case: str, average: Average, optimizer_of: OptimizerOf, options: Mapping[str, Any], folder: str
) -> list[str]:
    """What is not as ``AveragedModel`` has it after steps from a checkpoint that other ranks have saved."""
    step = _compile(average, optimizer_of, **options)
    step.load_checkpoint(folder)
    step.prepare(*_batch(0))
    averaged = _averaged(copy.deepcopy(Net()), average)
    with step.averaged_parameters():
        averaged.module.load_state_dict(step.model.state_dict())
    averaged.n_averaged += sum(num_before(average, number) is not None for number in range(1, 5))
    _train(step, averaged, range(5, 8))
    with step.averaged_parameters():
        wrong = _unlike("resumed", step.model.state_dict(), averaged.module)
    step.close()
    return [f"{case}, {each}" for each in wrong]


BF16 = {"precision": "bf16"}
CASES: dict[str, tuple[Average, OptimizerOf, dict[str, Any]]] = {
    **{f"EMA, stage {stage}": (EMA(0.9), _adamw, {"stage": stage}) for stage in range(4)},
    "masters": (EMA(0.9), _adamw, {"stage": 2, **BF16}),
    "masters in slices": (SWA(), _adamw, {"stage": 3, **BF16}),
    "every other step": (SWA(after=1, every=2), _adamw, {"stage": 3}),
    "without states": (EMA(0.5, every=2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"stage": 1}),
    "on the host": (EMA(0.9), _adamw, {"stage": 3, "offload": "host", "memory_budget": 30_000}),
    "whole updates": (EMA(0.9), _adafactor, {"stage": 3}),
    "whole updates of masters": (SWA(), _adafactor, {"stage": 1, **BF16}),
    "clipped": (EMA(0.9), _adamw, {"stage": 3, "max_grad_norm": 0.1, "accumulate": 2}),
}  # fmt: skip


def _run(of: Callable[..., list[str]], folder: str) -> list[str]:
    return [each for name, case in CASES.items() for each in of(name, *case, f"{folder}/{name}")]


@pytest.mark.days(3)
@pytest.mark.parametrize(("num_ranks", "num_later"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_averages_are_those_of_torch_and_go_on_on_other_ranks(tmp_path: Path, num_ranks: int, num_later: int) -> None:
    for num, of in ((num_ranks, _wrong), (num_later, _wrong_resumed)):
        found = run_ranks(_run, num, of, str(tmp_path)) if num > 1 else [_run(of, str(tmp_path))]
        assert found == [[]] * num


def test_what_an_average_cannot_be_is_refused() -> None:
    model = Net()
    with pytest.raises(UsageError, match=r"expected decay of EMA to be a number from 0 to 1, found 1\.5"):
        EMA(1.5)
    with pytest.raises(UsageError, match="expected every of SWA to be a whole number of steps, at least 1, found 0"):
        SWA(every=0)
    with pytest.raises(UsageError, match=r"expected average to be a zerofx\.EMA or a zerofx\.SWA, or None"):
        zerofx.compile(model, _adamw(model), average=0.999)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="average or precision, which exclude each other"):
        zerofx.compile(model, _adamw(model), average=EMA(), precision=Precision("bf16", state_dtype="bf16"))
    step = zerofx.compile(model, _adamw(model), backend="eager")
    step(*_batch(1))
    with pytest.raises(UsageError, match="with average= given to zerofx"), step.averaged_parameters():
        pass
