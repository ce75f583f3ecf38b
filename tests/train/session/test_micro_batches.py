"""Micro-batches that are brought one by one train as the batch that they make together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx import UsageError, ZeroFXWarning


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor, *, scale: Tensor) -> Tensor:
        return nn.functional.mse_loss(scale * self.linear(x), y)


def step_of(model: nn.Module, accumulate: Any = 3) -> zerofx.Step:
    return zerofx.compile(model, torch.optim.AdamW(model.parameters()), backend="eager", accumulate=accumulate)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def test_they_train_as_one_batch_and_the_model_is_as_it_was_in_between() -> None:
    torch.manual_seed(0)
    model, scale = Scaled(), torch.tensor(2.0)
    one, other = step_of(model), step_of(copy.deepcopy(model))
    before = model.linear.weight.clone()
    for seed in range(3):
        parts = [batch(2, 3 * seed + number) for number in range(3)]
        for x, y in parts:
            one.micro(x, y, scale=scale.clone())
            if seed == 0:
                assert torch.equal(model.linear.weight, before)
        loss = other(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)), scale=scale)
        assert torch.equal(one.update(), loss)
    assert all(torch.equal(a, b) for a, b in zip(*(s.full_state_dict().values() for s in (one, other)), strict=True))


def test_as_many_as_accumulate_says_come_before_an_update() -> None:
    step, scale = step_of(Scaled()), torch.tensor(1.0)
    with pytest.raises(UsageError, match=r"after accumulate=3 calls of step.micro\(\), found 0"):
        step.update()
    for number in range(3):
        step.micro(*batch(2, number), scale=scale)
    with pytest.raises(UsageError, match="after 3 micro-batches, as accumulate=3 says, found one more"):
        step.micro(*batch(2), scale=scale)
    with pytest.raises(UsageError, match=r"to call step\(batch\) after step.update\(\), found 3 of 3"):
        step(*batch(6), scale=scale)
    step.update()
    step(*batch(6), scale=scale)


def test_fewer_train_as_the_batch_that_they_make_where_that_is_said() -> None:
    torch.manual_seed(0)
    model, scale = Scaled(), torch.tensor(1.0)
    one, other = step_of(model), step_of(copy.deepcopy(model), accumulate=2)
    with pytest.raises(UsageError, match=r"after accumulate=3 calls of step.micro\(\), found 0"):
        one.update(partial=True)
    for seed in range(2):
        parts = [batch(2, 2 * seed + number) for number in range(2)]
        for x, y in parts:
            one.micro(x, y, scale=scale)
        with pytest.raises(UsageError, match=r"found 2: say update\(partial=True\) where data ends earlier"):
            one.update()
        assert torch.equal(one.update(partial=True), other(*map(torch.cat, zip(*parts, strict=True)), scale=scale))
    # The others are as before.
    for number in range(3):
        one.micro(*batch(2, number), scale=scale)
    with pytest.warns(ZeroFXWarning, match="number of micro-batches"):
        one.update(partial=True)
    assert one.num_steps == 3


def test_they_are_alike() -> None:
    step = step_of(Scaled())
    step.micro(*batch(2), scale=torch.tensor(1.0))
    with pytest.raises(UsageError, match=r"micro-batches of one form, .*\[2, 4\].*\[3, 4\]"):
        step.micro(*batch(3), scale=torch.tensor(1.0))
    for value in (2.0, 1.0):
        step.micro(*batch(2), scale=torch.tensor(value))
    with pytest.raises(UsageError, match=r"expected scale, .* to be the same in all micro-batches"):
        step.update()


def test_their_number_is_known() -> None:
    step = step_of(Scaled(), "auto")
    with pytest.raises(UsageError, match=r"expected accumulate to be the number .* found 'auto'"):
        step.micro(*batch(2), scale=torch.tensor(1.0))
