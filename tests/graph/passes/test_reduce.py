"""Gradients go into flat buffers, which are reduced as soon as they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.lib.graphs import Normed, Prepared, Shifts, Tied, calls, prepare, token_ids
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.facts import tensor
from zerofx.ir.micro_batches import borders
from zerofx.scheduler.cost.liveness import liveness

aten = torch.ops.aten


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_become_reductions(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage).changes("reduce"))


def test_gradients_of_each_micro_batch_become_reductions(golden: Callable[..., None]) -> None:
    golden(in_each(prepare(num_micro_batches=2, precision="bf16"), 2).changes("reduce"))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_stays_of_each_micro_batch_is_a_slice(count: int) -> None:
    prepared = in_each(prepare(num_micro_batches=count, prefetch=0), count)
    prepared.run_pipeline(verify=2)
    live = liveness(prepared.step, on_cpu=False)
    for border in borders(prepared.step):
        slices = sum(bucket.shard_numel * 4 for bucket in prepared.layout.buckets if bucket.trainable)
        others = sum(tensor(node).nbytes for node in (prepared.step.loss,))
        assert live.after[border.prev] == live.persistent_bytes + slices + others


def in_each(prepared: Prepared, count: int) -> Prepared:
    """The same with each bucket's gradients reduced in each micro-batch."""
    plan, num_earlier = prepared.plan, min(count, 3) - 1
    reduces = tuple(replace(decision, earlier=(None,) * num_earlier) for decision in plan.reduces)
    return replace(prepared, plan=replace(plan, reduces=reduces))


@pytest.mark.parametrize(("stage", "num_earlier"), [(0, 1), (3, 2)])
def test_what_cannot_be_reduced_in_each_micro_batch_is_refused(stage: int, num_earlier: int) -> None:
    prepared = prepare(num_micro_batches=2, stage=stage)
    with pytest.raises(PlanError, match="to be reduced in each of 2 bodies of micro-batches at stages 1 to 3"):
        in_each(prepared, num_earlier + 1).run("reduce")


def test_on_one_rank_the_buffer_is_the_gradient() -> None:
    prepared = prepare(num_ranks=1).run("reduce")
    assert not calls(prepared.step, ops.reduce_scatter) and not calls(prepared.step, aten.div_.Tensor)
    assert {node.target for node in prepared.step.reduced.values()} == {ops.empty_gradients}


def test_gradients_that_are_outputs_of_one_operator_are_written_behind_it() -> None:
    prepared = prepare(Normed()).run("reduce")
    for copy in calls(prepared.step, aten.copy_.default):
        gradient = copy.args[1]
        assert isinstance(gradient, torch.fx.Node)
        assert gradient.target is not aten.native_layer_norm_backward.default
    prepared.step.graph.lint()


def test_buckets_that_complete_at_one_node_are_all_reduced_behind_it() -> None:
    prepared = prepare(Shifts()).run("reduce")
    copies = calls(prepared.step, aten.copy_.default)
    assert len({copy.args[1] for copy in copies}) == 1, "the test means one gradient for all"
    last = max(prepared.step.positions()[copy] for copy in copies)
    order = prepared.step.positions()
    assert all(order[node] > last for node in calls(prepared.step, ops.reduce_scatter))
    assert Counter(node.target for node in prepared.step.reduced.values()) == {ops.wait: 3}


def test_a_tied_weights_gradients_are_summed_before_they_are_reduced() -> None:
    prepared = prepare(Tied(), token_ids()).run("reduce")
    (written,) = [
        copy.args[1]
        for copy in calls(prepared.step, aten.copy_.default)
        if isinstance(copy.args[1], torch.fx.Node) and list(tensor(copy.args[1]).shape) == [5, 4]
    ]
    assert isinstance(written, torch.fx.Node) and written.target is aten.add.Tensor


class Classifier(nn.Module):
    """A layer, and a norm and an output layer in one bucket after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.norm: nn.Module = nn.LayerNorm(8)
        self.head = nn.Linear(8, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.logsumexp(self.head(self.norm(x)), 1).mean()


def _places_of_the_head(prepared: Prepared) -> tuple[int, int, int]:
    """Where the output layer's weight is released first, and its gradient buffer is made and reduced."""
    names = [node.name for node in prepared.step.calls()]
    (bucket,) = [b for b in prepared.layout.buckets if any(slot.name == "head.weight" for slot in b.slots)]
    residency = next(n for n, gather in enumerate(prepared.plan.gathers) if gather.bucket == bucket.index)
    (release,) = [n for n in calls(prepared.step, ops.release) if n.all_input_nodes[0].name == f"full_{residency}"]
    return names.index(release.name), names.index(f"grads_{bucket.index}"), names.index(f"reduce_{bucket.index}")


class RootMeanSquare(nn.Module):
    """A norm of several operators, which hold more in turn than they hold at once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@pytest.mark.parametrize(
    ("norm", "num_rows", "released_first"),
    [(nn.LayerNorm, 4, True), (RootMeanSquare, 20, True), (RootMeanSquare, 400, False)],
)
def test_an_output_layers_weight_is_released_before_its_gradient_is_made_unless_a_run_holds_much_more(
    norm: Callable[[int], nn.Module], num_rows: int, released_first: bool
) -> None:
    model = Classifier()
    model.norm = norm(8)
    released, made, reduced = _places_of_the_head(prepare(model, (torch.randn(num_rows, 8),)).run("reduce"))
    assert (released < made) is released_first and made < reduced
