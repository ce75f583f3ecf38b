"""What a forward checks of its tensors' values is checked in the step, which ends before its updates where it fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Case, Layer, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)
LARGE = 1e6


class Checking(Regression):
    """Checks values in each of the ways that torch has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def predict(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x < LARGE)
        torch._assert_async((x > -LARGE).all(), "too small")
        for layer in self.layers:
            x = layer(x)
        torch._assert(x.isfinite().all(), "not finite")
        return x


class Sampling(Checking):
    """Has torch check what a distribution is given."""

    def predict(self, x: Tensor) -> Tensor:
        mean = self.layers[0](x)
        drawn: Tensor = torch.distributions.Normal(mean, x.abs(), validate_args=True).rsample()
        return drawn


class Encoding(Checking):
    """Calls what torch's own decomposition checks the values of."""

    def predict(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](x) * nn.functional.one_hot((x[:, 0] > 0).long(), DIM)
        return y


class CheckingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x < LARGE)
        y: Tensor = super().forward(x)
        return y


class CheckingLayers(Checking):
    """Repeated layers that each check."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckingLayer() for _ in range(5))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model", [Checking, CheckingLayers, Encoding, Sampling])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_what_is_checked_trains_as_in_eager_mode(model: type[nn.Module], num_micro_batches: int) -> None:
    case = Case(model, rows)
    found = train_compiled(case, 3, 3, accumulate=num_micro_batches)
    assert differences(train_plain(case, 3, num_micro_batches), found) == []


@pytest.mark.days(3)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (LARGE, "test_checked_values.py:[0-9]*: torch._check_tensor_all"),
        (-2 * LARGE, "too small\nexpected to hold for the values of this step:\n  .*test_checked_values.py"),
        (float("nan"), "torch._check_tensor_all"),
    ],
)
def test_a_check_that_fails_ends_the_step_before_anything_is_updated(wrong: float, expected: str, backend: Any) -> None:
    torch.manual_seed(0)
    model, batch = CheckingLayers(), (torch.randn(4, DIM), torch.randn(4, DIM))
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend, stage=3)
    step(*batch)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=expected) as caught:
        step(torch.full((4, DIM), wrong), batch[1])
    assert caught.value.__notes__ == ["zerofx: when step 2 failed, nothing had been updated yet"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert step(*batch).isfinite()


def test_the_lines_of_a_check_are_the_models() -> None:
    class Direct(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._check_tensor_all(x > 0)
            return super().forward(x).sum()

    model = Direct(2, 2)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    with pytest.raises(RuntimeError, match=r"torch._check_tensor_all\(x > 0\)") as caught:
        step(torch.zeros(2, 2))
    assert "step(torch.zeros" not in str(caught.value)


def test_logits_are_tiled_behind_a_check() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 64)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            torch._check_tensor_all(target < 64)
            return nn.functional.cross_entropy(self.head(self.body(x)), target)

    torch.manual_seed(0)
    model = Classes()
    plain, x, target = copy.deepcopy(model), torch.randn(32, 8), torch.randint(64, (32,))
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", tile={"head": 4})
    assert torch.allclose(step(x, target), plain(x, target))
    assert step.plan.tiles
    with pytest.raises(RuntimeError, match="expected to hold"):
        step(x, target + 64)
