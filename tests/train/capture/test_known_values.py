"""Values that follow from constants alone can be read by a traced forward, which then does as eager mode does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.lib.models import DIM, ROWS, Case, Layer, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain
from zerofx.capture.trace import capture
from zerofx.capture.values.known import KnownValues
from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch


class Reading(Regression):
    """Has a tensor that is neither parameter nor buffer, and reads what ``read`` says."""

    def __init__(self, read: Callable[[Reading, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = Layer(), read
        self.sizes = torch.tensor([3, 5])

    def predict(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x))


def _dims(model: Reading, x: Tensor) -> Tensor:
    return x - x.mean(torch.arange(1, x.dim()).tolist(), keepdim=True)


def _ascending(model: Reading, x: Tensor) -> Tensor:
    times = torch.linspace(0, 1, 4).to(x)
    steps = times[1:] - times[:-1]
    assert bool((steps > 0).all()) or bool((steps < 0).all())
    for step in steps:
        x = x + x * step * float(times[1])
    return x


def _attribute(model: Reading, x: Tensor) -> Tensor:
    first, second = model.sizes.tolist()
    return F.pad(x[:, : int(model.sizes[0])] * second, (0, DIM - first))


def _shape_of_values(model: Reading, x: Tensor) -> Tensor:
    even = torch.arange(DIM) % 2 == 0
    rows_twice = torch.repeat_interleave(torch.arange(ROWS // 2), torch.tensor([2] * (ROWS // 2)))
    x = x[rows_twice] + 0 * x
    x[:, even] = x[:, even] * 2  # as many as the mask says
    return F.pad(x[:, even.nonzero()[:, 0]], (0, DIM // 2))


def _in_place(model: Reading, x: Tensor) -> Tensor:
    marks = torch.zeros_like(x)  # of x only the shape matters
    marks[0] = 1
    marks[0, :2].mul_(3)
    return x * 2 if marks.sum() == DIM + 4 else x


def _mask_of_a_decoder(model: Reading, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return x * 2 if torch.equal(mask, torch.full((4, 4), float("-inf")).triu(1)) else x


READS = [_dims, _ascending, _attribute, _shape_of_values, _in_place, _mask_of_a_decoder]


@pytest.mark.parametrize("read", READS)
def test_constants_are_read_as_in_eager_mode(read: Callable[[Reading, Tensor], Tensor]) -> None:
    case = Case(lambda: Reading(read), rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


def _drawn(model: Reading, x: Tensor) -> Tensor:
    return x * 2 if torch.rand(3).sum() > 1 else x


def _overwritten(model: Reading, x: Tensor) -> Tensor:
    marks = torch.zeros(DIM)
    marks.view(2, -1)[0] = x[0, : DIM // 2].detach()
    return x * 2 if marks.sum() > 1 else x


def _weight(model: Reading, x: Tensor) -> Tensor:
    return x * 2 if next(model.parameters()).sum() > 0 else x


def _empty(model: Reading, x: Tensor) -> Tensor:
    return x * 2 if torch.empty(3).sum() > 0 else x


def _large(model: Reading, x: Tensor) -> Tensor:
    return x * 2 if torch.zeros(1 << 19).sum() > 0 else x


@pytest.mark.parametrize("read", [_drawn, _overwritten, _weight, _empty, _large])
def test_what_differs_from_step_to_step_is_not_read(read: Callable[[Reading, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="reads a tensor's value"):
        capture(Reading(read), Batch.from_call((torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)), {}))


def test_a_constant_of_the_models_is_left_as_it_is() -> None:
    sizes = torch.tensor([3, 5])
    with KnownValues() as known:
        known.value(sizes)
        doubled = sizes * 2
        sizes.add_(1)
        first, second = known.value(doubled), known.value(sizes)
    assert first is not None and first.tolist() == [6, 10]
    assert second is not None and second.tolist() == sizes.tolist() == [4, 6]


class Checking(Regression):
    """Raises errors of its own, as libraries do, where values are not what they have to be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if (x > 100).any() or not torch.isfinite(x).all():
            raise ValueError("not in range")
        assert x.min() > -100, "too small"
        if any(x[0] == 50):
            raise ValueError("fifty")
        return F.gaussian_nll_loss(self.layer(x), y, x.square())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)


def test_errors_of_a_models_own_become_checks_of_the_step() -> None:
    case = Case(Checking, rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (101.0, r"if \(x > 100\).any\(\) or"),
        (float("nan"), r"if \(x > 100\).any\(\) or"),
        (-101.0, r"assert x.min\(\) > -100"),
        (50.0, r"if any\(x\[0\] == 50\)"),
    ],
)
def test_a_step_ends_where_the_model_would_have_raised(wrong: float, line: str) -> None:
    torch.manual_seed(0)
    model, x = Checking(), torch.ones(ROWS, DIM)
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    assert step(x, x).isfinite()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"expected to hold for the values of this step:\n  .*{line}"):
        step(torch.full((ROWS, DIM), wrong), x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_branch_that_only_does_something_else_is_refused() -> None:
    class Choosing(Checking):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            if (x > 0).any():
                x = -x
            total: Tensor = self.layer(x).sum()
            return total

    with pytest.raises(CaptureError, match="reads a tensor's value"):
        capture(Choosing(), Batch.from_call((torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)), {}))


class Checkpointed(Regression):
    """Checkpoints of both kinds; the first of the reentrant kind gets no gradient, and trains nothing."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = nn.ModuleList(Layer() for _ in range(4)), use_reentrant

    def predict(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 1 else checkpoint(layer, x, use_reentrant=self.use_reentrant)
            x = F.dropout(x, 0.5)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_left_to_the_plan(use_reentrant: bool) -> None:
    case = Case(lambda: Checkpointed(use_reentrant=use_reentrant), rows)
    with pytest.warns(UserWarning, match="None of the inputs") if use_reentrant else contextlib.nullcontext():
        plain = train_plain(case, 3)
    assert differences(plain, train_compiled(case, 3, 3)) == []
