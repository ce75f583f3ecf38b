from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.budgets import least_bytes, planned
from tests.lib.graphs import calls, captured, check_same_results, sgd
from tests.lib.virtual_ranks import feeds_of, run
from zerofx.capture.trace import Batch, capture
from zerofx.choices import Tiling
from zerofx.errors import PlanError
from zerofx.ir.facts import tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.prepare.partition import partition
from zerofx.passes.prepare.simplify import simplify
from zerofx.passes.tile import tile
from zerofx.scheduler.analysis.loss_heads import find_heads
from zerofx.scheduler.plan.decisions import ShardingDecision, TileDecision
from zerofx.scheduler.plan.plan import Plan

VOCAB = 512
TILINGS: tuple[Tiling, ...] = ("none", "auto")
aten = torch.ops.aten


def gpt(tied: bool = True) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = GPT(VOCAB, 32, 2, 4, 128)
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    ids = torch.randint(VOCAB, (4, 129))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


@functools.cache
def least(tiling: Tiling, tied: bool) -> int:
    """The least bytes that the GPT is trained in by SGD."""
    model, batch = gpt(tied)
    return least_bytes(model, batch, optimizer=sgd(model), tile=tiling)


class Classifier(nn.Module):
    """An output layer with a bias; some targets are ignored."""

    def __init__(self, reduction: str = "mean", smoothing: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)
        self.reduction, self.smoothing = reduction, smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        options: dict[str, Any] = {"reduction": self.reduction, "label_smoothing": self.smoothing}
        return F.cross_entropy(self.head(x), target, ignore_index=3, **options)


class Leaking(Classifier):
    """Something else reads the logits."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(x)
        loss: Tensor = F.cross_entropy(logits, target) + logits.square().mean()
        return loss


def classified() -> tuple[Tensor, Tensor]:
    return torch.randn(512, 16), torch.randint(8, (512,))


def tiled(step: StepGraph, num_tiles: int) -> StepGraph:
    head = find_heads(step)[0]
    tile(step, [TileDecision(head.product.name, num_tiles, head.num_bytes, "asked")])
    return step


@pytest.mark.parametrize("num_tiles", [2, 3, 4])
def test_logits_never_exist_whole(num_tiles: int) -> None:
    model, batch = gpt()
    step = tiled(captured(model, *batch), num_tiles)
    sizes = [tensor(node).shape[0] for node in calls(step, aten._log_softmax.default)]
    assert sum(sizes) == 512 and max(sizes) <= -(-512 // num_tiles)
    assert not find_heads(step) or find_heads(step)[0].num_rows < 512


def test_the_loss_and_all_gradients_stay_outputs() -> None:
    model, batch = gpt(tied=False)
    before = captured(model, *batch)
    after = tiled(before.clone(), 4)
    assert list(after.gradients) == list(before.gradients)
    for name, gradient in after.gradients.items():
        assert tensor(gradient).shape == tensor(before.gradients[name]).shape
    assert tensor(after.loss).shape == ()


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiled_step_trains_like_a_whole_one_within_rounding(tied: bool) -> None:
    model, batch = gpt(tied)
    results = []
    for tiling in TILINGS:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, foreach=False)
        budget = least(tiling, tied)
        step = zerofx.compile(trained, optimizer, backend="eager", memory_budget=budget, tile=tiling)
        results.append([*(step(*batch) for _ in range(3)), *(p.detach() for p in trained.parameters())])
        assert bool(step.plan.tiles) == (tiling == "auto")
        assert step.measure(*batch).peak_bytes["device"] <= budget
    for whole, split in zip(*results, strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_bias_and_ignored_targets_are_summed_over_the_tiles(reduction: str) -> None:
    torch.manual_seed(0)
    model, batch = Classifier(reduction), classified()
    losses = []
    for tiling in TILINGS:
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3, foreach=False)
        budget = least_bytes(trained, batch, optimizer=sgd(trained), tile=tiling)
        step = zerofx.compile(trained, optimizer, backend="eager", memory_budget=budget, tile=tiling)
        losses.append([float(step(*batch)) for _ in range(3)])
    assert step.plan.tiles
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


class _WithLabels(nn.Module):
    """A model of transformers with a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=ids, labels=labels).loss
        return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the second casts logits of three dimensions
def test_a_llama_of_transformers_is_found(dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    ids = torch.randint(3, VOCAB, (2, 128))
    plain: nn.Module = transformers.LlamaForCausalLM(config)
    model, batch = _WithLabels(plain.to(dtype)), (ids, ids.clone())
    step = captured(model, *batch)
    assert [head.num_rows for head in find_heads(step)] == [256]
    in_tiles = tiled(captured(model, *batch), 2)
    near: dict[str, float] = {} if dtype == torch.float32 else {"rtol": 0.02, "share": 0.02}
    check_same_results(step, in_tiles, model, batch, **near)


@pytest.mark.parametrize("model", [Leaking(), Classifier("none"), Classifier(smoothing=0.1)])
def test_losses_that_are_more_than_the_sum_of_their_rows_are_left_alone(model: nn.Module) -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = self.inner(x, target).mean()
            return loss

    assert find_heads(captured(Scalar(), *classified())) == []


def test_a_budget_that_fits_otherwise_tiles_nothing() -> None:
    model, batch = gpt()
    made = planned(model, batch, least("none", True), optimizer=sgd(model))
    assert not made.tiles
    assert least("auto", True) < least("none", True)


def test_a_plan_that_tiles_survives_as_json_and_says_why() -> None:
    model, batch = gpt()
    made = planned(model, batch, least("auto", True), optimizer=sgd(model))
    assert Plan.from_json(made.to_json()) == made
    name = made.tiles[0].value
    assert "tiles: no plan with whole logits" in made.why(name) and "tiled: " in str(made)
    assert f"{name}: whole -> {made.tiles[0].num_tiles} tiles" in zerofx.plan(model, sgd(model), batch).plan.diff(made)


def test_a_plan_for_other_logits_is_refused() -> None:
    model, batch = gpt()
    with pytest.raises(PlanError, match="logits of this graph"):
        tile(captured(model, *batch), [TileDecision("mm_1", 4, 0, "asked")])


@pytest.mark.parametrize("num_tiles", [2, 3, 4])
def test_a_loss_in_bf16_is_summed_in_float32(num_tiles: int) -> None:
    model, batch = gpt(tied=False)
    whole = captured(model, *batch, precision=torch.bfloat16)
    assert tensor(whole.loss).dtype == torch.bfloat16
    check_same_results(whole, tiled(whole.clone(), num_tiles), model, batch, 2**-7, 2**-7, loss_rtol=2**-7)


def test_a_head_whose_backward_reads_what_is_brought_to_another_placement_there() -> None:
    model, batch = gpt(tied=False)
    given = Batch.from_call(batch, {})
    step = capture(model, given)
    simplify(step)
    feeds = feeds_of(step, model, given)
    (head,) = find_heads(step)
    (product,) = head.over_rows
    partition(step, (ShardingDecision(product.name, ("S1",), ("R", "S1")),), 2)
    (head,) = find_heads(step)
    assert head.late
    each = [{**feeds, "model_rank": torch.tensor([rank])} for rank in range(2)]
    expected = run(step.graph, each)
    tile(step, (TileDecision(head.product.name, 4, 0, "by hand"),))
    step.graph.lint()
    for values, others in zip(run(step.graph, each), expected, strict=True):
        torch.testing.assert_close(values, others)
