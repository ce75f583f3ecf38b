"""Runs that are saved and resumed, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Case, batches
from tests.lib.runs.offloads import parameters_away, placing, prepare_case
from tests.lib.runs.training import build, world

STEPS = 10  # before the checkpoint, and after it


class Uneven(nn.Module):
    """What is easy to save wrongly: dropout, tied, frozen and scalar parameters, one that lies transposed, ones without
    elements, one of them with a dtype of its own, uneven sizes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.up, self.drop, self.down = nn.Linear(DIM, 7), nn.Dropout(0.3), nn.Linear(7, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(5, 2, DIM).permute(2, 0, 1))
        self.empty = nn.Parameter(torch.empty(2, 0))
        self.alone = nn.Parameter(torch.empty(0, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.drop(torch.relu(self.first(x) * self.scale)) + self.frozen.sum())
        x = x + self.empty.sum() + self.alone.sum().float()
        x = self.head(self.down(self.drop(torch.tanh(self.up(x))))) + torch.tanh(self.transposed).sum((1, 2))
        return (x - target).square().mean()


def _rows(generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(8, DIM, generator=generator), torch.randn(8, DIM, generator=generator)), {}


UNEVEN = Case(Uneven, _rows)


@dataclass(frozen=True)
class Way:
    """A way to train. `tiers`: where parameters and states live, and where updates run."""

    stage: int = 3
    precision: str | None = None
    accumulate: int = 1
    tiers: tuple[str, str, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return UNEVEN

    def __str__(self) -> str:
        more = [*(self.tiers or ()), *(f"{key}={value}" for key, value in self.options.items())]
        return "-".join([f"stage {self.stage}", self.precision or "fp32", f"by {self.accumulate}", *more])

    def step(self, seed: int = 5) -> tuple[zerofx.Step, torch.optim.lr_scheduler.LRScheduler]:
        """A fresh step, whose learning rate changes; each rank draws its own random numbers, of `seed`."""
        model = build(self.case)
        optimizer = self.case.optimizer(model)
        torch.manual_seed(seed + 100 * world()[0])
        options = {"accumulate": self.accumulate, "precision": self.precision, "backend": "eager", **self.options}
        if self.tiers is not None:
            parameters, states, update = self.tiers
            prepared = prepare_case(self.case, self.stage, world()[1], self.accumulate, self.precision)
            away = parameters != "device"
            options["plan"] = (
                parameters_away(prepared, parameters, (states, update)) if away else placing(prepared, states, update)
            )
            torch.manual_seed(seed + 100 * world()[0])
        step = zerofx.compile(model, optimizer, self.stage, loss_fn=self.case.loss_fn, **options)
        return step, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


@dataclass
class Outcome:
    """This rank's losses, the model's whole state, and its part of the optimizer's states, in the end."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    scaled: tuple[float, int]  # the loss's scale, and the steps that it has left out

    def differences(self, other: Outcome) -> list[str]:
        """What is not the same to the bit."""
        wrong = [
            f"loss {n}" for n, pair in enumerate(zip(self.losses, other.losses, strict=True)) if pair[0] != pair[1]
        ]
        wrong += [name for name, value in self.state.items() if not torch.equal(value, other.state[name])]
        for index, entry in self.optimizer["state"].items():
            for name, value in entry.items():
                same = torch.equal(torch.as_tensor(value), torch.as_tensor(other.optimizer["state"][index][name]))
                wrong += [] if same else [f"{name} of parameter {index}"]
        wrong += [] if self.scaled == other.scaled else [f"scales {self.scaled} and {other.scaled}"]
        return wrong + ([] if self.optimizer["param_groups"] == other.optimizer["param_groups"] else ["param groups"])


def train(
    step: zerofx.Step, scheduler: torch.optim.lr_scheduler.LRScheduler, given: Iterable[tuple[Any, Any]]
) -> list[float]:
    losses = []
    for args, kwargs in given:
        losses.append(float(step(*args, **kwargs)))
        scheduler.step()
    return losses


def outcome(step: zerofx.Step, losses: list[float]) -> Outcome:
    scale = 1.0 if step.options.loss_scale is None else step.loss_scale
    return Outcome(losses, step.full_state_dict(), step.optimizer.state_dict(), (scale, step.num_skipped))


def train_and_save(way: Way, folder: str) -> Outcome:
    """Train, save in the middle, and give what the second half comes to."""
    step, scheduler = way.step()
    given = list(batches(way.case, world()[0], 2 * STEPS))
    train(step, scheduler, given[:STEPS])
    step.save_checkpoint(Path(folder, str(way)), state={"scheduler": scheduler})
    found = outcome(step, train(step, scheduler, given[STEPS:]))
    step.close()
    return found


def resume(way: Way, folder: str, *, prepared: bool = False) -> Outcome:
    """Go on from the middle, with other random numbers until then; `prepared`: after steps of something else."""
    step, scheduler = way.step(seed=77)
    given = list(batches(way.case, world()[0], 2 * STEPS))
    if prepared:
        train(step, scheduler, given[:3])
    step.load_checkpoint(Path(folder, str(way)), state={"scheduler": scheduler})
    assert step.num_steps + step.num_skipped == STEPS
    found = outcome(step, train(step, scheduler, given[STEPS:]))
    step.close()
    return found
