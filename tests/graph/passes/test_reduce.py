"""Gradients go into flat buffers, which are reduced as soon as they are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.lib.graphs import Normed, Prepared, Shifts, Tied, TwoBlocks, calls, prepare, token_ids
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import consumers
from zerofx.ir.facts import tensor

aten = torch.ops.aten


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_become_reductions(stage: int, golden: Callable[..., None]) -> None:
    golden(prepare(stage=stage).changes("reduce"))


@pytest.mark.parametrize("model", [TwoBlocks, Normed, Shifts])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_bucket_is_reduced_once_after_its_last_gradient(model: type[nn.Module], stage: int) -> None:
    prepared = prepare(model(), stage=stage).run("reduce")
    order = prepared.step.positions()
    reductions = calls(prepared.step, ops.reduce_scatter_into if stage == 0 else ops.reduce_scatter)
    assert sorted(str(node.args[1]) for node in reductions) == sorted(
        str(bucket.index) for bucket in prepared.layout.buckets
    )
    for reduction in reductions:
        (buffer,) = reduction.all_input_nodes
        writes = [node for node in consumers(buffer) if node.target is aten.copy_.default]
        bucket = next(b for b in prepared.layout.buckets if b.index == reduction.args[1])
        assert len(writes) == len(bucket.slots)
        assert max(order[write] for write in writes) < order[reduction]


def test_a_buffer_lives_until_its_reduction_is_awaited() -> None:
    prepared = prepare().run("reduce")
    for reduction in calls(prepared.step, ops.reduce_scatter):
        (wait,) = reduction.users
        assert wait.args == (reduction, reduction.args[0])


def test_the_sum_is_divided_once_by_the_number_of_ranks() -> None:
    prepared = prepare(num_ranks=3).run("reduce")
    divisions = calls(prepared.step, aten.div_.Tensor)
    assert [node.args[1] for node in divisions] == [3, 3, 3]
    assert all(tensor(node).numel() == prepared.layout.buckets[0].shard_numel for node in divisions)


def test_on_one_rank_the_buffer_is_the_gradient() -> None:
    prepared = prepare(num_ranks=1).run("reduce")
    assert not calls(prepared.step, ops.reduce_scatter) and not calls(prepared.step, aten.div_.Tensor)
    assert {node.target for node in prepared.step.reduced.values()} == {ops.empty_gradients}


def test_at_stage_0_reduced_slices_are_gathered_to_whole_gradients() -> None:
    prepared = prepare(stage=0).run("reduce")
    gathers = calls(prepared.step, ops.all_gather_into)
    assert len(gathers) == len(prepared.layout.buckets) and not calls(prepared.step, ops.all_gather)
    assert {storage_source(gather)[0].target for gather in gathers} == {ops.empty_gradients}, "in the same buffer"
    assert {
        index: tensor(node).numel() == prepared.layout.buckets[index].numel
        for index, node in prepared.step.reduced.items()
    } == dict.fromkeys(range(3), True)


def test_a_frozen_bucket_is_not_reduced() -> None:
    model = TwoBlocks()
    model.layers[0].requires_grad_(False)
    prepared = prepare(model).run("reduce")
    frozen = [bucket.index for bucket in prepared.layout.buckets if not bucket.trainable]
    assert len(frozen) == 1
    assert sorted(prepared.step.reduced) == [b.index for b in prepared.layout.buckets if b.trainable]
    assert frozen[0] not in [node.args[1] for node in calls(prepared.step, ops.reduce_scatter)]


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


def test_a_reduction_is_awaited_where_the_next_bucket_is_complete() -> None:
    prepared = prepare().run("reduce")
    order = prepared.step.positions()
    started = {node.args[1]: order[node] for node in calls(prepared.step, ops.reduce_scatter)}
    awaited = {index: order[node] for index, node in prepared.step.reduced.items()}
    assert started[2] < started[1] < awaited[2] < started[0] < awaited[1] < awaited[0]


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


def test_an_output_layers_weight_is_released_before_its_gradient_is_made() -> None:
    prepared = prepare(Classifier(), (torch.randn(4, 8),)).run("reduce")
    released, made, reduced = _places_of_the_head(prepared)
    assert released < made < reduced


class RootMeanSquare(nn.Module):
    """A norm of several operators, which hold more in turn than they hold at once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def test_a_norm_of_several_operators_does_not_hold_an_output_layers_weight_beside_its_gradient() -> None:
    model = Classifier()
    model.norm = RootMeanSquare(8)
    prepared = prepare(model, (torch.randn(20, 8),)).run("reduce")
    released, made, reduced = _places_of_the_head(prepared)
    assert released < made < reduced


def test_where_a_run_holds_much_more_an_output_layers_gradient_is_made_before_it() -> None:
    model = Classifier()
    model.norm = RootMeanSquare(8)
    prepared = prepare(model, (torch.randn(400, 8),)).run("reduce")
    released, made, _ = _places_of_the_head(prepared)
    assert made < released
