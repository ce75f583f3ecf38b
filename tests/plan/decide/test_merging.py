"""Gathers are merged where latency says so, and no farther than memory allows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from tests.lib import graphs
from tests.lib.graphs import prepare, sgd
from tests.lib.plans import delaying as with_delayed_updates
from zerofx.ir.graph import StepGraph
from zerofx.passes.verify import verify
from zerofx.pipeline import run_quietly
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.simulate import Simulation, simulate
from zerofx.scheduler.cost.transfers import collective_latency, collective_seconds
from zerofx.scheduler.decide.coalesce import merge_gathers
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan

DIM, ROWS, RANKS = 32, 64, 4
SMALL = (DIM,) * 6
NO_LIMIT = 1 << 40
SLOW, FAST = 1e-2, 0.0


class Stack(nn.Module):
    """Layers whose widths are those given: that much is gathered, and computed, in each."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, width), nn.Tanh(), nn.Linear(width, DIM)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def machine(latency: float, bandwidth: float = 1e9) -> Machine:
    """The CPU's row with another link between all ranks."""
    link = Link(bandwidth, latency)
    return replace(Machine.named("cpu"), name="far-away", ranks_per_node=64, intra_node=link, inter_node=link)


@cache
def prepared(widths: tuple[int, ...], keep: bool = False) -> graphs.Prepared:
    model = Stack(widths)
    batch = (torch.randn(ROWS, DIM),)
    return prepare(model, batch, stage=3, num_ranks=RANKS, keep="all" if keep else (), optimizer=sgd(model))


def carried_out(one: graphs.Prepared, plan: Plan) -> StepGraph:
    step = one.step.clone()
    run_quietly(step, plan, one.layout, one.programs, graphs.settings())
    verify(step, "merge", plan)
    return step


@cache
def plainly(widths: tuple[int, ...], keep: bool) -> StepGraph:
    one = prepared(widths, keep)
    return carried_out(one, one.plan)


@dataclass(frozen=True)
class Merged:
    plan: Plan
    plain: Simulation
    merged: Simulation

    @property
    def num_merged(self) -> int:
        return sum(gather.merged for gather in self.plan.gathers)

    @property
    def groups(self) -> list[list[str]]:
        """The buckets that are gathered together, for each collective that is for several."""
        names = [bucket.name for bucket in self.plan.buckets]
        launches = [[names[self.plan.gathers[number].bucket] for number in launch] for launch in self.plan.launches]
        return [launch for launch in launches if len(launch) > 1]


def merge(link: Machine, limit: int = NO_LIMIT, widths: tuple[int, ...] = SMALL, keep: bool = False) -> Merged:
    one = prepared(widths, keep)
    step = plainly(widths, keep)
    plain = simulate(step, link, Mesh(shard=RANKS), on_cpu=True)
    plan = merge_gathers(one.plan, step, one.layout, plain, link, limit)
    return Merged(plan, plain, simulate(carried_out(one, plan), link, Mesh(shard=RANKS), on_cpu=True))


def test_where_latency_dominates_gathers_are_merged_and_the_step_is_shorter() -> None:
    found = merge(machine(SLOW))
    latency = collective_latency("all_gather", RANKS, machine(SLOW))
    assert found.num_merged > len(found.plan.gathers) / 2
    # All that computation and bytes take is nothing beside a latency: each one that is saved is saved in full.
    assert found.plain.step_seconds - found.merged.step_seconds == pytest.approx(found.num_merged * latency, rel=0.01)
    assert all("; started as one collective with layers." in g.reason for g in found.plan.gathers if g.merged)


def test_not_a_byte_more_is_sent_nor_held_in_the_end() -> None:
    found = merge(machine(SLOW))
    assert found.merged.wire_bytes == found.plain.wire_bytes
    gathers = [(gather.bucket, gather.first, gather.last) for gather in found.plan.gathers]
    assert gathers == [(gather.bucket, gather.first, gather.last) for gather in prepared(SMALL).plan.gathers]


def test_where_latency_is_short_nothing_is_merged() -> None:
    link = machine(FAST)
    assert merge(link).plan == prepared(SMALL).plan
    assert merge(machine(1e-9)).plan == prepared(SMALL).plan


def test_only_what_latency_dominates_is_merged() -> None:
    wide = 1024
    num_bytes = 4 * (2 * DIM * wide + wide + DIM)
    transfer = collective_seconds("all_gather", num_bytes, RANKS, machine(0.0))
    found = merge(machine(transfer / 10 / (RANKS - 1)), widths=(DIM, DIM, DIM, wide, wide, wide, DIM, DIM, DIM))
    assert found.groups
    big = {"layers.3", "layers.4", "layers.5"}
    assert all(len(big & set(group)) <= 1 for group in found.groups)


