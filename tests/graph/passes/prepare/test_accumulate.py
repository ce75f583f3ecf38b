"""A step of several micro-batches is one graph: forward and backward of each, and gradients that add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import Averaging, Peeking, Prepared, Tied, TwoBlocks, calls, prepare, token_ids
from zerofx.codegen.regions import Region, cut
from zerofx.ir import ops
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Role, is_random, placeholder, value
from zerofx.scheduler.decide.activations import segments

aten = torch.ops.aten


class Dropping(nn.Module):
    """A linear layer between two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.dropout(self.linear(nn.functional.dropout(x, 0.5)), 0.5).sum()
        return found


def in_micro_batches(count: int, model: nn.Module | None = None, batch: tuple[Tensor, ...] | None = None) -> Prepared:
    return prepare(model, batch, num_micro_batches=count)


def test_the_unrolled_graph(golden: Callable[..., None]) -> None:
    golden(in_micro_batches(2, Averaging()).step.text())


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


def test_parts_keep_the_strides_of_the_batch() -> None:
    step = prepare(TwoBlocks(), (torch.randn(4, 2).t(),), num_micro_batches=2).step
    assert [value(node).stride() for node in step.placeholders(Role.INPUT)] == [(1, 2), (1, 2)]
