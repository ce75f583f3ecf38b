"""What eager mode differentiates in another way for other values trains as there, whatever the values are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Case, Layer, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.errors import CaptureError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)


class Masked(Regression):
    """Puts a token in the place of some rows, a number in that of some elements, and one of size 1 by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(DIM))
        self.number = nn.Parameter(torch.randn(()))
        self.row = nn.Parameter(torch.randn(1, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def predict(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers[0](x)
        hidden[x[:, 0] > 0] = self.token
        batch = self.layers[1](hidden).reshape(2, -1, DIM)
        batch[(x[:, 1] > 0.5).reshape(2, -1)] = self.row
        batch[batch > 1.0] = self.number
        batch[x.reshape(2, -1, DIM) < -1.0] = 0.0
        flat: Tensor = batch.reshape(-1, DIM)
        return flat


@pytest.mark.parametrize(("stage", "num_micro_batches"), [(0, 1), (3, 2)])
def test_a_value_put_where_a_mask_says_trains_as_in_eager_mode(stage: int, num_micro_batches: int) -> None:
    case = Case(Masked, rows)
    found = train_compiled(case, stage, 4, accumulate=num_micro_batches)
    assert differences(train_plain(case, 4, num_micro_batches), found) == []


@pytest.mark.days(3)
def test_a_compiled_step_puts_it_there_too() -> None:
    case = Case(Masked, rows)
    found = train_compiled(case, 3, 4, backend="inductor")
    assert differences(train_plain(case, 4), found, 1e-4) == []


@pytest.mark.parametrize("named", [0, 1, 4])
def test_the_peak_holds_whatever_the_mask_names(named: int) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(256))
            self.head = nn.Linear(256, 1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = x * 2
            x[mask] = self.token
            loss: Tensor = self.head(x).square().mean()
            return loss

    model = Tokens()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    x, mask = torch.randn(4, 64, 256), torch.zeros(4, 64, dtype=torch.bool)
    mask[:named] = True
    step(x, mask)
    measured, planned = step.measure(x, mask).peak_bytes["device"], step.plan.peak_bytes["device"]
    assert measured == planned


class Filled(Regression):
    """Puts rows where a mask names as many, adds others to them, and fills in a number by all of its ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3, DIM))
        self.number = nn.Parameter(torch.randn(()))
        self.layer = Layer()

    def predict(self, x: Tensor) -> Tensor:
        mask = torch.zeros(len(x)).index_fill(0, x[:, 0].topk(len(self.rows)).indices, 1.0) > 0
        hidden: Tensor = self.layer(x)
        hidden = hidden * 1
        hidden[mask] = self.rows
        hidden = torch.index_put(hidden, (mask,), self.rows, accumulate=True)
        hidden.index_put_((mask.roll(1),), self.rows * 2)
        hidden = hidden.masked_fill(hidden > 1.0, self.number)
        hidden.masked_fill_((x[:, :1] < -0.5), self.number * 2)
        return torch.masked_fill(hidden, hidden < -1.0, value=self.number)


@pytest.mark.parametrize(("stage", "num_micro_batches"), [(0, 1), (3, 1)])
def test_rows_and_numbers_in_the_places_of_others_train_as_in_eager_mode(stage: int, num_micro_batches: int) -> None:
    case = Case(Filled, rows)
    found = train_compiled(case, stage, 4, accumulate=num_micro_batches)
    assert differences(train_plain(case, 4, num_micro_batches), found) == []


class Products(Regression):
    """Products of values of which none, some along a dimension, one, and several are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, DIM) + 0.5)
        self.layer = Layer()

    def predict(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        scale = self.weight.prod(0) * self.weight.prod(dim=1, keepdim=True) * self.weight.mT[:, 1:].prod(1)
        one_zero = self.weight * (torch.arange(DIM) > 0)
        scale = scale * (
            1 + one_zero.prod(1, keepdim=True) + one_zero[0].prod() + one_zero.prod() + hidden.relu().prod(0)
        )
        return (
            hidden * scale.sum(0) * self.weight[0, 0].prod() * torch.prod(self.weight[1], dtype=torch.float64).float()
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_products_train_as_in_eager_mode(stage: int) -> None:
    case = Case(Products, rows)
    found = train_compiled(case, stage, 4)
    assert differences(train_plain(case, 4), found) == []


@pytest.mark.parametrize("num_zeros", [0, 1, 2])
def test_the_peak_of_a_product_is_the_planned_one(num_zeros: int) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64, 64) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = (self.weight * x).prod(1).sum()
            return loss

    model = Product()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    x = torch.ones(64, 64)
    x[0, :num_zeros] = 0
    step(x)
    assert step.measure(x).peak_bytes == step.plan.peak_bytes


def test_values_as_many_as_values_say_are_refused() -> None:
    class Scattered(Masked):
        def predict(self, x: Tensor) -> Tensor:
            hidden = x * 2
            hidden[x[:, 0] > 0] = self.row.expand(len(x), DIM)[x[:, 0] > 0]
            return hidden

    model = Scattered()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    with pytest.raises(CaptureError, match="shapes do not depend on values"):
        step(torch.randn(8, DIM), torch.randn(8, DIM))
