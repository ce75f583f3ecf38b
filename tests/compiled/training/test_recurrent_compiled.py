"""Recurrent layers in compiled regions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib import compiling
from tests.lib.models import Case
from tests.lib.runs.training import build, differences, train_compiled, train_plain

pytestmark = compiling.trainings


class _Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn: nn.RNNBase = getattr(nn, kind)(5, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.rnn(x)[0]).square().mean()
        return loss


def _case(kind: str, length: int) -> Case:
    return Case(lambda: _Recurrent(kind), lambda generator: ((torch.randn(3, length, 5, generator=generator),), {}))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_as_many_regions_are_compiled_whatever_the_length(kind: str) -> None:
    counts = []
    for length in (2, 20):
        case = _case(kind, length)
        model = build(case)
        ((x,), _) = case.batch(torch.Generator())
        step = zerofx.compile(model, case.optimizer(model), 0, example_batch=(x,))
        counts.append((step.num_regions, step.num_distinct_regions))
        step(x)
        assert step.measure(x).peak_bytes["device"] == step.plan.peak_bytes["device"]
    assert counts[0] == counts[1]


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_train_as_in_eager_mode(kind: str) -> None:
    case = _case(kind, 6)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3, backend="inductor"), tolerance=1e-5) == []
