"""The scale of a loss from step to step is ``torch.amp.GradScaler``'s."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.precision import LossScale
from zerofx.runtime.state.loss_scaler import LossScaler


def _grad_scaler(policy: LossScale) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer, nn.Parameter]:
    scaler = torch.amp.GradScaler(
        "cpu", policy.init_scale, policy.growth_factor, policy.backoff_factor, policy.growth_interval
    )
    weight = nn.Parameter(torch.zeros(1))
    return scaler, torch.optim.SGD([weight], lr=0.0), weight


@pytest.mark.parametrize(
    "policy",
    [LossScale(), LossScale(3.3, 1.1, 0.7, 2), LossScale(2.0**126, 2.0, 0.5, 1), LossScale(2.0**-148, 2.0, 0.5, 50)],
)
def test_scales_are_grad_scalers_up_to_the_ends_of_float32(policy: LossScale) -> None:
    scaler, optimizer, weight = _grad_scaler(policy)
    found, draw = LossScaler(policy), random.Random(5)
    scaler.scale(torch.ones(()))  # makes its state
    for _ in range(300):
        is_finite = draw.random() > 0.3
        weight.grad = torch.tensor([0.0 if is_finite else draw.choice([math.inf, math.nan])])
        scaler.step(optimizer)
        scaler.update()
        found.update(is_finite=is_finite)
        assert found.scale == scaler.get_scale()
        assert found.state_dict() == scaler.state_dict()


def test_tensors_follow_the_scale_in_their_dtype_and_stay_the_same() -> None:
    scaler = LossScaler(LossScale(2.0**17))
    low, wide = (scaler.tensor(dtype, torch.device("cpu")) for dtype in (torch.float16, torch.float32))
    assert low.isinf() and wide == 2.0**17  # as torch rounds it
    for _ in range(2):
        scaler.update(is_finite=False)
    assert low == wide == 2.0**15 and scaler.tensor(torch.float16, torch.device("cpu")) is low


def test_a_state_of_either_goes_on_as_it_would_have() -> None:
    policy = LossScale(growth_interval=3)
    scaler, optimizer, weight = _grad_scaler(policy)
    scaler.scale(torch.ones(()))
    for gradient in (math.inf, 0.0, 0.0):
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
    found = LossScaler(policy)
    found.load_state_dict(scaler.state_dict())
    found.update(is_finite=True)
    assert (found.scale, found.state_dict()["_growth_tracker"]) == (65536.0, 0)


@pytest.mark.parametrize("state", [{}, {"scale": -1.0, "_growth_tracker": 0}, {"scale": 1.0, "_growth_tracker": 0.5}])
def test_what_is_no_state_is_refused(state: dict[str, float]) -> None:
    scaler = LossScaler(LossScale())
    with pytest.raises(UsageError, match="expected the state of a loss scale"):
        scaler.load_state_dict(state)
    assert scaler.scale == 65536.0
