"""Eager mode computes a checkpointed block again in backward, and counts again in buffers what it counts there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import zerofx
from tests.lib.models import DIM, Case, Regression, rows
from tests.lib.runs.training import differences, train_compiled, train_plain

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:.*torch.jit:DeprecationWarning"
)

Forward = Callable[["Blocks", Tensor], Tensor]


class Counting(nn.Module):
    """Gives what it gets, counts its calls and keeps an average: in place, and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.zeros(2, DIM))
        self.count: Tensor
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        row = self.table[1]
        row.copy_(0.9 * row + 0.1 * x.detach().mean(0))
        return x


class Rebinding(Counting):
    """Puts another tensor in the place of a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.table = 0.9 * self.table + 0.1 * x.detach().mean(0)
        return x


class Blocks(Regression):
    """A first layer, and blocks that ``run`` calls."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.norms = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU()) for _ in range(3))
        self.last = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        self.dropped = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(DIM), nn.Tanh())
        self.counting = Counting()
        self.counted_last = nn.Sequential(nn.Linear(DIM, DIM), nn.Sigmoid(), self.counting)
        self.counted_first = nn.Sequential(self.counting, nn.Linear(DIM, DIM), nn.Sigmoid())
        self.run = run

    def predict(self, x: Tensor) -> Tensor:
        return self.run(self, self.first(x))


def _again(block: Callable[[Tensor], Tensor], x: Tensor, *, reentrant: bool = False) -> Tensor:
    return cast(Tensor, checkpoint(block, x, use_reentrant=reentrant))


def _each(model: Blocks, x: Tensor) -> Tensor:
    for block in model.norms:
        x = _again(block, x)
    return x


def _nested(outer: bool, inner: bool) -> Forward:
    def run(model: Blocks, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return _again(model.norms[1], _again(model.norms[0], x, reentrant=inner), reentrant=inner)

        return _again(block, x, reentrant=outer)

    return run


def _shared(model: Blocks, x: Tensor) -> Tensor:
    """The same block twice, and once more without a checkpoint: values depend on the order."""
    return cast(Tensor, model.norms[0](_again(model.norms[0], _again(model.norms[0], x))))


def _unused(model: Blocks, x: Tensor) -> Tensor:
    _again(model.norms[0], x)
    return _again(model.norms[1], x)


def _to_the_end(model: Blocks, x: Tensor) -> Tensor:
    result: Tensor = model.first(x)
    with set_checkpoint_early_stop(False):
        result += _again(model.counted_last, x)
    return result


def _without_gradient(model: Blocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        seen = _again(model.norms[0], x)
    return seen + _again(model.norms[1], x)


def _sequential(model: Blocks, x: Tensor) -> Tensor:
    return cast(Tensor, checkpoint_sequential(model.norms, 2, x, use_reentrant=False))


RUNS: dict[str, Forward] = {
    "each": _each,
    "reentrant": lambda model, x: _again(model.norms[1], _again(model.norms[0], x, reentrant=True), reentrant=True),
    "at the end of a block": lambda model, x: _again(model.last, x),
    "after dropout": lambda model, x: _again(model.dropped, x),
    "counted after what backward needs": lambda model, x: _again(model.counted_last, x),
    "the same, reentrant": lambda model, x: _again(model.counted_last, x, reentrant=True),
    "to the end": _to_the_end,
    "counted before": lambda model, x: _again(model.counted_first, x),
    "shared": _shared,
    "unused": _unused,
    "without gradient": _without_gradient,
    "sequential": _sequential,
} | {
    f"nested, {outer} {inner}": _nested(outer == "reentrant", inner == "reentrant")
    for outer in ("reentrant", "hooks")
    for inner in ("reentrant", "hooks")
}


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", RUNS)
def test_buffers_are_written_as_often_as_in_eager_mode(name: str) -> None:
    case = Case(lambda: Blocks(RUNS[name]), rows)
    assert differences(train_plain(case, 3), train_compiled(case, 3, 3)) == []


@pytest.mark.sweep(1)
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"recompute": "full"}, {"backend": "inductor"}])
def test_with_other_options(options: dict[str, object]) -> None:
    case = Case(lambda: Blocks(_each), rows, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    plain = train_plain(case, 3, int(str(options.get("accumulate", 1))))
    compiled = train_compiled(case, 3, 3, **options)
    assert differences(plain, compiled, 1e-5 if "backend" in options else 0.0) == []
    counted = compiled.state["norms.0.1.num_batches_tracked"]
    assert counted == 6 * int(str(options.get("accumulate", 1)))


def _normed(model: Blocks, x: Tensor) -> Tensor:
    return _again(lambda x: x * model.counting.table[1].exp() + model.counting(x), x)


def _rebound(model: Blocks, x: Tensor) -> Tensor:
    return _again(lambda x: torch.tanh(model.counting(x)), x)


def _rebinding() -> Blocks:
    model = Blocks(_rebound)
    model.counting = Rebinding()
    model.counted_first = model.counted_last = nn.Identity()  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("make", [lambda: Blocks(_normed), _rebinding])
def test_a_block_that_changes_what_it_computes_with_is_told_of(make: Callable[[], nn.Module]) -> None:
    case = Case(make, rows)
    with pytest.warns(zerofx.ZeroFXWarning, match="does the same again in backward.*counting.table"):
        train_compiled(case, 3, 1)


def test_blocks_that_write_nothing_are_not_told_of() -> None:
    case = Case(lambda: Blocks(lambda model, x: _again(model.first, x)), rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_compiled(case, 3, 1)
