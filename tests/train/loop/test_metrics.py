"""What loggers are given of a step: plain numbers, each read when it is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.pairs import Pair, compile_eager
from tests.lib.runs.training import step_of
from tests.lib.users import adamw, ids, tiny
from zerofx.session.metrics import Metrics


def test_numbers_of_the_last_step() -> None:
    pair = Pair(max_grad_norm=1.0)
    before = dict(pair.step.metrics)
    assert before == {"step": 0, "skipped_steps": 0}
    for seed in range(3):
        loss = pair.step(ids(seed), labels=ids(-seed))
    found = pair.step.metrics
    assert all(type(value) in (int, float) for value in found.values())
    assert found["step"] == 3
    assert found["loss"] == loss.item()
    assert found["grad_norm"] == pair.step.grad_norm.item()
    assert found["samples_per_second"] == 2 / found["seconds"]
    assert found["tokens_per_second"] == 6 / found["seconds"]
    assert 0 < found["seconds"] < 60
    assert found["peak_bytes"] == pair.step.plan.peak_bytes["device"]
    assert found["exposed_seconds"] == pair.step.plan.exposed_seconds == 0
    assert found["skipped_steps"] == 0
    assert "loss_scale" not in found
    pair.step(ids(5), labels=ids(6))
    assert (found["step"], found["loss"]) == (3, loss.item()), "what was noted of a step stays"


def test_what_was_measured_takes_the_place_of_what_was_planned() -> None:
    step, args = step_of("stack")
    step(*args)
    measured = step.measure(*args, num_steps=2)
    assert step.metrics["peak_bytes"] == measured.peak_bytes["device"]
    assert step.metrics["exposed_seconds"] == measured.exposed_seconds
    assert "tokens_per_second" not in step.metrics
    assert len(step.metrics) == len(list(step.metrics))


def test_steps_that_are_left_out_are_counted() -> None:
    class Bursting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.linear(x).square().mean()
            return loss

    model = Bursting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compile_eager(model, optimizer, precision=zerofx.Precision(loss_scale=8.0), on_nonfinite="skip")
    step(torch.ones(2, 2))
    with pytest.warns(zerofx.ZeroFXWarning, match="finite loss"):
        step(torch.full((2, 2), math.inf))
    found = step.metrics
    assert (found["step"], found["skipped_steps"]) == (1, 1)
    assert found["loss_scale"] == step.loss_scale


def test_a_number_is_looked_up_when_it_is_read_and_once() -> None:
    looked: list[str] = []

    def look() -> float:
        looked.append("loss")
        return 2.0

    metrics = Metrics({"loss": look, "step": lambda: 1})
    assert list(metrics) == ["loss", "step"]
    assert looked == []
    assert metrics["loss"] == metrics["loss"] == 2.0
    assert looked == ["loss"]
    assert repr(metrics) == "{'loss': 2.0, 'step': 1}"


def test_a_batch_without_sizes_has_no_rates() -> None:
    model, tokens, labels = tiny(), ids(), ids(1)
    step = compile_eager(model, adamw(model), forward=lambda model, x: model(tokens, labels=labels) * x)
    step(torch.tensor(2.0))
    assert not [name for name in step.metrics if name.endswith("per_second")]
