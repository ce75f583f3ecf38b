"""Optimizers through a compiled step give the bits of DistributedDataParallel, with schedules and saved states."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Case, adamw, batches, decayed
from tests.lib.runs.training import Trained, build, differences, train_compiled, train_plain, world

STEPS = 8
CASE = CASES["stack"]

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=False),
    "Adam amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, foreach=False),
    "AdamW": adamw,
    "AdamW in groups": decayed,
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02, lr_decay=0.1, foreach=False),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.003, momentum=0.5, centered=True, foreach=False),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01, foreach=False),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01, foreach=False),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01, foreach=False),
}


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)


def _plain(make: Make) -> tuple[Trained, dict[str, Any]]:
    model = build(CASE)
    optimizer = make(model)
    schedule = _schedule(optimizer)
    runner = DistributedDataParallel(model)
    losses = []
    for args, _ in batches(CASE, world()[0], STEPS):
        optimizer.zero_grad()
        loss = runner(*args)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return Trained(losses, dict(model.state_dict())), optimizer.state_dict()


class _Run:
    """A model, its optimizer and schedule, and the compiled step over them."""

    def __init__(self, make: Make, stage: int = 3) -> None:
        self.model = build(CASE)
        self.optimizer = make(self.model)
        self.schedule = _schedule(self.optimizer)
        self.step = zerofx.compile(self.model, self.optimizer, stage, backend="eager")
        self.losses: list[Tensor] = []

    def train(self, data: Iterator[tuple[Any, Any]], steps: int) -> None:
        for args, _ in itertools.islice(data, steps):
            self.losses.append(self.step(*args).clone())
            self.schedule.step()

    def trained(self) -> Trained:
        return Trained(self.losses, self.step.full_state_dict())

    def save(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.step.full_state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()


def _state_differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    wrong = [] if expected["param_groups"] == found["param_groups"] else ["param_groups"]
    if expected["state"].keys() != found["state"].keys():
        return [*wrong, f"parameters {expected['state'].keys() ^ found['state'].keys()}"]
    for index, entry in expected["state"].items():
        other = found["state"][index]
        if entry.keys() != other.keys():
            wrong.append(f"{index}: {entry.keys()} {other.keys()}")
            continue
        for name, value in entry.items():
            same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
            if type(value) is not type(other[name]) or not same:
                wrong.append(f"{index}.{name}: {value} {other[name]}")
    return wrong


def _compare(name: str) -> dict[str, list[str]]:
    """Losses, parameters, states; and the same again from a state saved half-way."""
    make = OPTIMIZERS[name]
    expected, expected_state = _plain(make)
    data = batches(CASE, world()[0], STEPS)
    first = _Run(make)
    first.train(data, STEPS // 2)
    weights, state, schedule = first.save()
    second = _Run(make)
    second.model.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    second.schedule.load_state_dict(schedule)
    second.losses = list(first.losses)
    rest = list(data)
    first.train(iter(rest), len(rest))
    second.train(iter(rest), len(rest))
    found = {
        "trained": differences(expected, first.trained()),
        "states": _state_differences(expected_state, first.optimizer.state_dict()),
        "loaded": differences(expected, second.trained()),
        "loaded, states": _state_differences(expected_state, second.optimizer.state_dict()),
    }
    return {label: wrong for label, wrong in found.items() if wrong}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedules_give_the_bits_of_distributed_data_parallel(name: str) -> None:
    for rank, wrong in enumerate(run_ranks(_compare, 2, name)):
        assert wrong == {}, f"rank {rank}"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_loaded_between_steps_is_what_training_goes_on_from(stage: int) -> None:
    first, second = _Run(adamw, stage), _Run(adamw, stage)
    data = list(batches(CASE, 0, STEPS))
    first.train(iter(data), 4)
    second.train(iter(data[4:]), 2)
    weights, state, schedule = first.save()
    with second.step.full_parameters(write_back=True) as model:
        model.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    second.schedule.load_state_dict(schedule)
    first.losses, second.losses = [], []
    first.train(iter(data[4:]), 4)
    second.train(iter(data[4:]), 4)
    assert differences(first.trained(), second.trained()) == []
    assert _state_differences(first.optimizer.state_dict(), second.optimizer.state_dict()) == []


def test_a_schedule_does_not_warn_of_a_step_that_it_missed() -> None:
    run = _Run(adamw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(batches(CASE, 0, 2), 2)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "SGD with momentum", "Adagrad"])
def test_a_fused_update_is_within_rounding_of_the_unfused_one(name: str) -> None:
    kind, options = {
        "AdamW": (torch.optim.AdamW, {}),
        "SGD": (torch.optim.SGD, {}),
        "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "Adagrad": (torch.optim.Adagrad, {}),
    }[name]

    def of_case(fused: bool) -> Case:
        return replace(CASE, optimizer=lambda model: kind(model.parameters(), lr=0.01, fused=fused, **options))

    expected = train_plain(of_case(False), STEPS)
    assert differences(expected, train_compiled(of_case(True), 3, STEPS), 1e-6) == []
    assert differences(expected, train_compiled(of_case(False), 3, STEPS)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sgd_trains_where_torchs_fused_kernel_does_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 32).to(dtype)
    model, batch = copy.deepcopy(plain), torch.randn(8, 64).to(dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step = zerofx.compile(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True), backend="eager",
        loss_fn=lambda outputs, x: outputs.square().mean(),
    )  # fmt: skip
    for _ in range(3):
        loss = plain(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(step(batch), loss)
    for name, expected in plain.state_dict().items():
        assert torch.equal(step.full_state_dict()[name], expected)
