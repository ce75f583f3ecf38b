"""When what lives in slower tiers starts on its way: as late as it can be, and never later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerofx
from tests.lib.budgets import small_machine
from tests.lib.graphs import prepare
from tests.lib.lowered import Deep
from tests.lib.models import CASES, batches, sgd
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import build
from zerofx.scheduler.cost.machine import Link, Machine, Nvme
from zerofx.scheduler.cost.timeline import seconds_by_place
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.prefetch import place_arrivals, starts_of
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.decide.update_sides import Arrival
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan


def machine(link: float, drive: float) -> Machine:
    """One whose link moves ``link`` bytes/s and whose drive moves ``drive``, for one rank."""
    small = small_machine(link)
    alone = replace(small, ranks_per_node=1, host=replace(small.host, memory_bandwidth=1e18))
    return replace(alone, nvme=Nvme(2**50, Link(drive, 1e-12), Link(drive, 1e-12)))


def layers(count: int, num_bytes: int, tier: Tier) -> list[Arrival]:
    """The parameters of ``count`` layers, each wanted where its run begins."""
    return [Arrival(num_bytes, tier, "device", run, run) for run in range(count)]


def test_on_a_fast_link_a_copy_starts_one_run_ahead() -> None:
    found = starts_of(layers(6, 100, "host"), [1.0] * 6, machine(1000, 1e9))  # 0.1 s a copy, 1 s a run
    assert [start.copy for start in found] == [0, 0, 1, 2, 3, 4]


def test_a_copy_of_several_runs_seconds_starts_as_many_runs_ahead() -> None:
    slow = machine(100, 1e9)
    assert 3 < copy_seconds(250, "host", "device", slow) < 4
    (start,) = starts_of([Arrival(250, "host", "device", 8, 8)], [1.0] * 10, slow)
    assert start.copy == 8 - 4


def test_a_link_slower_than_computation_is_always_busy_and_yet_little_is_there_early() -> None:
    found = starts_of(layers(8, 300, "host"), [1.0] * 8, machine(100, 1e9))  # 3 s a copy, 1 s a run
    assert [start.copy for start in found] == [0, *range(7)]  # each one copy ahead, not all from the beginning


def test_the_drive_is_read_ahead_of_the_copy_to_the_device() -> None:
    found = starts_of(layers(8, 100, "nvme"), [1.0] * 8, machine(1000, 60))  # 0.1 s and 1.67 s
    for run, start in list(enumerate(found))[3:]:
        assert start.read < start.copy < run


def test_the_depth_follows_the_seconds_and_is_no_constant() -> None:
    depth = {
        drive: 11 - starts_of([Arrival(1000, "nvme", "device", 11, 11)], [1.0] * 12, machine(1e9, drive))[0].read
        for drive in (4000, 900, 300)
    }
    assert depth == {4000: 2, 900: 3, 300: 5}


def test_what_an_update_wants_is_there_behind_its_run_at_the_latest() -> None:
    (start,) = starts_of([Arrival(100, "host", "device", 4, 3)], [1.0] * 4, machine(1e9, 1e9))
    assert start.copy == 3


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("tier", "update"), [("host", "device"), ("nvme", "device"), ("nvme", "host")])
def test_what_holds_nothing_on_the_device_comes_ahead_in_any_case(ahead: bool, tier: str, update: str) -> None:
    """States that are updated on the host are read from nvme before their run, under the tightest budget too."""
    plan = _placed_plan(ahead, tier, update)
    assert {decision.at_once for decision in plan.states} == {not ahead and update == "device"}
    for decision in plan.states:
        assert bool(decision.reload_before) == (not decision.at_once)


@pytest.mark.parametrize(
    ("tier", "update"), [("host", "device"), ("nvme", "device"), ("nvme", "host"), ("host", "host")]
)
def test_what_the_last_update_writes_back_is_awaited_in_the_next_step(tier: str, update: str) -> None:
    plan = _placed_plan(True, tier, update, away=False)
    left = [decision.bucket for decision in plan.states if decision.back_by is not None]
    last = [reduce.bucket for reduce in plan.reduces][-1:]
    assert left == ([] if tier == update == "host" else last)
    for how in (_placed_plan(False, tier, update, away=False), _placed_plan(True, tier, update)):
        assert all(decision.back_by is None for decision in how.states), "awaited at once, or read first"


def test_parameters_are_read_ahead_where_they_are_not_copied_ahead() -> None:
    at_once, ahead = (_placed_plan(early, "nvme", "host", depth=6) for early in (False, True))
    assert any(gather.read is not None for gather in at_once.gathers)
    assert all("copied up where it is used" in gather.reason for gather in at_once.gathers)
    assert not all("copied up where it is used" in gather.reason for gather in ahead.gathers)


def _placed_plan(ahead: bool, tier: str, update: str, depth: int = 4, *, away: bool = True) -> Plan:
    """Of one rank, with the states of all buckets in ``tier``, and their parameters on nvme, if they are ``away``."""
    prepared = prepare(Deep(depth), stage=3, num_ranks=1)
    layout, fast = prepared.layout, machine(1e4, 2e3)
    indices = [decision.bucket for decision in prepared.plan.reduces]
    by_hand = undecided(prepared.step, layout, 3, None, "by hand").replace_absences(
        states=[
            Absence(kind="states", bucket=index, tier=cast(Tier, tier), update=cast(Tier, update), reason="by hand")
            for index in indices
        ],
        parameters=[
            Absence(kind="parameters", bucket=index, tier="nvme", reason="by hand") for index in indices if away
        ],
    )
    plan = decide(prepared.step, layout, by_hand, PolicyOptions())
    held = {bucket.index: 8 * bucket.shard_numel for bucket in layout.buckets}
    seconds = dict.fromkeys(seconds_by_place(prepared.step, fast), 1.0)
    return place_arrivals(plan, prepared.step, layout, held, seconds, fast, ahead=ahead)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    data=st.data(),
    seconds=st.lists(st.floats(0.01, 2.0), min_size=2, max_size=10),
    link=st.sampled_from([50.0, 300.0, 1e5]),
    drive=st.sampled_from([40.0, 300.0, 1e5]),
)
def test_no_copy_makes_computation_wait_longer_than_copying_as_soon_as_possible(
    data: st.DataObject, seconds: list[float], link: float, drive: float
) -> None:
    runs = len(seconds)
    wanted = sorted(data.draw(st.lists(st.integers(0, runs - 1), min_size=1, max_size=8)))
    slower: list[Tier] = ["host", "nvme"]
    tiers = data.draw(st.lists(st.sampled_from(slower), min_size=len(wanted), max_size=len(wanted)))
    sizes = data.draw(st.lists(st.integers(1, 400), min_size=len(wanted), max_size=len(wanted)))
    arrivals = [Arrival(n, t, "device", r, r) for n, t, r in zip(sizes, tiers, wanted, strict=True)]
    fast = machine(link, drive)
    starts = starts_of(arrivals, seconds, fast)
    assert all(0 <= start.read <= start.copy <= arrival.latest for start, arrival in zip(starts, arrivals, strict=True))
    soonest = simulate(arrivals, [0] * len(arrivals), [0] * len(arrivals), seconds, fast)
    placed = simulate(arrivals, [s.read for s in starts], [s.copy for s in starts], seconds, fast)
    assert placed == pytest.approx(soonest, rel=1e-6)


def simulate(
    arrivals: list[Arrival], reads: list[int], copies: list[int], seconds: list[float], fast: Machine
) -> float:
    """The step's seconds when each leg is issued where computation reaches a run, and awaited where it is wanted."""
    free = {"read": 0.0, "copy": 0.0}
    there: dict[int, float] = {}
    read_done: dict[int, float] = {}
    now = 0.0
    for run in range(len(seconds)):
        for number, arrival in enumerate(arrivals):
            if arrival.needed == run and copies[number] < run:
                now = max(now, there[number])
        for number, arrival in enumerate(arrivals):
            if arrival.tier == "nvme" and reads[number] == run:
                begin = max(now, free["read"])
                free["read"] = read_done[number] = begin + copy_seconds(arrival.num_bytes, "nvme", "host", fast)
        for number, arrival in enumerate(arrivals):
            if copies[number] == run:
                begin = max(now, free["copy"], read_done.get(number, 0.0))
                free["copy"] = there[number] = begin + copy_seconds(arrival.num_bytes, "host", "device", fast)
                if arrival.needed == run:
                    now = max(now, there[number])
        now += seconds[run]
    return now


def test_states_of_a_bucket_that_no_rank_adds_to_are_there_when_its_gradients_are_complete() -> None:
    case = replace(CASES["stack"], optimizer=sgd)
    ((args, _),) = batches(case, 0, 1)

    def planned(**options: Any) -> zerofx.PlannedStep:
        model = build(case)
        optimizer = case.optimizer(model)
        return zerofx.plan(
            model, optimizer, args, 0, mesh={"model": 2}, machine=SHARING, backend="eager", **options
        )  # fmt: skip

    most = planned().plan.peak_bytes["device"]
    step = planned(memory_budget=int(0.9 * most), offload="host", recompute="none")
    alone = {number for number, bucket in enumerate(step.layout.buckets) if bucket.num_reduced == 1}
    assert alone.intersection(decision.bucket for decision in step.plan.states)
    assert step.plan.peak_bytes["device"] <= 0.9 * most
