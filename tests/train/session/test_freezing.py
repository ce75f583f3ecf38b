"""Parameters that are frozen, and thawed, between steps: the step is made anew, and trains on as eager mode does."""

from __future__ import annotations

import pytest
import torch

import zerofx
from tests.lib.freezing import trained_while_freezing, unlike_eager_mode
from tests.lib.users import adamw, ids, tiny
from zerofx import UsageError


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_bits_of_eager_mode(kind: str, stage: int) -> None:
    assert unlike_eager_mode(kind, stage) == []


def test_it_says_so_once() -> None:
    with pytest.warns(match=r"requires_grad asks for .*: the step is made anew, with the same values") as said:
        trained_while_freezing("adamw", 0)
    texts = [str(warning.message) for warning in said]
    assert len(texts) == 3
    assert "layers.1.norm1.weight, layers.1.norm1.bias to be trained" in texts[1]


def test_a_moment_in_which_nothing_is_trained_is_refused() -> None:
    model = tiny()
    step = zerofx.compile(model, adamw(model), backend="eager")
    before = step(ids(), labels=ids(1))
    state = step.full_state_dict()
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train"):
        step(ids(), labels=ids(1))
    model.requires_grad_(True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in step.full_state_dict().items())
    assert step(ids(), labels=ids(1)) < before
