"""An optimizer that steps another trains as it does by itself, and stays the user's with the states of both."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.optimizers import Scaled, SlowWeights
from tests.train.optimizers.test_followed import batch, loss_of, model
from zerofx.errors import OptimizerError, UsageError


def slow(trained: nn.Module) -> SlowWeights:
    return SlowWeights(torch.optim.AdamW(trained.parameters(), lr=0.01))


def scaled(trained: nn.Module) -> torch.optim.Optimizer:
    return Scaled(torch.optim.AdamW(trained.parameters(), lr=0.01))


def scaled_slow(trained: nn.Module) -> torch.optim.Optimizer:
    return Scaled(slow(trained))


def num_steps(optimizer: Any) -> int | None:
    return getattr(optimizer, "num_steps", None) or getattr(optimizer.inner, "num_steps", None)


def train_eagerly(trained: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(trained(batch(number)), batch(number)).backward()
        optimizer.step()


def compile_with(trained: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return zerofx.compile(trained, optimizer, loss_fn=loss_of, backend="eager")


@pytest.mark.parametrize("make", [slow, scaled, scaled_slow])
def test_a_nest_trains_and_saves_as_by_itself(make: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    plain, mine = model(), model()
    expected, optimizer = make(plain), make(mine)
    train_eagerly(plain, expected, range(7))
    step = compile_with(mine, optimizer)
    for number in range(4):
        step(batch(number))
    saved = copy.deepcopy((step.full_state_dict(), optimizer.state_dict()))
    step.save_checkpoint(tmp_path)
    for number in range(4, 7):
        step(batch(number))
    torch.testing.assert_close(step.full_state_dict(), dict(plain.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert num_steps(optimizer) == num_steps(expected)  # an attribute
    step.load_checkpoint(tmp_path)
    torch.testing.assert_close(optimizer.state_dict(), saved[1], rtol=0, atol=0)
    step.close()
    again = model()
    again.load_state_dict(saved[0])
    resumed = make(again)
    resumed.load_state_dict(saved[1])
    step = compile_with(again, resumed)
    for number in range(4, 7):
        step(batch(number))
    step.close()  # gives the states back
    torch.testing.assert_close(dict(again.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    train_eagerly(again, resumed, range(7, 9))
    train_eagerly(plain, expected, range(7, 9))
    torch.testing.assert_close(dict(again.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)


def test_states_of_members_are_read_changed_and_saved_as_by_themselves() -> None:
    plain, mine = model(), model()
    expected, optimizer = slow(plain), slow(mine)
    step = compile_with(mine, optimizer)
    assert step.optimizer is optimizer
    for number in range(4):
        train_eagerly(plain, expected, range(number, number + 1))
        step(batch(number))
        assert len(optimizer.state) == len(expected.state)
        torch.testing.assert_close(optimizer.inner.state_dict(), expected.inner.state_dict(), rtol=0, atol=0)
        copied = pickle.loads(pickle.dumps(list(optimizer.state.values())))
        torch.testing.assert_close(copied, list(expected.state.values()), rtol=0, atol=0)
        for each, trained in ((expected, plain), (optimizer, mine)):
            for parameter in trained.parameters():
                each.state[parameter]["slow"].mul_(0.9)
    torch.testing.assert_close(step.full_state_dict(), dict(plain.state_dict()), rtol=0, atol=0)
    assert not {"state_dict", "load_state_dict"} & (vars(optimizer).keys() | vars(optimizer.inner).keys())


def test_states_of_members_are_set_together(tmp_path: Path) -> None:
    mine = model()
    optimizer = slow(mine)
    step = compile_with(mine, optimizer)
    step(batch(0))
    saved = copy.deepcopy(optimizer.state_dict())
    step(batch(1))
    before = copy.deepcopy(optimizer.state_dict())
    step.evaluate(batch(2))
    optimizer.inner.load_state_dict(saved["inner"])
    torch.testing.assert_close(optimizer.state_dict(), {**before, "inner": saved["inner"]}, rtol=0, atol=0)
    optimizer.load_state_dict(before)
    step.save_checkpoint(tmp_path)  # takes them over
    optimizer.inner.state = defaultdict(dict)
    with pytest.raises(UsageError, match=r"those of a part of it set.* of SlowWeights"):
        step(batch(3))
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_one_within_has_the_same_groups_and_no_hooks() -> None:
    trained = model()
    optimizer = slow(trained)
    vars(optimizer)["other"] = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(OptimizerError, match="the SGD in other of SlowWeights, which has others"):
        compile_with(trained, optimizer)
    optimizer = slow(trained)
    optimizer.inner.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="without hooks on its step, found 1"):
        compile_with(trained, optimizer)
