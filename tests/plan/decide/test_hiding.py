"""Collectives overlap with computation wherever a budget has room for them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.lib import graphs
from tests.lib.graphs import prepare, sgd
from zerofx.driver.plan_only import PlannedStep
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.passes.verify import verify
from zerofx.pipeline import run_quietly
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.simulate import Simulation, simulate
from zerofx.scheduler.decide.overlap import await_later, hide_collectives
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError

DIM, CLASSES, ROWS, RANKS = 32, 256, 8, 4
NO_LIMIT = 1 << 40


class Classifier(nn.Module):
    """Layers of two widths, and an output layer larger than any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, DIM)) for width in (16, 64, 16, 64)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return torch.logsumexp(self.head(x), 1).mean()


ONE_AXIS, REPLICAS = Mesh(shard=RANKS), Mesh(replicate=2, shard=2)


@cache
def prepared(stage: int, mesh: Mesh = ONE_AXIS) -> graphs.Prepared:
    model = Classifier()
    return prepare(model, (torch.randn(ROWS, DIM),), stage=stage, mesh=mesh, optimizer=sgd(model))


def planned(options: PolicyOptions, stage: int = 3, mesh: Mesh = ONE_AXIS) -> Plan:
    one = prepared(stage, mesh)
    return decide(one.step, one.layout, undecided(one.step, one.layout, stage, None, "cpu"), options)


def simulated(plan: Plan) -> tuple[StepGraph, BucketLayout, Simulation]:
    """What ``plan`` leads to: the graph after all passes, its buckets, and its run on paper."""
    one = prepared(plan.stage, plan.mesh)
    step = one.step.clone()
    run_quietly(step, plan, one.layout, one.programs, graphs.settings())
    verify(step, "prefetch", plan)
    return step, one.layout, simulate(step, Machine.named("cpu"), plan.mesh, on_cpu=True)


@cache
def hidden(limit_bytes: int, stage: int = 3, mesh: Mesh = ONE_AXIS) -> Plan:
    plan = planned(PolicyOptions(0, hide_reductions=False), stage, mesh)
    return hide_collectives(plan, *simulated(plan), prefetch=1, limit_bytes=limit_bytes)


@cache
def peak_of(plan: Plan) -> int:
    return simulated(plan)[2].live.peak_bytes


stages = pytest.mark.parametrize("stage", [0, 3])
meshes = pytest.mark.parametrize("mesh", [ONE_AXIS, REPLICAS], ids=str)


@stages
@meshes
def test_with_room_for_all_it_is_the_plan_that_hides_all(mesh: Mesh, stage: int) -> None:
    assert hidden(NO_LIMIT, stage, mesh) == planned(PolicyOptions(1), stage, mesh)


@pytest.mark.sweep(2)
@stages
@meshes
def test_what_is_hidden_keeps_within_the_limit_and_less_room_never_leads_to_a_higher_peak(
    mesh: Mesh, stage: int
) -> None:
    options = PolicyOptions(0, hide_reductions=False), PolicyOptions(1)
    least, most = (peak_of(planned(one, stage, mesh)) for one in options)
    assert least < most
    peaks = []
    for limit in range(least, most + 1, (most - least) // 16):
        peaks.append(peak_of(hidden(limit, stage, mesh)))
        assert peaks[-1] <= limit
    assert peaks == sorted(peaks) and len(set(peaks)) > 1


def test_at_the_least_peak_collectives_are_hidden_where_there_is_room() -> None:
    all_exposed = planned(PolicyOptions(0, hide_reductions=False))
    found = hidden(peak_of(all_exposed))
    ahead = [gather.issue != gather.first for gather in found.gathers]
    behind = [now.wait_after != then.wait_after for now, then in zip(found.reduces, all_exposed.reduces, strict=True)]
    assert any(ahead) and not all(ahead[1:])
    assert any(behind) and not all(behind)
    assert simulated(found)[2].exposed_seconds < simulated(all_exposed)[2].exposed_seconds


def test_at_stage_0_the_sum_is_gathered_until_the_next_reduction_is_awaited() -> None:
    plan = planned(PolicyOptions(1), 0)
    following = [reduce.wait_after for reduce in plan.reduces[1:]]
    assert [reduce.gathered_after for reduce in plan.reduces] == [*following, ""]
    step, _, found = simulated(plan)
    order = step.positions()
    by_name = {node.name: node for node in order}
    for one, other in itertools.pairwise(plan.reduces):
        started, awaited = by_name[f"gather_grad_{one.bucket}"], by_name[f"full_grad_{one.bucket}"]
        assert order[started] < order[by_name[f"gather_grad_{other.bucket}"]] < order[awaited]
        assert order[awaited] < order[by_name[f"full_grad_{other.bucket}"]]
    at_once = simulated(replace(plan, reduces=tuple(replace(one, gathered_after="") for one in plan.reduces)))[2]
    assert found.exposed_seconds < at_once.exposed_seconds


def test_what_is_reduced_in_each_micro_batch_still_is_where_it_is_hidden() -> None:
    at_once = [replace(one, earlier=("here",)) for one in planned(PolicyOptions(0, hide_reductions=False)).reduces]
    assert all(late.earlier == ("here",) for late in await_later(at_once, prepared(3).layout))


def test_every_collective_that_is_not_hidden_says_why() -> None:
    for reduce in planned(PolicyOptions(0, hide_reductions=False)).reduces:
        assert "no room" in reduce.reason
    assert all("to overlap with" in gather.reason for gather in hidden(NO_LIMIT).gathers[1:])


def plan_at(stage: int, budget: int | None, **options: object) -> PlannedStep:
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = (torch.randn(ROWS, DIM),)
    return zerofx.plan(
        model, optimizer, batch, stage, world_size=RANKS, machine="cpu", memory_budget=budget, backend="eager",
        tile="none", **options,  # type: ignore[arg-type]  # options of zerofx.plan
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_budget_has_reductions_awaited_at_once_before_matrix_products_run_again(stage: int) -> None:
    asked = plan_at(stage, None).plan
    found = plan_at(stage, asked.peak_bytes["device"] - 1, recompute="none").plan
    assert found.peak_bytes["device"] < asked.peak_bytes["device"]
    assert not found.recomputes and found.reduces != asked.reduces
    assert replace(found, gathers=(), reduces=(), memory_budget=None) == replace(asked, gathers=(), reduces=())


class Wide(nn.Module):
    """Large at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(128, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.inner(self.embed(x)).tanh()).square().mean()
        return loss


@pytest.mark.days(3)
def test_one_rank_that_updates_where_gradients_are_complete_has_no_reductions_to_hide() -> None:
    model = Wide()
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), (torch.zeros(4, dtype=torch.long),)
    with pytest.raises(BudgetMissedError) as missed:
        zerofx.plan(model, optimizer, batch, machine="cpu", backend="eager", offload="host", memory_budget=1)
    least = missed.value.least_bytes
    planned = zerofx.plan(model, optimizer, batch, machine="cpu", backend="eager", offload="host", memory_budget=least)
    assert planned.plan.slices and planned.plan.peak_bytes["device"] == least
