from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib.graphs import calls, captured, check_same_results
from tests.train.passes.test_tile import VOCAB, Classifier, classified, gpt
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.tile import tile
from zerofx.scheduler.analysis.loss_heads import MIN_CLASSES, find_heads
from zerofx.scheduler.decide.tiling import rungs
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.why import why

aten = torch.ops.aten


def tiled(step: StepGraph, num_tiles: int) -> StepGraph:
    head = find_heads(step)[0]
    tile(step, [TileDecision(head.product.name, num_tiles, head.num_bytes, "asked", over="classes")])
    return step


@pytest.mark.parametrize("num_tiles", [2, 3])
def test_logits_never_exist_whole(num_tiles: int) -> None:
    model, batch = gpt()
    step = tiled(captured(model, *batch), num_tiles)
    assert not calls(step, aten._log_softmax.default)
    widths = [tensor(node).shape[1] for node in calls(step, aten.mm.default) if tensor(node).shape[0] == 512]
    assert max(widths) <= max(-(-VOCAB // num_tiles), 128) and len(calls(step, ops.softmax_gradient)) == num_tiles


def compare(model: nn.Module, batch: tuple[Tensor, ...], num_tiles: int, dtype: torch.dtype | None = None) -> None:
    whole = captured(model, *batch, precision=dtype)
    given = tuple(one.to(dtype) if one.is_floating_point() else one for one in batch)
    rtol = 1e-5 if dtype is None else 2**-7
    check_same_results(whole, tiled(whole.clone(), num_tiles), model, given, rtol, rtol, loss_rtol=rtol)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_and_all_gradients_are_those_of_whole_logits(tied: bool) -> None:
    compare(*gpt(tied), num_tiles=3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_tiles", [2, 5])
def test_a_bias_and_ignored_targets(reduction: str, num_tiles: int) -> None:
    x, target = classified()
    target[::7] = 3
    compare(Classifier(reduction), (x, target), num_tiles)


class InFloat32(Classifier):
    """Logits in the compute dtype, their loss in float32, as language models have it."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss: Tensor = nn.functional.cross_entropy(self.head(x).float(), target)
        return loss


def test_logits_in_bf16_have_their_sums_in_float32() -> None:
    compare(InFloat32(), classified(), 3, torch.bfloat16)


def test_a_loss_in_bf16_is_left_to_tiles_of_rows() -> None:
    step = captured(Classifier(), *classified(), precision=torch.bfloat16)
    assert find_heads(step) and not find_heads(step)[0].has_classes
    with pytest.raises(PlanError, match="into 2 over classes"):
        tiled(step, 2)


def test_more_tiles_than_classes_are_refused() -> None:
    model, batch = gpt()
    with pytest.raises(PlanError, match=f"into {VOCAB + 1} over classes"):
        tiled(captured(model, *batch), VOCAB + 1)


def test_tiles_of_classes_are_tried_where_the_kernel_is_used() -> None:
    model = Classifier()
    model.head = nn.Linear(16, 8 * MIN_CLASSES)
    step = captured(model, *classified())
    assert all(one.over == "rows" for rung in rungs(step, True) for tiles in rung for one in tiles)
    counts = [
        one.num_tiles
        for rung in rungs(step, True, classes=True)
        for tiles in rung
        for one in tiles
        if one.over == "classes"
    ]
    assert counts == [8]


def test_a_plan_with_tiles_of_classes_trains_as_whole_logits_do_within_its_peak() -> None:
    torch.manual_seed(0)
    model, batch = gpt(tied=False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    plan = zerofx.plan(model, optimizer, batch, machine="cpu", backend="eager").plan
    head = find_heads(captured(model, *batch))[0]
    decision = TileDecision(head.product.name, 4, head.num_bytes, "asked", over="classes")
    found = []
    for tiles in ((), (decision,)):
        model.load_state_dict(state)
        given = replace(plan, tiles=tiles, prediction=None)
        assert Plan.from_json(given.to_json()) == given
        step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", plan=given)
        found.append([float(step(*batch)) for _ in range(3)])
        measured = step.measure(*batch).peak_bytes["device"]
        assert measured == pytest.approx(step.plan.peak_bytes["device"], rel=0.01)
        step.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert "4 tiles of classes: asked" in why(given, decision.value)
    assert "tiled over classes: " in str(step.plan)
