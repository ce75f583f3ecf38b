"""Reductions in few bits: in one hop, or within nodes and then across them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lib.graphs import Prepared, calls, order_of, prepare
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.op_kernels.quantise import BLOCK
from zerofx.ir.streams import axes_of
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.plan.decisions import WireDecision
from zerofx.scheduler.plan.mesh import Mesh


def wired(
    reduce: str = "int8", local: int = 2, buckets: tuple[int, ...] = (0, 1, 2), late: bool = True, **kwargs: object
) -> Prepared:
    """A step on four ranks, ``local`` to a node, whose buckets are reduced so.

    ``late``: each hop across nodes begins where the reduction was awaited, and is awaited where the next one was.
    """
    given = prepare(**{"num_ranks": 4, "block": BLOCK, **kwargs})  # type: ignore[arg-type]  # of ``prepare``
    waits = {decision.bucket: decision.wait_after for decision in given.plan.reduces}
    wires = tuple(
        WireDecision(index, "exact", False, reduce, "a test", waits[index] if late and local == 2 else None)
        for index in buckets
    )
    following = [*list(waits.values())[1:], None]
    reduces = given.plan.reduces
    if late:
        reduces = tuple(
            replace(decision, wait_after=place) if decision.bucket in buckets else decision
            for decision, place in zip(reduces, following, strict=True)
        )
    given.plan = replace(given.plan, wire=reduce, ranks_per_node=local, wires=wires, reduces=reduces)
    return given


@pytest.mark.parametrize("local", [2, 4])
def test_gradients_are_exchanged(local: int, golden: Callable[..., None]) -> None:
    golden(wired(local=local, buckets=(1,)).changes("quantise_reductions"))


@pytest.mark.parametrize("local", [1, 2, 4])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_all_rules_hold(local: int, late: bool, stage: int, num_micro_batches: int) -> None:
    prepared = wired("int4", local, late=late, stage=stage, num_micro_batches=num_micro_batches)
    prepared.run_pipeline()
    groups = [str(node.args[3]) for node in calls(prepared.step, ops.exchange)]
    assert sorted(groups) == (["across"] * 3 + ["node"] * 3 if local == 2 else ["all"] * 3)
    assert not calls(prepared.step, ops.reduce_scatter)


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_sums_cross_replicas_in_few_bits_where_each_updates_a_part(
    in_parts: bool, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    mesh = Mesh(replicate=2, shard=4)  # two nodes have a group of slices, as many its replicas
    prepared = wired(mesh=mesh, late=False, in_parts=in_parts, num_micro_batches=num_micro_batches)
    prepared.plan = replace(prepared.plan, max_grad_norm=max_grad_norm)
    prepared.run_pipeline()
    sent = sorted((str(node.args[3]), axes_of(node, mesh)) for node in calls(prepared.step, ops.exchange))
    crossing = [("all", ("replicate",))] * 3 if in_parts else []
    assert sent == sorted([("across", ("shard",))] * 3 + [("node", ("shard",))] * 3 + crossing)
    assert len(calls(prepared.step, ops.reduce_scatter_into)) == (0 if in_parts else 3)


def test_the_hop_across_nodes_runs_beside_the_next_unit() -> None:
    prepared = wired().run()
    order = order_of(prepared.step)
    beside_one = [order[name] for name in ("reduce_2", "mm_5", "reduce_across_2", "mm_7", "grad_2")]
    assert beside_one == sorted(beside_one)
    at_the_end = [order[name] for name in ("reduce_1", "mm_7", "reduce_across_1", "grad_1")]
    assert at_the_end == sorted(at_the_end)


def test_the_gradient_buffer_dies_with_its_quantisation() -> None:
    exact, small = (wired(buckets=buckets).run() for buckets in ((), (0, 1, 2)))
    for prepared, last in ((exact, "grad_1"), (small, "small_grads_1")):
        buffer = prepared.node("grads_1")
        assert liveness(prepared.step, on_cpu=True).last_use[buffer, 0].name == last


@pytest.mark.parametrize(
    ("prepared", "message"),
    [
        (lambda: wired("int2"), "reductions in int8 or int4 or fp8 .* found 'int2'"),
        (lambda: wired(stage=0), "at stage 0"),
        (lambda: wired(block=1), "whole blocks of 256"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(prepared: Callable[[], Prepared], message: str) -> None:
    found = prepared()
    with pytest.raises(PlanError, match=message):
        found.run()
