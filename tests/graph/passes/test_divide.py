"""What is outside layers is marked piece by piece, and regions end where a piece's values do not stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zerofx.capture.trace import Batch, capture
from zerofx.codegen.regions import cut, is_free_view, regions_of
from zerofx.errors import PlanError
from zerofx.ir.edit import skip_getitems, start_of_unit
from zerofx.ir.facts import piece_of
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import recompute
from zerofx.passes.divide import divide
from zerofx.passes.prepare.simplify import simplify
from zerofx.scheduler.plan.decisions import PieceDecision


class Unlike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(torch.sigmoid(self.a(x))))).sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 6, bias=False), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.a(x))).sum()


def captured() -> StepGraph:
    step = capture(Unlike(), Batch.from_call((torch.zeros(2, 4),), {}))
    simplify(step)
    return step


def decided(*values: str) -> tuple[PieceDecision, ...]:
    return (
        PieceDecision("first", "mm", "tanh", "sigmoid_backward", "mm_4", values),
        PieceDecision("second", "mm_1", "sum_1", "expand", "tanh_backward_1"),
    )


def regions(step: StepGraph) -> str:
    """The operators of each region, with their pieces."""
    return "\n\n".join(
        "\n".join(f"{node.name}  # {piece_of(node)}" for node in region.own if not is_free_view(node))
        for region in regions_of(cut(step))
    )


def test_regions_end_at_a_piece_of_which_something_is_computed_again(golden: Callable[..., None]) -> None:
    step = captured()
    divide(step, decided("sigmoid"))
    recompute(step, frozenset({"sigmoid"}), frozenset())
    golden(regions(step))


def test_where_all_values_stay_regions_are_as_before() -> None:
    step, divided = captured(), captured()
    divide(divided, decided())
    assert [region.key for region in regions_of(cut(divided))] == [region.key for region in regions_of(cut(step))]


def test_marks_change_no_node() -> None:
    step = captured()
    before = step.text()
    divide(step, decided("sigmoid"))
    assert step.text() == before
    assert step.clone().cut_pieces == {"first"}


def test_nothing_is_put_between_an_operator_that_ends_a_piece_and_its_outputs() -> None:
    step = capture(Normed(), Batch.from_call((torch.zeros(2, 4),), {}))
    simplify(step)
    first = PieceDecision("first", "mm", "native_layer_norm", None, None, ("mm",))
    divide(step, (first, PieceDecision("second", "tanh", "sum_1", None, None)))
    nodes = step.nodes_by_name()
    assert start_of_unit(step, nodes["tanh"]) is skip_getitems(nodes["native_layer_norm"]).next


def test_a_piece_of_another_graph_is_refused_before_anything_is_marked() -> None:
    step = captured()
    with pytest.raises(PlanError, match="names node conv"):
        divide(step, (*decided(), PieceDecision("third", "conv", "conv", None, None)))
    assert not any(piece_of(node) for node in step.calls())


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (PieceDecision("third", "sum_1", "mm_1", None, None), "mm_1, with which the forward of third ends"),
        (PieceDecision("third", "mm", "tanh", "mm_4", "expand"), "expand, with which the backward of third ends"),
    ],
)
def test_a_piece_that_ends_before_it_begins_is_refused_before_anything_is_marked(
    piece: PieceDecision, why: str
) -> None:
    step = captured()
    with pytest.raises(PlanError, match=f"expected a piece that ends after it begins, found that {why}"):
        divide(step, (*decided(), piece))
    assert not any(piece_of(node) for node in step.calls())