def test_a_group_has_no_bucket_twice() -> None:
    for keep in (False, True):
        groups = merge(machine(SLOW), keep=keep).groups
        assert groups and all(len(set(group)) == len(group) for group in groups)


def test_buckets_that_are_kept_are_gathered_in_one_go() -> None:
    assert merge(machine(SLOW), keep=True).groups == [[f"layers.{number}" for number in range(len(SMALL))]]


def test_a_limit_that_is_full_lets_nothing_be_held_for_longer() -> None:
    assert merge(machine(SLOW), limit=0).num_merged == 0
    least = min(merge(machine(SLOW)).plain.live.during.values())
    assert merge(machine(SLOW), limit=least).num_merged == 0


def test_a_smaller_limit_never_leads_to_a_higher_peak() -> None:
    without = merge(machine(SLOW))
    plain, most = without.plain.live.peak_bytes, without.merged.live.peak_bytes
    assert plain < most
    limits = [plain + (most - plain) * part // 6 for part in range(7)]
    found = [merge(machine(SLOW), limit) for limit in limits]
    for limit, one in zip(limits, found, strict=True):
        assert one.merged.live.peak_bytes <= limit
    for tighter, wider in itertools.pairwise(found):
        assert tighter.merged.live.peak_bytes <= wider.merged.live.peak_bytes
        assert tighter.num_merged <= wider.num_merged
    # Where only the peak is full, gathers far from it are merged all the same.
    assert 0 < found[0].num_merged < found[-1].num_merged


@hypothesis_settings(max_examples=10, deadline=None, derandomize=True)
@given(
    widths=st.sampled_from([SMALL, (DIM, 8, 256, DIM, 8), (8, 8), (512, 8, 512)]),
    latency=st.floats(1e-7, 1e-2),
    bandwidth=st.floats(1e6, 1e11),
    slack=st.floats(0.0, 1.0),
)
def test_whatever_the_link_merging_takes_no_longer_and_stays_within_the_limit(
    widths: tuple[int, ...], latency: float, bandwidth: float, slack: float
) -> None:
    link = machine(latency, bandwidth)
    limit = int(merge(link, 0, widths).plain.live.peak_bytes * (1 + slack))
    found = merge(link, limit, widths)
    assert found.merged.step_seconds <= found.plain.step_seconds * (1 + 1e-9)
    assert found.merged.live.peak_bytes <= limit
    assert found.merged.wire_bytes == found.plain.wire_bytes
    assert merge(link, limit, widths).plan.decisions_hash() == found.plan.decisions_hash()


@pytest.mark.parametrize("flops", [1e6, 1e12])
def test_updates_that_run_beside_the_next_step_do_not_count_as_computation(flops: float) -> None:
    link = machine(SLOW)
    link = replace(link, host=replace(link.host, flops=flops))  # too slow to be done in time, and done at once
    delaying = with_delayed_updates(3)
    step = carried_out(delaying, delaying.plan)
    plain = simulate(step, link, Mesh(shard=2), on_cpu=True)
    plan = merge_gathers(delaying.plan, step, delaying.layout, plain, link, NO_LIMIT)
    assert any(gather.merged for gather in plan.gathers)
    assert simulate(carried_out(delaying, plan), link, Mesh(shard=2), on_cpu=True).step_seconds < plain.step_seconds


@cache
def planned(latency: float, budget: int | None) -> Plan:
    model = Stack(SMALL)
    return zerofx.plan(
        model, sgd(model), (torch.randn(ROWS, DIM),), 3, world_size=RANKS, machine=machine(latency),
        memory_budget=budget, backend="eager", offload="none",
    ).plan  # fmt: skip


def test_what_a_budget_leaves_buys_fewer_collectives() -> None:
    plan, asked = planned(SLOW, 1 << 30), planned(SLOW, None)
    assert len(plan.launches) == 1 and len(plan.gathers) == len(SMALL)
    assert plan.step_seconds < asked.step_seconds
    assert not any(gather.merged for gather in asked.gathers)  # without a budget, gathers are as asked
    tight = planned(SLOW, (asked.peak_bytes["device"] + plan.peak_bytes["device"]) // 2)
    assert tight.peak_bytes["device"] <= (tight.memory_budget or 0)
    assert tight.step_seconds < asked.step_seconds


def test_a_plan_says_so_and_survives_its_file() -> None:
    plan, never = planned(SLOW, 1 << 30), planned(FAST, 1 << 30)
    assert Plan.from_json(plan.to_json()) == plan
    assert f"{len(plan.gathers)} gathers in {len(plan.launches)} collectives" in str(plan)
    assert "collectives" not in str(never)
    assert "as one collective with the gather before it" in plan.why("layers.1")
    assert "gathered alone -> gathered as one collective with the gather before it" in never.diff(plan)
