"""Recurrent layers are an operator a layer, with the bits of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.models import Case
from tests.lib.runs.training import build, differences, train_compiled, train_plain
from zerofx.capture.by_layer.by_layer import capture_by_layer
from zerofx.capture.traceable import Forward
from zerofx.disk.cache import DiskCache
from zerofx.ir import ops
from zerofx.ir.batch import Batch
from zerofx.ir.op_kernels.onednn_lstm import workspace_bytes

BATCH, INPUTS = 3, 5


class Recurrent(nn.Module):
    """A recurrent layer between two others, which learns its first states; the last ones are in the loss, too."""

    def __init__(self, kind: str, hidden: int = 37, **options: Any) -> None:
        super().__init__()
        self.below = nn.Linear(INPUTS, INPUTS)
        self.rnn: nn.RNNBase = getattr(nn, kind)(INPUTS, hidden, **{"num_layers": 2, **options})
        states = self.rnn.proj_size or hidden
        directions = 1 + self.rnn.bidirectional
        self.head = nn.Linear(states * directions, 1)
        num = self.rnn.num_layers * directions
        self.first = nn.ParameterList(
            torch.randn(num, 1, size) / 4 for size in ((states, hidden) if kind == "LSTM" else (states,))
        )

    def forward(self, x: Tensor) -> Tensor:
        states = tuple(state.expand(-1, BATCH, -1).contiguous() for state in self.first)
        given: Any = states if len(states) > 1 else states[0]
        y, last = self.rnn(self.below(x.transpose(0, 1) if self.rnn.batch_first else x), given)
        loss: Tensor = self.head(y).square().mean()
        for state in last if isinstance(last, tuple) else [last]:
            loss = loss + state.sin().sum() / 100
        return loss


class Plain(Recurrent):
    """The same from zeros, with what comes out alone in the loss."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.rnn(self.below(x))[0]).square().mean()
        return loss


class CalledTwice(Recurrent):
    """One layer for two sequences of unlike lengths."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.head(self.rnn(self.below(part))[0]).mean() for part in (x, x[1:4]))
        loss: Tensor = first * second + first
        return loss


def case(model: Callable[[], nn.Module], length: int = 6, dtype: torch.dtype = torch.float32) -> Case:
    return Case(
        lambda: model().to(dtype),
        lambda generator: ((torch.randn(length, BATCH, INPUTS, generator=generator).to(dtype),), {}),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True, "batch_first": True},
    "dropout": {"dropout": 0.3},
    "small": {"hidden": 7, "num_layers": 1},
}
CASES = {
    **{f"{kind}, {name}": (kind, options) for kind in ("LSTM", "GRU", "RNN") for name, options in OPTIONS.items()},
    "RNN, relu": ("RNN", {"nonlinearity": "relu"}),
    "LSTM, projection": ("LSTM", {"proj_size": 11, "bidirectional": True}),
    "LSTM, projection without bias": ("LSTM", {"proj_size": 11, "bias": False}),
}


@pytest.mark.days(3)
@pytest.mark.sweep(7)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # eager mode's
@pytest.mark.parametrize("name", CASES)
def test_recurrent_layers_have_the_bits_of_eager_mode(name: str) -> None:
    kind, options = CASES[name]
    one = case(lambda: Recurrent(kind, **options))
    assert differences(train_plain(one, 3), train_compiled(one, 3, 3)) == []


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_other_dtypes_have_the_bits_of_eager_mode(kind: str, dtype: torch.dtype) -> None:
    one = case(lambda: Recurrent(kind), dtype=dtype)
    one = Case(one.model, one.batch, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.125))
    assert differences(train_plain(one, 2), train_compiled(one, 0, 2)) == []


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_of_a_layer_that_is_called_twice_are_summed_in_the_order_of_eager_mode(kind: str) -> None:
    one = case(lambda: CalledTwice(kind))
    assert differences(train_plain(one, 3), train_compiled(one, 3, 3)) == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"accumulate": 3}], ids=["recompute", "accumulate"])
def test_plans_have_the_bits_of_eager_mode(kind: str, options: dict[str, Any]) -> None:
    class Pieces(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.head(self.rnn(self.below(x.transpose(0, 1)))[0]).square().mean()
            return loss

    one = Case(
        lambda: Pieces(kind, dropout=0.2), lambda generator: ((torch.randn(6, 4, INPUTS, generator=generator),), {})
    )
    expected = train_plain(one, 3, accumulate=options.get("accumulate", 1))
    assert differences(expected, train_compiled(one, 0, 3, **options)) == []


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_step_takes_the_planned_memory_and_evaluates_as_eager_mode_does(kind: str) -> None:
    one = case(lambda: Plain(kind, dropout=0.3))
    model = build(one)
    step = zerofx.compile(model, one.optimizer(model), 0, backend="eager")
    ((x,), _) = one.batch(torch.Generator().manual_seed(1))
    step(x)
    assert step.measure(x).peak_bytes["device"] == step.plan.peak_bytes["device"]
    found = step.evaluate(x)
    model.load_state_dict(step.full_state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(x), found)


@pytest.mark.parametrize(("kind", "target"), [("LSTM", ops.onednn_lstm), ("GRU", ops.recurrent_steps)])
def test_a_layer_is_one_operator_whatever_its_length(kind: str, target: Any) -> None:
    sizes = []
    for length in (4, 40):
        step = _captured(case(lambda: Plain(kind), length))
        sizes.append(len(step.graph.nodes))
        assert len(step.graph.find_nodes(op="call_function", target=target)) == 2
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_what_was_captured_is_kept_for_the_next_run(kind: str, tmp_path: Any) -> None:
    said: list[str] = []
    graphs = [_captured(case(lambda: Plain(kind)), cache=DiskCache(tmp_path), say=said.append) for _ in range(2)]
    assert said == ["captured by an earlier run, whose forward was the same"]
    assert graphs[0].text() == graphs[1].text()


def _captured(one: Case, **options: Any) -> Any:
    model = build(one)
    args, kwargs = one.batch(torch.Generator())
    return capture_by_layer(Forward(model, Batch.from_call(args, kwargs)), **options)


def test_a_workspace_of_another_layer_is_refused() -> None:
    x, weights = torch.zeros(4, 2, 8), [torch.zeros(64, 8), torch.zeros(64, 16), torch.zeros(64), torch.zeros(64)]
    state, y = torch.zeros(2, 16), torch.zeros(4, 2, 16)
    num_bytes = workspace_bytes(x, 16, True)
    with pytest.raises(
        zerofx.InternalError, match=f"expected oneDNN to keep {num_bytes + 1} bytes .* found {num_bytes}"
    ):
        ops.onednn_lstm(x, *weights, state, state, False, True, num_bytes + 1)
    workspace = torch.zeros(num_bytes - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"expected a workspace of {num_bytes} bytes, found one of {num_bytes - 1}"):
        ops.onednn_lstm_backward(x, *weights, state, state, y, state, state, y, None, None, False, True, workspace)
