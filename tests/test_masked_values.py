"""A trainable value that a forward puts where a mask says trains as in eager mode, whatever the mask names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.models import DIM, Case, Layer, Regression, rows
from tests.training import differences, train_compiled, train_plain
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
    assert measured == planned if named == 4 else measured < planned


def test_as_many_values_as_a_mask_names_are_refused() -> None:
    class Scattered(Masked):
        def predict(self, x: Tensor) -> Tensor:
            hidden = x * 2
            values: Any = self.row.expand(int(x.shape[0]), DIM) * 1
            hidden[x[:, 0] > 0] = values[x[:, 0] > 0]
            return hidden

    model = Scattered()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    with pytest.raises(CaptureError, match="shapes do not depend on values"):
        step(torch.randn(8, DIM), torch.randn(8, DIM))
