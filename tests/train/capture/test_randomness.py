"""A forward that draws otherwise than with torch would draw once, for all steps: it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import DIM, Case, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.capture.traceable import preserve_randomness
from zerofx.errors import CaptureError


class Drawing(Regression):
    """Scales each layer by what it draws, so that repeated layers draw too."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.draw = draw

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.draw()
        return x


def _states() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, tuple(keys), *rest


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (random.random, "draws with Python's random:"),
        (np.random.rand, "draws with numpy.random:"),
        (lambda: random.gauss() + np.random.randn(), "draws with Python's random and numpy.random:"),
    ],
)
def test_draws_of_other_generators_are_refused_and_undone(draw: Callable[[], float], found: str) -> None:
    model = Drawing(draw)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    batch, before = (torch.randn(4, DIM), torch.randn(4, DIM)), _states()
    with pytest.raises(CaptureError, match=found):
        step(*batch)
    assert _states() == before


def _seeded() -> float:
    torch.manual_seed(42)
    return 1.0


def _seeded_for_a_draw() -> float:
    with torch.random.fork_rng([]):
        torch.manual_seed(42)
        return torch.rand(())  # type: ignore[return-value]


@pytest.mark.parametrize("draw", [_seeded, _seeded_for_a_draw])
def test_a_forward_that_seeds_is_refused_and_the_seed_undone(draw: Callable[[], float]) -> None:
    model = Drawing(draw)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    batch, before = (torch.randn(4, DIM), torch.randn(4, DIM)), torch.get_rng_state()
    with pytest.raises(CaptureError, match="found one that seeds it"):
        step(*batch)
    assert torch.equal(torch.get_rng_state(), before)


_OWN = torch.Generator()


@pytest.mark.parametrize("generator_for", [lambda: _OWN, lambda: torch.Generator().manual_seed(3)])
def test_draws_of_a_generator_of_its_own_are_refused_and_undone(generator_for: Callable[[], torch.Generator]) -> None:
    model = Drawing(lambda: torch.rand((), generator=generator_for()))  # type: ignore[arg-type, return-value]
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    batch, before = (torch.randn(4, DIM), torch.randn(4, DIM)), _OWN.get_state()
    with pytest.raises(CaptureError, match=r"(?s)gives another at\n.*test_randomness.py.*leave generator= out"):
        step(*batch)
    assert torch.equal(_OWN.get_state(), before)


def test_torchs_own_generator_may_be_given() -> None:
    case = Case(lambda: Drawing(lambda: torch.rand((), generator=torch.default_generator)), rows)  # type: ignore[arg-type, return-value]
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


@pytest.mark.parametrize("draw", [lambda: 0.5, lambda: float(random.Random(0).random())])
def test_what_does_not_touch_them_is_not_refused(draw: Callable[[], float]) -> None:
    model = Drawing(draw)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    assert step(torch.randn(4, DIM), torch.randn(4, DIM)).isfinite()


def test_generators_are_left_as_they_were() -> None:
    before, torch_before = _states(), torch.get_rng_state()
    with preserve_randomness(torch.device("cpu")):
        drawn = random.random(), np.random.rand(3), torch.rand(3)
    assert len(drawn) == 3
    assert _states() == before
    assert torch.equal(torch.get_rng_state(), torch_before)


class _ChangesWhatDropoutGives(Regression):
    """A dropout that drops nothing gives the tensor that it is given, which is changed in place."""

    def __init__(self, p: float, *, train: bool) -> None:
        super().__init__()
        self.layer, self.p, self.drops = nn.Linear(DIM, DIM), p, train

    def predict(self, x: Tensor) -> Tensor:
        x = self.layer(x) * 2
        nn.functional.dropout(x, self.p, training=self.drops).add_(1)
        return x


@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True)])
def test_a_dropout_that_drops_nothing_gives_what_it_is_given(p: float, train: bool) -> None:
    case = Case(lambda: _ChangesWhatDropoutGives(p, train=train), rows)
    assert differences(train_plain(case, 2), train_compiled(case, 2, 2)) == []
