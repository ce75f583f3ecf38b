"""Complex parameters are sharded and updated as the real numbers that they consist of, with eager mode's bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import DIM, ROWS, Case, Layer, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.errors import OptimizerError


class Spectral(Regression):
    """Filters in the frequency domain, as Fourier neural operators do: one weight of each kind, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.filters = nn.ParameterList(torch.randn(ROWS, DIM // 2 + 1, dtype=torch.cfloat) for _ in range(3))
        self.shift = nn.Parameter(torch.tensor(0.1 + 0.2j))
        self.turned = nn.Parameter(torch.randn(DIM // 2 + 1, 3, dtype=torch.cfloat).t())

    def predict(self, x: Tensor) -> Tensor:
        for layer, weight in zip(self.layers, self.filters, strict=True):
            frequencies = torch.fft.rfft(layer(x)) * weight + self.shift
            x = x + torch.fft.irfft(frequencies * self.turned.sum(0), n=DIM)
        return x


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


CASE = Case(Spectral, rows, optimizer=_adam)


@pytest.mark.parametrize("stage", [0, 3])
def test_complex_parameters_train_as_in_eager_mode(stage: int) -> None:
    assert differences(train_plain(CASE, 3), train_compiled(CASE, stage, 3)) == []


def _on_ranks(stage: int) -> list[str]:
    return differences(train_plain(CASE, 3), train_compiled(CASE, stage, 3))


def test_complex_parameters_are_divided_over_ranks() -> None:
    assert run_ranks(partial(_on_ranks, 3), 2) == [[], []]


def _optimizers() -> list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    return [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("make", _optimizers())
def test_states_are_complex_where_they_are_given_back_and_taken_over(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model, batch = Spectral(), (torch.randn(ROWS, DIM), torch.randn(ROWS, DIM))
    plain = copy.deepcopy(model)
    optimizer, other = make(list(model.parameters())), make(list(plain.parameters()))

    def train_plainly() -> None:
        plain(*batch).backward()
        other.step()
        other.zero_grad()

    step = zerofx.compile(model, optimizer, stage=3, backend="eager")
    for _ in range(2):
        step(*batch)
        train_plainly()
    found, expected = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(found[i][name], value) for i, one in expected.items() for name, value in one.items())
    step.close()
    assert all(torch.equal(one, value) for one, value in zip(model.parameters(), plain.parameters(), strict=True))
    again = zerofx.compile(model, optimizer, stage=3, backend="eager")
    again(*batch)
    train_plainly()
    whole = again.full_state_dict()
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())


def test_an_optimizer_that_rounds_complex_numbers_otherwise_is_refused() -> None:
    model = Spectral()
    with pytest.raises(OptimizerError, match=r"as all of torch.optim but SGD do, found that SGD does not"):
        zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1))
