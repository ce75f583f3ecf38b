"""Values in 8 bits between forward and backward: what backward reads of them, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.graph.passes.test_recompute import Squashing
from tests.lib.graphs import number_values
from zerofx.capture.trace import Batch, capture
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.compress import can_be_compressed, compress
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.analysis.saved_values import saved_values
from zerofx.scheduler.decide.compress import compresses_of, values_to_round
from zerofx.scheduler.plan.decisions import Absence

aten = torch.ops.aten
SHAPE = (64, 64)


def captured(model: nn.Module, *batch: Tensor) -> StepGraph:
    step = capture(model, Batch.from_call(batch, {}))
    simplify(step)
    return step


def away(*values: str) -> list[Absence]:
    return [Absence(kind="compresses", value=value, num_bytes=8, reason="a test") for value in values]


class Computing(nn.Module):
    """The loss of a function of a linear layer's output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(*SHAPE), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).sum()


def rounded(function: Callable[[Tensor], Tensor], rows: int = SHAPE[0]) -> list[object]:
    """The operators of forward whose values may be rounded."""
    step = captured(Computing(function), torch.zeros(rows, SHAPE[1]))
    return [node.target for node in values_to_round(step)]


def test_backward_reads_what_is_restored(golden: object) -> None:
    step = captured(Squashing(), torch.zeros(2, 4))
    values = [node.name for node in saved_values(step) if can_be_compressed(node)]
    compress(step, away(*values), "int8")
    assert callable(golden)
    golden(number_values(step.text()))


def test_each_value_is_rounded_after_its_last_use_in_forward_and_restored_before_its_first_in_backward() -> None:
    step = captured(Squashing(), torch.zeros(2, 4))
    values = [node.name for node in saved_values(step) if can_be_compressed(node)]
    compress(step, away(*values), "fp8")
    step.graph.lint()
    packed = [node for node in step.calls() if node.target is ops.quantise_saved]
    restored = [node for node in step.calls() if node.target is ops.restore_saved]
    assert len(packed) == len(restored) == len(values) > 4
    for node in packed:
        (value,) = node.all_input_nodes
        assert {origin(user).phase for user in value.users} == {Phase.FORWARD} and max(value.users) is node
    for node in restored:
        assert origin(node).phase is Phase.BACKWARD
        between = [other for other in step.calls() if node < other < min(node.users)]
        assert all(other.target is ops.restore_saved for other in between)
    assert set(values).isdisjoint(node.name for node in saved_values(step))


def test_values_that_cannot_wait_so_are_refused() -> None:
    step = captured(Squashing(), torch.zeros(2, 4))
    read_by_forward_alone = next(node for node in step.calls() if not can_be_compressed(node))
    for name in (read_by_forward_alone.name, step.loss.name):
        before = step.text()
        with pytest.raises(PlanError, match=f"expected to keep {name} in int8, found that it is no value of forward"):
            compress(step, away(name), "int8")
        assert step.text() == before
    doubles = captured(Squashing().double(), torch.zeros(2, 4, dtype=torch.float64))
    assert not any(map(can_be_compressed, saved_values(doubles)))


def test_what_an_activation_reads_and_gives_is_rounded() -> None:
    assert rounded(F.gelu) == [aten.addmm.default]
    assert rounded(torch.tanh) == [aten.tanh.default]
    assert rounded(lambda x: F.relu(x).square()) == [aten.relu.default]


def test_what_no_parameter_goes_into_stays() -> None:
    class Masked(Computing):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = torch.tanh(self.linear(x) + torch.where(x > 0, x.cos(), -torch.inf)).mul(x.cos()).sum()
            return loss

    step = captured(Masked(F.gelu), torch.zeros(SHAPE))
    large = [node.target for node in saved_values(step) if can_be_compressed(node)]
    assert set(large) == {aten.tanh.default, aten.cos.default}
    assert [node.target for node in values_to_round(step)] == [aten.tanh.default]


def test_small_values_stay() -> None:
    assert rounded(F.gelu, rows=8) == []
    # Statistics of a norm are a number a row.
    step = captured(Computing(nn.LayerNorm(SHAPE[1])), torch.zeros(2048, SHAPE[1]))
    assert len(saved_values(step)) == 3 and [node.target for node in values_to_round(step)] == [aten.addmm.default]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.pow(-0.5),
        lambda x: x.log(),
        lambda x: x.abs(),
        lambda x: x.amax(1),
        lambda x: x.clamp(-1, 1),
        lambda x: x.logsumexp(1),
        lambda x: F.log_softmax(x, 1)[:, 0],
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(SHAPE)),
        lambda x: torch.ones(SHAPE) / (x + 2),
    ],
    ids=["power", "log", "abs", "amax", "clamp", "logsumexp", "log_softmax", "cross_entropy", "divisor"],
)
def test_what_backward_must_know_exactly_stays(function: Any) -> None:
    step = captured(Computing(function), torch.zeros(SHAPE))
    kept = {node.target for node in saved_values(step)} - {node.target for node in values_to_round(step)}
    large = {node.target for node in saved_values(step) if can_be_compressed(node)}
    assert large & kept


def test_what_is_elsewhere_is_left_out_and_so_is_all_without_an_encoding() -> None:
    step = captured(Computing(lambda x: torch.tanh(F.gelu(x))), torch.zeros(SHAPE))
    whole = compresses_of(step, "int8", ())
    assert [decision.num_bytes for decision in whole] == [64 * 64 * 4 - (64 * 64 + 64 * 64 // 256 * 4)] * 2
    assert {decision.reason for decision in whole} == {"as asked: int8 in the place of float32"}
    assert compresses_of(step, "int8", {whole[0].value}) == whole[1:] and compresses_of(step, "", ()) == ()


def test_views_read_the_restored_value() -> None:
    step = captured(Computing(lambda x: x.relu().t() @ x), torch.zeros(SHAPE))
    names = [node.name for node in values_to_round(step)]
    compress(step, away(*names), "int8")
    step.graph.lint()
    forward: list[fx.Node] = [node for node in saved_values(step) if node.target is not ops.quantise_saved]
    assert len(names) == 2 and {node.args[0].target for node in forward} == {ops.quantise_saved}  # type: ignore[union-attr]
