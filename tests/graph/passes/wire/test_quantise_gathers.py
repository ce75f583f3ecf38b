"""Gathers in 8 bits, and second shards that later gathers begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.lib.graphs import DIM, ROWS, Prepared, TwoBlocks, calls, order_of
from tests.lib.plans import wired
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.passes.verify import verify
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.plan.decisions import Absence


@pytest.mark.parametrize("second_shard", [False, True])
def test_gathers_send_bytes(second_shard: bool, golden: Callable[..., None]) -> None:
    golden(wired(second_shard=second_shard, buckets=(1,)).changes("quantise_gathers"))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
@pytest.mark.parametrize("second_shard", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_all_rules_hold(prefetch: int, second_shard: bool, num_micro_batches: int) -> None:
    prepared = wired(second_shard=second_shard, prefetch=prefetch, num_micro_batches=num_micro_batches)
    prepared.run_pipeline()
    gathers = [decision.bucket for decision in prepared.plan.gathers]
    across = [str(node.args[1]) for node in calls(prepared.step, ops.all_gather)]
    assert sorted(across) == [str(bucket) for bucket in sorted(set(gathers) if second_shard else gathers)]


def test_a_gather_that_was_issued_before_the_second_shard_is_there_comes_behind_it() -> None:
    prepared = wired(prefetch=8)
    prepared.run_pipeline()
    order = order_of(prepared.step)
    for gather in calls(prepared.step, ops.gather_on_node):
        (second,) = gather.all_input_nodes
        assert order[second.name] < order[gather.name]


def test_bytes_of_second_shards_and_of_what_is_packed_are_counted() -> None:
    without = wired(gather="exact", second_shard=False).run()
    second = wired(gather="exact", second_shard=True).run()
    sizes = liveness(second.step, on_cpu=True).sizes
    made = calls(second.step, ops.second_shard)
    whole = second.layout.buckets[0].full_bytes
    assert [(node.args[1], sizes[node, 0]) for node in made] == [(1, whole // 2)]
    between = [liveness(one.step, on_cpu=True).after[one.node("relu_1")] for one in (without, second)]
    assert between[1] == between[0] + whole // 2
    small = wired(second_shard=False).run()
    packed = calls(small.step, ops.quantise)[0]
    assert liveness(small.step, on_cpu=True).sizes[packed, 0] == small.layout.buckets[0].shard_numel * (1 + 4 / BLOCK)


class Whole(TwoBlocks):
    """Two blocks and whole numbers that forward adds."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.ones(ROWS, DIM, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offsets)


@pytest.mark.parametrize(
    ("prepared", "message"),
    [
        (lambda: wired(block=1), "whole blocks of 256"),
        (lambda: wired("int4"), "gathers in int8 or fp8 .* found 'int4'"),
        (lambda: wired(model=Whole()), "torch.int32.*only floating-point"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(prepared: Callable[[], Prepared], message: str) -> None:
    found = prepared()
    with pytest.raises(PlanError, match=message):
        found.run()


def test_second_shards_need_nodes_and_slices_on_the_device() -> None:
    one_node = wired()
    one_node.plan = replace(one_node.plan, ranks_per_node=4)
    away = wired()
    away.plan = away.plan.replace_absences(
        parameters=(Absence(kind="parameters", bucket=1, tier="host", reason="a test"),)
    )
    for prepared, found in ((one_node, "on 1 node"), (away, "from host on 2 node")):
        with pytest.raises(PlanError, match=f"expected a second shard on several nodes.*{found}"):
            prepared.run()


def test_the_verifier_compares_with_the_plan() -> None:
    prepared = wired().run()
    verify(prepared.step, "quantise_gathers", prepared.plan)
    more = (*prepared.plan.wires[:-1], replace(prepared.plan.wires[-1], reduce="int8"))
    with pytest.raises(InvalidGraphError, match=r"plan: the graph sends .* the plan says"):
        verify(prepared.step, "quantise_gathers", replace(prepared.plan, wires=more))
