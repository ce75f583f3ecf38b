"""Two steps never hold one parameter: it is refused at compile, by name, until the first step is closed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import zerofx
from zerofx.errors import UsageError


class Headed(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        assert isinstance(weight, nn.Parameter)
        self.body.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.body(x)).sum()
        return loss


def _compiled(model: nn.Module) -> zerofx.Step:
    return zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")


def test_a_parameter_of_two_compiled_models_is_refused_by_name() -> None:
    first = Headed(nn.Parameter(torch.zeros(4, 4)))
    second = Headed(first.body.weight)
    step = _compiled(first)
    step(torch.ones(2, 4))
    with pytest.raises(UsageError, match=r"body.weight is one of another"):
        _compiled(second)
    with step.full_parameters():
        other = copy.deepcopy(first)
    _compiled(other).close()
    step.close()
    _compiled(second).close()
