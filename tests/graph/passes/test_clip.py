"""Gradients are clipped by the norm of all of them, after the last reduction and in front of every update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.lib.graphs import Prepared, calls, prepare
from tests.lib.plans import delaying, placed
from zerofx.errors import InvalidGraphError, PlanError
from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.ir.streams import runs_on_host
from zerofx.passes.lib.norm_check import check_norm
from zerofx.passes.verify import verify
from zerofx.scheduler.plan.mesh import Mesh

aten = torch.ops.aten


def clipping(prepared: Prepared, max_grad_norm: float = 1.0) -> Prepared:
    prepared.plan = replace(prepared.plan, max_grad_norm=max_grad_norm)
    return prepared


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 2), (3, 2), (3, 1)])
def test_the_norm_is_taken_of_slices(golden: Callable[..., None], stage: int, num_ranks: int) -> None:
    golden(clipping(prepare(stage=stage, num_ranks=num_ranks)).changes("clip"))


def test_updates_begin_with_the_factor(golden: Callable[..., None]) -> None:
    golden(clipping(prepare(stage=2, precision="bf16")).changes("update"))


@pytest.mark.parametrize(("tier", "update"), [("host", "host"), ("nvme", "device")])
def test_states_come_up_one_after_the_other(golden: Callable[..., None], tier: str, update: str) -> None:
    golden(clipping(placed(tier, update)).changes("update"))


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (2, "bf16"), (3, None)])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("tier", "update"), [("host", "host"), ("nvme", "device")])
def test_what_the_passes_leave_is_accepted(
    tier: str, update: str, num_ranks: int, stage: int, precision: str | None
) -> None:
    prepared = clipping(placed(tier, update, stage, num_ranks, precision))
    prepared.run_pipeline()
    step = prepared.step
    order = step.positions()
    (factor,) = calls(step, aten.clamp.default)
    scaled = [node for node in calls(step, aten.mul_.Tensor) if node.args[1] in (factor, *_copies(prepared))]
    assert len(scaled) == len(prepared.plan.reduces)
    assert {runs_on_host(node) for node in scaled} == {update == "host"}
    assert all(order[factor] < order[node] for node in scaled)
    backward = [node for node in step.calls() if origin(node).phase is Phase.BACKWARD]
    assert max(order[node] for node in (*backward, *calls(step, ops.square_sum))) < order[factor]


def _copies(prepared: Prepared) -> list[object]:
    return [node for node in prepared.step.calls() if node.name == "clip_down"]


def test_an_update_before_the_factor_is_refused() -> None:
    prepared = clipping(prepare()).run()
    verify(prepared.step, "all", prepared.plan)
    written = calls(prepared.step, aten.add_.Tensor)[0]
    calls(prepared.step, aten.cat.default)[0].prepend(written)
    written.kwargs = {}
    with pytest.raises(InvalidGraphError, match=r"clipping: add__tensor writes shard_2"):
        verify(prepared.step, "mine")


def test_a_step_that_clips_is_refused_for_a_plan_that_does_not() -> None:
    prepared = clipping(prepare()).run()
    with pytest.raises(InvalidGraphError, match="plan: the graph sums squares of gradients"):
        verify(prepared.step, "all", replace(prepared.plan, max_grad_norm=None))


def test_delayed_updates_are_refused() -> None:
    with pytest.raises(PlanError, match="expected no delayed updates together with max_grad_norm"):
        clipping(delaying(3)).run()


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", [Mesh(shard=2, model=2), Mesh(2, 2, 2)], ids=str)
def test_gradients_count_once_on_every_mesh(mesh: Mesh, stage: int, num_micro_batches: int) -> None:
    prepared = clipping(prepare(stage=stage, mesh=mesh, num_micro_batches=num_micro_batches))
    prepared.run_pipeline()
    assert calls(prepared.step, ops.square_sum)
    check_norm(prepared.step, prepared.layout)


def test_a_norm_that_counts_what_all_ranks_have_several_times_is_told() -> None:
    prepared = clipping(prepare(stage=3, mesh=Mesh(shard=2, model=2)))
    prepared.run_pipeline()
    reduction = calls(prepared.step, ops.reduce_scatter)[0]
    assert reduction.kwargs == {"over": "shard,model"}
    reduction.kwargs = {"over": "shard"}
    with pytest.raises(InvalidGraphError, match="cut along shard, where ranks along model, shard have them"):
        check_norm(prepared.step, prepared.layout)


def test_a_norm_of_gathered_gradients_is_told() -> None:
    prepared = clipping(prepare(stage=0, mesh=Mesh(model=2)))
    prepared.run_pipeline()
    squares = calls(prepared.step, ops.square_sum)[0]
    (gather,) = (node for node in calls(prepared.step, ops.all_gather_into) if node.args[1] is squares.args[0])
    (wait,) = gather.users
    squares.update_arg(0, wait)
    with pytest.raises(InvalidGraphError, match="cut along no axis, where ranks along model have them"):
        check_norm(prepared.step, prepared.layout)
