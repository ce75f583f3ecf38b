"""Updates are divided between host and device so that both end together."""

from __future__ import annotations

from dataclasses import replace
from operator import sub

from tests.lib.budgets import captured_gpt
from zerofx.ir.buckets import Bucket
from zerofx.scheduler.cost.machine import HostUpdate, Link, Machine
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.decide.update_sides import Arrival, Departure, Handed, Update, balance_updates, pace
from zerofx.scheduler.plan.decisions import Absence

_, LAYOUT = captured_gpt(num_layers=12, num_ranks=1)
BUCKETS = list(reversed(LAYOUT.buckets))  # in the order of their updates
STATES = {bucket.index: 12 * bucket.shard_numel for bucket in BUCKETS}
LAYER_SECONDS = 1e-3


def machine(link: float, host: float, flops: float = 1e14) -> Machine:
    """A machine whose links and host move so many bytes a second; the latter computes ``flops``."""
    row = Machine.named("h100-sxm").for_ranks(1)
    there = Link(link / row.efficiency.link, 0.0)
    updates = HostUpdate(1, host, host)
    return replace(
        row, host=replace(row.host, to_host=there, to_device=there, update=updates, memory_bandwidth=1e18, flops=flops)
    )


def update_of(
    bucket: Bucket, after: int, machine: Machine, *, used: int | None = None, waits: bool = False,
    is_away: bool = False, leaves_down: bool = False,
) -> Update:  # fmt: skip
    states = Arrival(STATES[bucket.index], "host", "device", after + 1, after, after if waits else 0)
    return Update.from_bucket(
        bucket, states, 3, machine, is_away=is_away, used=used, waits=waits, leaves_down=leaves_down
    )


def sides(machine: Machine, spare_bytes: int = 1 << 40) -> list[str]:
    """On which sides buckets are updated, in the order of their updates, each after a run of its own."""
    updates = [update_of(bucket, number, machine) for number, bucket in enumerate(BUCKETS)]
    levels = {bucket: Level(0, 0.0, "host", "device", STATES[bucket.index]) for bucket in BUCKETS}
    decisions = [
        Absence(kind="states", bucket=bucket.index, tier="host", update="device", reason="frees bytes; as it was")
        for bucket in BUCKETS
    ]
    seconds = [LAYER_SECONDS] * len(BUCKETS)
    found = balance_updates(decisions, updates, [], seconds, Handed(levels, spare_bytes), machine, ahead=True)
    assert [decision.bucket for decision in found] == [bucket.index for bucket in BUCKETS]
    assert all(decision.reason.startswith("frees bytes; updated on the ") for decision in found)
    return [decision.update for decision in found]


def test_all_go_where_the_other_way_is_hopeless() -> None:
    assert sides(machine(link=1e5, host=1e11)).count("device") <= 1  # the smallest, for which the link is free
    assert sides(machine(link=1e11, host=1e3)).count("host") <= 1


def test_both_ways_share_what_neither_can_do_alone() -> None:
    assert set(sides(machine(link=1e7, host=2e7))) == {"host", "device"}


def test_without_room_for_gradients_there_all_go_through_the_device() -> None:
    assert set(sides(machine(link=1e7, host=2e7), spare_bytes=0)) == {"device"}


def test_what_is_no_update_of_the_host_tier_stays() -> None:
    bucket = BUCKETS[0]
    decision = Absence(kind="states", bucket=bucket.index, tier="nvme", update="host", reason="as asked")
    assert balance_updates([decision], [], [], [1.0], Handed({}, 0), machine(1e9, 1e9), ahead=True) == (decision,)


def test_updates_through_the_device_hold_computation_as_long_as_the_slower_link_takes() -> None:
    """The states of one bucket go down while those of the next come up, and both while a layer computes."""
    slow = machine(link=1e8, host=1e9)
    layers = BUCKETS[1:-1]
    updates = [update_of(bucket, number, slow) for number, bucket in enumerate(layers)]
    each = updates[0].states_down
    assert each > 2 * LAYER_SECONDS
    paced = pace([], updates, [], [LAYER_SECONDS] * len(layers), slow)
    gaps = [after - before for before, after in zip(paced.reached[2:], paced.reached[3:], strict=False)]
    assert all(abs(gap - each - updates[0].computed) < 1e-9 for gap in gaps)


