"""A step of several micro-batches is one graph: forward and backward of each, and gradients that add up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import Averaging, Peeking, Prepared, Tied, TwoBlocks, calls, number_values, prepare, token_ids
from zerofx.codegen.regions import Region, cut
from zerofx.ir import ops
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Role, is_random, placeholder, value
from zerofx.ir.micro_batches import calls_by_body, loop_bodies, loops_of, stretches
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.simulate import simulate
from zerofx.scheduler.decide.activations import segments
from zerofx.scheduler.plan.mesh import Mesh

aten = torch.ops.aten


class Dropping(nn.Module):
    """A linear layer between two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.dropout(self.linear(nn.functional.dropout(x, 0.5)), 0.5).sum()
        return found


class Swapping(nn.Module):
    """Two buffers that change places, of which one is read."""

    a: Tensor
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(before)
        found: Tensor = self.linear(x * self.a).sum()
        return found


def in_micro_batches(count: int, model: nn.Module | None = None, batch: tuple[Tensor, ...] | None = None) -> Prepared:
    return prepare(model, batch, num_micro_batches=count)


def test_the_unrolled_graph(golden: Callable[..., None]) -> None:
    golden(number_values(in_micro_batches(2, Averaging()).step.text()))


def test_one_micro_batch_is_the_captured_graph() -> None:
    assert in_micro_batches(1).step.text() == prepare().step.text()


def test_each_micro_batch_has_its_part_of_the_batch_and_gradients_of_its_own() -> None:
    step = in_micro_batches(3).step
    inputs = [placeholder(node) for node in step.placeholders(Role.INPUT)]
    assert [(what.name, what.part) for what in inputs] == [("batch[0]", 0), ("batch[0]", 1), ("batch[0]", 2)]
    shares = step.gradients_by_body
    assert len(shares) == step.num_micro_batches == 3
    assert all(share.keys() == step.gradients.keys() for share in shares)
    assert len({node for share in shares for node in share.values()}) == 3 * len(step.gradients)
    assert step.gradients == shares[-1]


def test_what_is_not_divided_is_read_by_all() -> None:
    class Weighted(TwoBlocks):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]  # a batch of another form
            return super().forward(x * weight)

    step = prepare(Weighted(), (torch.randn(2, 4), torch.randn(4)), num_micro_batches=2).step
    assert [(placeholder(n).name, placeholder(n).part) for n in step.placeholders(Role.INPUT)] == [
        ("batch[0]", 0), ("batch[1]", None), ("batch[0]", 1),
    ]  # fmt: skip


def test_random_operators_run_in_the_order_of_the_micro_batches() -> None:
    step = in_micro_batches(2, Dropping()).step
    drawn = [node.name for node in step.calls() if is_random(node)]
    assert len(drawn) == 4 and drawn[2:] == [f"micro1_{name}" for name in drawn[:2]]


def test_gradients_are_copied_once_and_then_added_to_one_buffer() -> None:
    prepared = in_micro_batches(3, Tied(), token_ids()).run("reduce")
    assert len(calls(prepared.step, ops.empty_gradients)) == len(prepared.layout.buckets)
    order = prepared.step.positions()
    for reduction in calls(prepared.step, ops.reduce_scatter):
        (buffer,) = reduction.all_input_nodes
        writes = [node for node in consumers(buffer) if node.target in (aten.copy_.default, aten.add_.Tensor)]
        writes.sort(key=order.__getitem__)
        bucket = next(b for b in prepared.layout.buckets if b.index == reduction.args[1])
        num = len(bucket.slots)
        assert [node.target for node in writes] == [aten.copy_.default] * num + [aten.add_.Tensor] * 2 * num
        assert order[writes[-1]] < order[reduction]


@pytest.mark.parametrize("model", [TwoBlocks, Averaging, Peeking])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_whole_pipeline_leaves_a_valid_graph(model: Callable[[], nn.Module], stage: int) -> None:
    prepare(model(), stage=stage, num_micro_batches=3).run_pipeline(verify=2)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", [TwoBlocks, Averaging])
def test_distinct_regions_do_not_grow_with_the_number(model: Callable[[], nn.Module], num_ranks: int) -> None:
    found = []
    for count in (3, 4, 6):  # the first micro-batch, the last, and those in between: three kinds at most
        prepared = prepare(model(), num_ranks=num_ranks, num_micro_batches=count).run()
        found.append(len({region.key for region in cut(prepared.step) if isinstance(region, Region)}))
    assert found == [found[0]] * 3


def test_each_micro_batch_has_segments_of_its_own_that_are_alike() -> None:
    parts = segments(in_micro_batches(2).step)
    assert [part.unit for part in parts] == ["layers.0", "layers.1"] * 2
    assert [part.key for part in parts[:2]] == [part.key for part in parts[2:]]


def test_a_model_that_ends_in_the_layer_it_begins_with_has_a_segment_for_each_micro_batch() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LayerNorm(4)])

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layers[0](x)
            return found.sum()

    assert [part.unit for part in segments(in_micro_batches(3, Whole()).step)] == ["layers.0"] * 3


