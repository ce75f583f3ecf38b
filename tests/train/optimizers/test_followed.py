"""Optimizers whose Python counts and branches by itself are followed: step by step, with the bits of eager mode."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerofx
from zerofx.errors import OptimizerError

NUM_STEPS = 10


class Counting(torch.optim.Optimizer):
    """One rule, with its count where people keep it, and the count gone through what people send it through."""

    def __init__(self, params: Any, where: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.where = where
        self.count = 0
        self.history = [0.0]

    def _counted(self, group: dict[str, Any], state: dict[str, Any]) -> int:
        match self.where:
            case "group":
                return int(group["step"])
            case "attribute":
                return self.count
            case "list":
                return round(self.history[-1])
            case "state tensor":
                return int(state["step"])
            case _:
                return int(state["step"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        self.count += 1
        self.history.append(self.history[-1] + 1.0)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0) if self.where == "state tensor" else 0
                    state["square"] = torch.zeros_like(p)
                state["step"] += 1
                count = self._counted(group, state)
                if count == 1:
                    state["square"].addcmul_(p.grad, p.grad)
                    continue
                if count == 6:
                    state["late"] = torch.full_like(p, group["lr"])
                rate = math.sqrt(group["lr"]) / math.log(1.0 + count)
                update = p.grad / state["square"].sqrt().clamp_(min=1e-3)
                if count % 3 == 0:
                    update.sign_()
                p.add_(update, alpha=-rate)
                if count > 6:
                    p.sub_(state["late"], alpha=1e-3)
                state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=1.0 - math.pow(0.9, count))


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def batch(step: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0 + step, 10).reshape(2, 5).sin()


def loss_of(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().sum()


class Retyping(Counting):
    """Works on loaded states once torch's ``load_state_dict`` is through, as those of pytorch_optimizer do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {name: self.state[p][name] for name in state_dict["state"][0]}


class Run:
    """A model and its optimizer in two groups under a schedule, trained by zerofx or without it."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], *, compiled: bool) -> None:
        self.model = model()
        parameters = list(self.model.parameters())
        self.optimizer = make([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}])
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.step = zerofx.compile(self.model, self.optimizer, loss_fn=loss_of, backend="eager") if compiled else None
        self.num_steps = 0

    def train(self, num_steps: int) -> Run:
        for _ in range(num_steps):
            inputs = batch(self.num_steps)
            self.num_steps += 1
            if self.step is not None:
                self.step(inputs)
            else:
                self.optimizer.zero_grad()
                loss_of(self.model(inputs), inputs).backward()
                self.optimizer.step()
            self.schedule.step()
        return self

    def values(self) -> dict[str, torch.Tensor]:
        return self.step.full_state_dict() if self.step is not None else dict(self.model.state_dict())

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((self.values(), self.optimizer.state_dict(), self.schedule.state_dict()))

    def restore(self, values: dict[str, Any], optimizer: dict[str, Any], schedule: dict[str, Any]) -> Run:
        self.model.load_state_dict(values)
        self.optimizer.load_state_dict(optimizer)
        self.schedule.load_state_dict(schedule)
        return self


def assert_same(expected: Run, found: Run) -> None:
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=0)
    states, expected_states = found.optimizer.state_dict(), expected.optimizer.state_dict()
    assert states["param_groups"] == expected_states["param_groups"]
    assert {i: list(map(type, s.values())) for i, s in states["state"].items()} == {
        i: list(map(type, s.values())) for i, s in expected_states["state"].items()
    }
    torch.testing.assert_close(states["state"], expected_states["state"], rtol=0, atol=0)


@pytest.mark.days(3)
@pytest.mark.parametrize("where", ["group", "attribute", "list", "state", "state tensor"])
def test_counters_branches_and_math_are_followed(where: str) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return Counting(params, where)

    found, expected = Run(make, compiled=True).train(NUM_STEPS), Run(make, compiled=False).train(NUM_STEPS)
    assert_same(expected, found)
    for name in ("count", "history"):
        assert getattr(found.optimizer, name) == getattr(expected.optimizer, name)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("Adam", torch.as_tensor), ("NAdam", torch.as_tensor), ("ASGD", torch.as_tensor), ("Adam", np.float32)],
)
def test_tensors_among_the_hyperparameters_round_as_they_do_in_eager_mode(
    name: str, kind: Callable[[Any], Any], late: bool
) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        numbers = [{"lr": 0.05, **group} for group in groups]
        tensors = [{**group, "lr": kind(group["lr"])} for group in numbers]
        return getattr(torch.optim, name)(numbers if late else tensors, foreach=False)  # type: ignore[no-any-return]  # a class

    runs = [Run(make, compiled=compiled).train(2) for compiled in (True, False)]
    for group in (group for run in runs for group in run.optimizer.param_groups):
        group["lr"] = kind(group["lr"])
    assert_same(runs[1].train(4), runs[0].train(4))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("num_steps", [1, 5, 7])
def test_what_was_saved_half_way_goes_on_exactly(num_steps: int) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return Retyping(params, "group")

    expected = Run(make, compiled=False).train(NUM_STEPS)
    first = Run(make, compiled=True).train(num_steps)
    before, after = Run(make, compiled=True), Run(make, compiled=False).restore(*first.saved())
    before.train(2).restore(*first.saved())  # into a step that has others
    assert before.step is not None
    with before.step.full_parameters(write_back=True):
        before.model.load_state_dict(first.values())
    for run in (first, before, after):
        run.num_steps = num_steps
        assert_same(expected, run.train(NUM_STEPS - num_steps))


def test_options_and_attributes_that_change_between_steps_are_followed() -> None:
    class Switched(torch.optim.SGD):
        sign = 1.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad.sign() if group.get("signed") else p.grad, alpha=-self.sign * group["lr"])

    runs = [Run(lambda params: Switched(params, lr=0.1), compiled=compiled).train(2) for compiled in (True, False)]
    for run in runs:
        vars(run.optimizer)["sign"] = 0.5
        run.train(2)
        run.optimizer.param_groups[1]["signed"] = True
        run.train(2)
    assert_same(runs[1], runs[0])


def test_a_step_that_cannot_be_followed_any_further_changes_nothing() -> None:
    class Late(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "step": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
            for group in self.param_groups:
                group["step"] += 1
                for p in group["params"]:
                    p.sub_(p.grad * (p.norm() if group["step"] == 15 else 1.0), alpha=group["lr"])

    run = Run(Late, compiled=True).train(14)
    before = run.saved()
    with pytest.raises(OptimizerError, match=r"Late calls aten\.linalg_vector_norm\.default"):
        run.train(1)
    torch.testing.assert_close(run.saved(), before, rtol=0, atol=0)
    # What is seen ahead is run on whole parameters from the start.
    zerofx.optimizers.check_supported(Late([{"params": [nn.Parameter(torch.ones(3))], "step": 11}]))