def test_spread_updates_keep_both_links_and_the_host_busy() -> None:
    """Where the first half went to the host, links would wait for the second half, and the host would have ended."""
    slow = machine(link=5e7, host=8e7)
    found = sides(slow)
    on_host = [side == "host" for side in found]
    half = len(found) // 2
    assert 0 < sum(on_host[:half]) < half, found
    updates = [update_of(bucket, number, slow) for number, bucket in enumerate(BUCKETS)]
    seconds = [LAYER_SECONDS] * len(BUCKETS)
    best = pace([], updates, [b.index for b, host in zip(BUCKETS, on_host, strict=True) if host], seconds, slow)
    first = pace([], updates, [bucket.index for bucket in BUCKETS[: sum(on_host)]], seconds, slow)
    assert best.end_seconds <= first.end_seconds


def test_background_work_costs_a_step_nothing_but_where_the_next_one_needs_it() -> None:
    both = machine(link=1e10, host=1e8)
    layer = BUCKETS[1]
    awaited = update_of(layer, 1, both)
    took = awaited.gradient_down + awaited.host + awaited.parameters_up
    runs, there = [took, took], [layer.index]
    assert abs(pace([], [awaited], there, runs, both).end_seconds - 3 * took) < 1e-12
    late, early = (update_of(layer, 1, both, used=run) for run in (1, 0))
    assert abs(pace([], [late], there, runs, both).end_seconds - 2 * took - late.gradient_down) < 1e-12
    needed_at_once = pace([], [early], there, runs, both)
    assert abs(needed_at_once.end_seconds - 3 * took) < 1e-12
    assert abs(needed_at_once.reached[0] - took + early.gradient_down) < 1e-12


def test_states_on_their_way_down_cost_a_step_nothing_but_what_the_next_one_copies_down_at_once() -> None:
    both = machine(link=1e8, host=1e8)
    layer = BUCKETS[1]
    awaited, left = (update_of(layer, 2, both, leaves_down=leaves) for leaves in (False, True))
    down = awaited.states_down
    runs = [down] * 3
    computed = 3 * down + awaited.computed
    waiting = pace([], [awaited], [], runs, both)
    assert abs(waiting.end_seconds - computed - down) < 1e-12 and waiting.down == 0.0
    going_on = pace([], [left], [], runs, both)
    assert abs(going_on.end_seconds - computed) < 1e-12 and abs(going_on.down - down) < 1e-12
    # What leaves the device after the first run finds the link free; half of it later it had to wait for half of it.
    leaving = [Departure(int(1e8 * down / 2), 0, 1)]
    assert abs(pace([], [left], [], runs, both, departures=leaving).end_seconds - computed) < 1e-12
    late = pace([], [left], [], [down / 2, down / 4, 9 * down / 4], both, departures=leaving)
    assert abs(late.end_seconds - computed - 3 * down / 4) < 1e-12


def test_parameters_come_up_in_the_next_step_once_the_host_has_updated_them() -> None:
    both = machine(link=1e10, host=1e8)
    layer = BUCKETS[1]
    update = update_of(layer, 1, both, used=0, is_away=True)
    up = Arrival(layer.shard_bytes, "host", "device", 0, 0, 0, layer.index)
    paced = pace([up], [update], [layer.index], [LAYER_SECONDS] * 2, both)
    copied = copy_seconds(up.num_bytes, "host", "device", both)
    assert abs(paced.reached[0] - update.host - copied) < 1e-12


def test_a_host_that_is_slower_than_computation_sets_the_pace_of_steps() -> None:
    slow = machine(link=1e12, host=1e8)
    layers = BUCKETS[1:-1]
    num = len(layers)
    updates = [update_of(bucket, num + n, slow, used=num - 1 - n) for n, bucket in enumerate(layers)]
    paced = pace([], updates, [bucket.index for bucket in layers], [1e-6] * (2 * num), slow)
    assert paced.end_seconds >= sum(update.host for update in updates)


def test_where_updates_wait_those_of_the_host_come_first_as_the_next_step_needs_them() -> None:
    both = machine(link=1e8, host=1e8)
    layers = BUCKETS[1:-1]
    num = len(layers)
    updates = [
        update_of(bucket, 2 * num - 1, both, used=num - 1 - number, waits=True) for number, bucket in enumerate(layers)
    ]
    runs, there = [2 * updates[0].host] * (2 * num), [bucket.index for bucket in layers[-2:]]
    paced = pace([], updates, there, runs, both)
    # All states come up one after the other, and the two of the host's are updated meanwhile.
    through = [update for update in updates if update.bucket.index not in there]
    assert sum(update.host for update in updates[-2:]) < through[0].states_down * len(through)
    assert paced.reached[0] == 0.0
    assert all(abs(gap - runs[0]) < 1e-12 for gap in map(sub, paced.reached[1:-1], paced.reached))
    last = update_of(layers[-1], 2 * num - 1, both, used=num - 1, waits=True)
    assert last.turn(on_host=True) > updates[-2].turn(on_host=True) < last.turn(on_host=False)
