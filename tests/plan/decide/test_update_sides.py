"""Updates are divided between host and device so that both end together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lib.budgets import captured_gpt
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.decide.states import StateLevel
from zerofx.scheduler.decide.update_sides import Ready, Timeline, balance_updates
from zerofx.scheduler.plan.decisions import StateDecision

_, LAYOUT = captured_gpt(num_layers=12, num_ranks=1)
BUCKETS = list(reversed(LAYOUT.buckets))  # in the order of their updates
STATES = {bucket.index: 12 * bucket.shard_numel for bucket in BUCKETS}


def machine(link: float, host: float, flops: float = 1e14) -> Machine:
    """A machine whose links and host move so many bytes a second; the latter computes ``flops``."""
    row = Machine.named("h100-sxm").for_ranks(1)
    there = Link(link / row.efficiency.link, 0.0)
    return replace(
        row,
        host=replace(
            row.host, to_host=there, to_device=there, memory_bandwidth=host / row.efficiency.memory, flops=flops
        ),
    )


def sides(machine: Machine, spare_bytes: int = 1 << 40, layer_seconds: float = 1e-3) -> list[str]:
    """On which sides buckets are updated, in the order of their updates."""
    ready = [Ready(bucket, STATES[bucket.index], number * layer_seconds) for number, bucket in enumerate(BUCKETS)]
    levels = {bucket: StateLevel(0, 0.0, "host", "device", STATES[bucket.index]) for bucket in BUCKETS}
    decisions = [StateDecision(bucket.index, "host", "device", "frees bytes; as it was") for bucket in BUCKETS]
    timeline = Timeline(len(BUCKETS) * layer_seconds, 0.0)
    found = balance_updates(decisions, levels, ready, timeline, spare_bytes, 3, machine)
    assert [decision.bucket for decision in found] == [bucket.index for bucket in BUCKETS]
    assert all(decision.reason.startswith("frees bytes; updated on the ") for decision in found)
    return [decision.update for decision in found]


def test_all_go_where_the_other_way_is_hopeless() -> None:
    assert sides(machine(link=1e5, host=1e11)).count("device") <= 1  # the smallest, for which the link is free
    assert sides(machine(link=1e11, host=1e11, flops=1e6)).count("host") <= 1


def test_both_ways_share_what_neither_can_do_alone() -> None:
    found = sides(machine(link=1e9, host=2e9))
    assert set(found) == {"host", "device"}
    assert found[0] == "host"


def test_without_room_for_gradients_there_all_go_through_the_device() -> None:
    assert set(sides(machine(link=1e9, host=2e9), spare_bytes=0)) == {"device"}


@pytest.mark.parametrize("tier", ["nvme", "host"])
def test_what_is_delayed_or_elsewhere_stays(tier: str) -> None:
    bucket = BUCKETS[0]
    decision = StateDecision(bucket.index, tier, "host", "as asked", delayed=tier == "host")  # type: ignore[arg-type]
    timeline = Timeline(1.0, 0.0)
    assert balance_updates([decision], {}, [], timeline, 0, 3, machine(1e9, 1e9)) == (decision,)
