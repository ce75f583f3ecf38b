"""Parameters that are frozen, and thawed, between steps: the step is made anew, and trains on as eager mode does."""

from __future__ import annotations

import pytest
import torch

import zerofx
from tests.lib.runs.freezing import unlike_eager_mode
from tests.lib.users import adamw, ids, tiny
from zerofx import UsageError


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("adamw", 0), *(pytest.param(*run, marks=pytest.mark.slow) for run in (("adamw", 3), ("sgd", 3)))],
)
def test_the_bits_of_eager_mode(kind: str, stage: int) -> None:
    with pytest.warns(match=r"requires_grad asks for .*: the step is made anew, with the same values") as said:
        assert unlike_eager_mode(kind, stage) == []
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


def test_a_plan_that_was_given_is_for_what_was_trained() -> None:
    model = tiny()
    step = zerofx.compile(model, adamw(model), backend="eager")
    step.prepare(ids(), labels=ids(1))
    step.close()
    again = zerofx.compile(model, adamw(model), backend="eager", plan=step.plan)
    again(ids(), labels=ids(1))
    model.head.weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"found head.weight to be frozen, with a plan, which is made for those"):
        again(ids(), labels=ids(1))