def test_a_residency_may_last_from_one_micro_batch_to_the_next() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4, bias=False), nn.ModuleList([nn.Linear(4, 4, bias=False)])

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last[0](torch.relu(self.first(torch.relu(self.first(x))))).sum()
            return found

    reasons = [decision.reason for decision in in_micro_batches(2, Alone()).plan.gathers]
    assert any("kept from backward to the next micro-batch's forward" in reason for reason in reasons)


@pytest.mark.parametrize("count", [4, 7])
def test_of_more_than_three_micro_batches_the_second_body_is_a_loop(count: int) -> None:
    step = in_micro_batches(count, Averaging()).step
    (loop,) = loops_of(step)
    assert loop.num_rounds == count - 2
    assert step.num_bodies == len(step.gradients_by_body) == 3
    assert [(before.name, after.name) for before, after in loop.carries] == [
        (step_loss, sum_of_losses) for step_loss, sum_of_losses in [("div", "add_tensor"), ("lerp", "micro1_lerp")]
    ]
    assert len(list(step.calls())) == len(list(in_micro_batches(3, Averaging()).step.calls()))
    assert not loops_of(in_micro_batches(3).step)


def test_what_a_loop_hands_on_is_made_in_each_round() -> None:
    step = prepare(Swapping(), (torch.randn(2, 4),), num_micro_batches=4).step
    (loop,) = loops_of(step)
    assert len(loop.carries) == 3
    inside = loop.body()
    assert all(before not in inside and after in inside for before, after in loop.carries)


def test_a_loop_is_planned_as_long_as_its_rounds() -> None:
    machine, numbers = Machine.named("cpu"), (4, 5, 12)
    simulations = [simulate(in_micro_batches(n).run().step, machine, Mesh(shard=2), on_cpu=True) for n in numbers]

    def grows_with_the_rounds(values: Sequence[float]) -> None:
        four, five, twelve = values
        assert twelve - four == pytest.approx(8 * (five - four)) and five > four

    grows_with_the_rounds([one.step_seconds for one in simulations])
    grows_with_the_rounds([one.exposed_seconds for one in simulations])
    grows_with_the_rounds([one.wire_bytes for one in simulations])
    grows_with_the_rounds([one.flops for one in simulations])
    grows_with_the_rounds([one.live.persistent_bytes for one in simulations])  # each has its part of the batch
    assert len({one.live.peak_bytes - one.live.persistent_bytes for one in simulations}) == 1


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_no_residency_reaches_out_of_a_round_but_what_stays_throughout(prefetch: int) -> None:
    prepared = prepare(num_micro_batches=5, prefetch=prefetch)
    bodies = loop_bodies(prepared.step)
    assert all(bodies[g.issue] == bodies[g.first] == bodies[g.last] for g in prepared.plan.gathers)
    kept = prepare(num_micro_batches=5, keep="all").plan.gathers
    assert {(bodies[g.first], bodies[g.last]) for g in kept} == {(0, 2)}
    prepared.run_pipeline(verify=2)


def test_parts_keep_the_strides_of_the_batch() -> None:
    step = prepare(TwoBlocks(), (torch.randn(4, 2).t(),), num_micro_batches=2).step
    assert [value(node).stride() for node in step.placeholders(Role.INPUT)] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_layer_by_layer_all_micro_batches_run_through_a_layer_before_the_next(count: int) -> None:
    step = prepare(num_micro_batches=count, by_layer=True).step
    places = [(step.unit_of(node), body) for node, body in calls_by_body(step) if node.target is aten.mm.default]
    runs = [place for place, _ in itertools.groupby(places)]
    bodies = range(step.num_bodies)
    assert runs[: 2 * len(bodies)] == [(unit, body) for unit in ("layers.0", "layers.1") for body in bodies]
    names = {node.name for node in in_micro_batches(count).step.calls() if node.target is not ops.next_micro_batch}
    assert names <= {node.name for node in step.calls()}, "plans name the nodes of both orders alike"


def test_layer_by_layer_each_layer_has_a_loop() -> None:
    step = prepare(num_micro_batches=6, by_layer=True).step
    loops, numbers = loops_of(step), stretches(step)
    assert len(loops) == len(set(numbers.values())) > 2 and {loop.num_rounds for loop in loops} == {4}
    assert [loop.carries for loop in loops if loop.carries], "the loss is handed on from round to round"


def test_layers_between_which_a_buffer_is_changed_are_not_parted() -> None:
    step = prepare(Swapping(), (torch.randn(2, 4),), num_micro_batches=4, by_layer=True).step
    assert len(loops_of(step)) == 1


def test_layer_by_layer_draws_are_made_ahead_for_each_micro_batch_but_the_last() -> None:
    step = prepare(Dropping(), (torch.randn(2, 4),), num_micro_batches=3, by_layer=True).step
    drawn = [(node.target, body) for node, body in calls_by_body(step) if is_random(node)]
    ahead, after = drawn[:4], drawn[4:]
    assert [body for _, body in ahead] == [0, 0, 1, 1] and len(after) == 2 * 3
    kept = [node for node in step.calls() if node.target is ops.keep_draws]
    taken = [node for node in step.calls() if node.target is ops.take_draws]
    assert len(kept) == 3 + len(taken) and kept[0].args == (True,) and not any(node.args[0] for node in kept[1:])
