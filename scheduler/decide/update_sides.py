"""Where buckets whose states are on the host are updated: on the host or on the device, so that both ways end together.

Through the device a bucket's states and masters come up and go down again. On the host its gradient goes down, the host
computes, and the new parameters come up. The first way takes the links, the second the host's memory: two resources
that work at once. The updates that run on the host are the first ones, which have the rest of backward to hide in, or
every second or third one, so that links have the time of several layers for each of the others: whatever leaves the
step the shortest on a timeline of links, host and computation.

    host way      gradient down -> update on the host -> parameters up
    device way    states up -> update on the device -> states down

Where gradients are clipped all updates are after the last reduction, those on the host first, in the order in which the
next step needs them: what it needs late may be updated while it runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zerofx.ir.buckets import Bucket
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.states import StateLevel, host_seconds
from zerofx.scheduler.plan.decisions import StateDecision
from zerofx.scheduler.plan.facts import Tier
from zerofx.units import format_seconds


@dataclass(frozen=True)
class Ready:
    """A bucket whose states are on the host; when its gradient is complete, and when the next step needs what was
    updated on the host, in seconds from the step's begin."""

    bucket: Bucket
    num_state_bytes: int
    seconds: float
    use_seconds: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What is known of a step before its updates: when it has computed all, and from when on states may come up, after
    the activations that links bring back; ``ahead``: whether they come up, and go down, while something else computes.
    No update begins before ``begin_seconds``.
    """

    end_seconds: float
    up_seconds: float
    ahead: bool = True
    begin_seconds: float = 0.0


def balance_updates(
    decisions: Sequence[StateDecision],
    levels: Mapping[Bucket, StateLevel],
    ready: Sequence[Ready],
    timeline: Timeline,
    spare_bytes: int,
    stage: int,
    machine: Machine,
) -> tuple[StateDecision, ...]:
    """``decisions``, with the side of each update that leaves the step the shortest.

    Args:
        decisions: where states are; those that are delayed, or not on the host, stay as they are.
        levels: what each of these buckets takes of the host.
        ready: the buckets that may be updated on either side.
        timeline: what the updates overlap with.
        spare_bytes: what the host has left for gradients and new parameters of buckets that are updated there.
        stage: the ZeRO stage.
        machine: its links and its host.
    """
    in_order = sorted(ready, key=lambda entry: (entry.seconds, -entry.use_seconds))
    costs = [_Costs.of(entry, stage, machine) for entry in in_order]
    needed = [0 if levels[e.bucket].update == "host" else c.handed_bytes for e, c in zip(in_order, costs, strict=True)]
    fitting = [ways for ways in _ways(len(costs)) if sum(itertools.compress(needed, ways)) <= spare_bytes]
    best = min(fitting, key=lambda ways: _end(costs, ways, timeline), default=(False,) * len(costs))
    exposed = max(0.0, _end(costs, best, timeline) - timeline.end_seconds)
    sides: dict[int, Tier] = {
        entry.bucket.index: "host" if on_host else "device" for entry, on_host in zip(in_order, best, strict=True)
    }
    why = f"{sum(best)} of {len(best)} are updated on the host, and {format_seconds(exposed)} exposed for all"
    return tuple(
        replace(decision, update=side, reason=f"{decision.reason.partition(';')[0]}; updated on the {side}: {why}")
        if (side := sides.get(decision.bucket))
        else decision
        for decision in decisions
    )


def _ways(num: int) -> Iterator[tuple[bool, ...]]:
    """Which updates, in their order, may run on the host: any number of them, the first ones or spread evenly."""
    for most in range(num + 1):
        yield tuple(i < most for i in range(num))
        yield tuple((i + 1) * most // num > i * most // num for i in range(num))


@dataclass(frozen=True)
class _Costs:
    """Seconds of one bucket's update on each link and on the host, either way, and when its gradient is complete."""

    ready: float
    use: float
    states_up: float
    states_down: float
    gradient_down: float
    host: float
    parameters_up: float
    handed_bytes: int

    @staticmethod
    def of(entry: Ready, stage: int, machine: Machine) -> _Costs:
        numel, states = entry.bucket.updated_numel(stage), entry.num_state_bytes
        gradient, new = numel * entry.bucket.reduce_dtype.itemsize, numel * entry.bucket.compute_dtype.itemsize
        return _Costs(
            entry.seconds,
            entry.use_seconds,
            copy_seconds(states, "host", "device", machine),
            copy_seconds(states, "device", "host", machine),
            copy_seconds(gradient, "device", "host", machine),
            host_seconds(entry.bucket, states, numel, machine),
            copy_seconds(new, "host", "device", machine),
            gradient + (new if entry.bucket.has_master else 0),
        )


def _end(costs: Sequence[_Costs], on_host: Sequence[bool], timeline: Timeline) -> float:
    """The seconds of a step of whose updates these run ``on_host``, to the begin of the next one, which runs next to
    what they leave under way.

    An update on the device holds computation until its states are there, and those of the update before are down.
    """
    begins, ends, up = timeline.begin_seconds, timeline.end_seconds, timeline.up_seconds
    down = host = held = 0.0
    given: list[tuple[float, float, _Costs]] = []  # to the host, and when the gradient has landed
    updated: list[tuple[float, _Costs]] = []  # when the host is done with each

    def update_given() -> None:
        nonlocal host
        for _, landed, cost in sorted(given, key=lambda entry: (entry[0], entry[2].use)):
            host = max(host, landed) + cost.host
            updated.append((host, cost))
        given.clear()

    def bring_up(until: float) -> None:
        nonlocal up, ends
        while updated and updated[0][0] <= until:
            done, cost = updated.pop(0)
            up = max(up, done) + cost.parameters_up
            ends = max(ends, up - cost.use)

    sides = zip(costs, on_host, strict=True)
    for cost, is_on_host in sorted(
        sides, key=lambda entry: entry[0].ready if entry[1] else max(entry[0].ready, begins)
    ):
        if is_on_host:
            down = max(down, cost.ready + held) + cost.gradient_down
            given.append((max(cost.ready, begins), max(down, begins), cost))
            continue
        now = max(cost.ready, begins) + held
        update_given()
        bring_up(up)
        if not timeline.ahead:
            done = max(now, up, down) + cost.states_up
            up = down = done + cost.states_down
            held += down - now
        else:
            up += cost.states_up
            done = max(now, up, down)
            held += done - now
            down = done + cost.states_down
    update_given()
    bring_up(math.inf)
    return max(timeline.end_seconds + held, ends, down)
