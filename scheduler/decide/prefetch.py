"""Prefetch from slower tiers: each copy starts as late as it can without keeping computation waiting.

Parameters are wanted where a residency begins (or its gather is issued), states where their bucket is updated. Copies
are made in the order in which they are wanted, one at a time on each link. First the links set the pace: every copy is
made as soon as its link is free, and computation waits where it is not there in time; fetching farther ahead would not
make it wait less. On that timeline every copy is then put as late as it can be. So a link that is slower than
computation is always busy, and yet little has arrived before it is wanted; one that is faster is used just in time.
From nvme there are two copies, into the host's memory and from there to the device, each as late as it can be:
with a gather after them that is the three-deep prefetch of ZeRO-Infinity (2104.07857), as deep as the timeline says.

Where gradients are clipped, states are wanted after the last reduction, one bucket after the other, and nothing but
their updates overlaps with their copies: each bucket's start where the bucket before it is updated.

States from nvme pass through the host in the buffers of three buckets, whatever the number of buckets: one is read
while the one before it is updated and the one before that is written back. A read waits for its buffers to be free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import Positions, UnitPhase, runs
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.residency import parameter_uses
from zerofx.scheduler.plan.decisions import GatherDecision, ReduceDecision, StateDecision
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan

NUM_BUFFERS = 3  # buckets whose states are on their way from and to nvme: read, updated, written back
_ROUNDING = 1e-9  # of the step's seconds: sums of the same numbers in another order may differ by as much


@dataclass(frozen=True)
class Arrival:
    """``num_bytes`` that are wanted on tier ``to`` before run ``needed``.

    They may be asked for from run ``earliest`` on, and up to run ``latest``.
    """

    num_bytes: int
    tier: Tier
    to: Tier
    needed: int
    latest: int
    earliest: int = 0


@dataclass(frozen=True)
class CopyStart:
    """The runs before which a copy is issued, and (if it is from nvme to the device) its read into host memory."""

    copy: int
    read: int


def starts_of(arrivals: Sequence[Arrival], run_seconds: Sequence[float], machine: Machine) -> list[CopyStart]:
    """Where each copy starts, given the seconds of each run of the step."""
    reached = _reached(arrivals, run_seconds, machine)
    free: dict[tuple[Tier, Tier], float] = {}
    starts: dict[int, CopyStart] = {}
    for number in sorted(range(len(arrivals)), key=lambda n: (arrivals[n].needed, n), reverse=True):
        arrival = arrivals[number]
        place, places, deadline = arrival.latest, [], reached[arrival.needed]
        for leg in reversed(_legs(arrival)):
            deadline = min(free.get(leg, deadline), deadline) - copy_seconds(arrival.num_bytes, *leg, machine)
            free[leg] = deadline
            place = max(arrival.earliest, min(place, bisect_right(reached, deadline + _ROUNDING * reached[-1]) - 1))
            places.append(place)
            deadline = reached[place]
        starts[number] = CopyStart(places[0], places[-1])
    return [starts[number] for number in range(len(arrivals))]


def _read_ahead(arrivals: Sequence[Arrival], run_seconds: Sequence[float], machine: Machine) -> list[CopyStart]:
    """``starts_of`` where nothing is on the device before it is wanted: what comes from nvme is on the host in time.

    It is read at most so many runs ahead as there are buffers.
    """
    starts = [CopyStart(arrival.latest, arrival.latest) for arrival in arrivals]
    from_nvme = [number for number, arrival in enumerate(arrivals) if arrival.tier == "nvme"]
    reads = starts_of([replace(arrivals[number], to="host") for number in from_nvme], run_seconds, machine)
    for number, start in zip(from_nvme, reads, strict=True):
        stays = arrivals[number].to == "host"
        latest = starts[number].copy
        read = max(start.copy, latest - NUM_BUFFERS, arrivals[number].earliest)
        starts[number] = start if stays else CopyStart(latest, read)
    return starts


def _reached(arrivals: Sequence[Arrival], run_seconds: Sequence[float], machine: Machine) -> list[float]:
    """When computation reaches each run, and the step's end, if every copy is made as soon as its link is free."""
    free: dict[tuple[Tier, Tier], float] = {}
    there = [0.0] * (len(run_seconds) + 1)
    for arrival in sorted(arrivals, key=lambda arrival: arrival.needed):
        now = 0.0
        for leg in _legs(arrival):
            now = free[leg] = max(now, free.get(leg, 0.0)) + copy_seconds(arrival.num_bytes, *leg, machine)
        there[arrival.needed] = max(there[arrival.needed], now)
    reached, now = [], 0.0
    for ready, seconds in zip(there, (*run_seconds, 0.0), strict=True):
        reached.append(max(now, ready))
        now = reached[-1] + seconds
    return reached


def _legs(arrival: Arrival) -> list[tuple[Tier, Tier]]:
    if arrival.tier == "nvme" and arrival.to == "device":
        return [("nvme", "host"), ("host", "device")]
    return [(arrival.tier, arrival.to)]


def place_arrivals(
    plan: Plan,
    step: StepGraph,
    layout: BucketLayout,
    state_bytes: Mapping[int, int],
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
    *,
    ahead: bool,
) -> Plan:
    """``plan`` with the nodes before which parameters and states in slower tiers start on their way.

    Args:
        plan: what is where, and when buckets are gathered, reduced and updated.
        step: the captured graph with tiles and recomputation carried out.
        layout: the buckets.
        state_bytes: bytes of one rank's states and masters, by bucket index.
        seconds: computation by unit and phase (``scheduler.cost.timeline.seconds_by_place``).
        machine: its links.
        ahead: whether copies overlap with computation, for memory that is held on the device meanwhile, or are awaited
            at once; what comes from nvme is read into the host's memory ahead in any case.
    """
    if not plan.parameters and not plan.states:
        return plan
    spans = runs(step, seconds)
    at = Positions(step, spans)
    tiers = {decision.bucket: decision.tier for decision in plan.parameters}
    gathers: list[tuple[int, Arrival]] = []
    for number, gather in enumerate(plan.gathers):
        if gather.bucket in tiers:
            bucket = layout.buckets[gather.bucket]
            run = at.run(gather.issue if bucket.num_ranks > 1 else gather.first)
            size, tier = bucket.shard_bytes, tiers[gather.bucket]
            gathers.append((number, Arrival(size, tier, "device", run, run, at.begin_of_body(run))))
    states: list[tuple[int, Arrival]] = []
    updated = updates_of(plan, step, layout, at)
    for number, decision in enumerate(plan.states):
        size = state_bytes.get(decision.bucket, 0)
        if decision.bucket in tiers and not layout.buckets[decision.bucket].has_master:
            size += layout.buckets[decision.bucket].shard_bytes
        source, side = decision.tier, decision.update
        if source != side and size and not plan.updates_wait and (ahead or side == "host"):
            last = updated[decision.bucket]
            states.append((number, Arrival(size, source, side, last + 1, last, at.begin_of_body(last))))
    arrivals = [arrival for _, arrival in (*gathers, *states)]
    run_seconds = [run.end_seconds - run.start_seconds for run in spans]
    starts = (starts_of if ahead else _read_ahead)(arrivals, run_seconds, machine)
    new_gathers, new_states = list(plan.gathers), list(plan.states if ahead else map(_at_once, plan.states))
    names = [run.first.name for run in spans]
    for (number, arrival), start in zip(gathers, starts, strict=False):
        new_gathers[number] = _gather(plan.gathers[number], arrival, start, names)
    for (number, _), start in zip(states, starts[len(gathers) :], strict=True):
        new_states[number] = _state(plan.states[number], start, names)
    new_states = _in_turn(new_states, updated)
    return replace(plan, gathers=tuple(new_gathers), states=tuple(new_states))


def _gather(decision: GatherDecision, arrival: Arrival, start: CopyStart, names: Sequence[str]) -> GatherDecision:
    read = names[start.read] if start.read < start.copy else None
    ahead = arrival.needed - start.copy
    runs = f"{ahead} run{'' if ahead == 1 else 's'} of layers"
    reason = decision.reason + (f", copied up {runs} ahead" if ahead else ", copied up where it is used")
    if read is not None:
        reason += f", read from nvme {arrival.needed - start.read} ahead"
    return replace(decision, reload=names[start.copy], read=read, reason=reason)


def _at_once(decision: StateDecision) -> StateDecision:
    return replace(decision, at_once=True, reason=f"{decision.reason}; copied and awaited where the update is")


def _in_turn(decisions: Sequence[StateDecision], updated: Mapping[int, int]) -> list[StateDecision]:
    """States from nvme with the buckets whose buffers they take over, in the order of updates.

    Those that are copied at once take one buffer, one after the other.
    """
    ahead = {decision.bucket for decision in decisions if decision.tier == "nvme" and not decision.at_once}
    num_buffers = NUM_BUFFERS - any(decision.tier == "nvme" and decision.at_once for decision in decisions)
    order = [bucket for bucket in updated if bucket in ahead]
    before = dict(zip(order[num_buffers:], order, strict=False))
    return [replace(decision, takes_over=before.get(decision.bucket)) for decision in decisions]


def _state(decision: StateDecision, start: CopyStart, names: Sequence[str]) -> StateDecision:
    read = names[start.read] if start.read < start.copy else None
    return replace(decision, reload=names[start.copy], read=read)


def updates_of(plan: Plan, step: StepGraph, layout: BucketLayout, at: Positions) -> dict[int, int]:
    """The run after which each trained bucket is updated."""
    readers = {bucket.index: nodes[-1] for bucket, nodes in parameter_uses(step, layout)}
    updates = {}
    for decision in plan.reduces:
        last = _reduced(decision, step, layout, at)
        if decision.bucket in readers:
            last = max(last, at.run_of(readers[decision.bucket]))
        updates[decision.bucket] = last
    return updates


def _reduced(decision: ReduceDecision, step: StepGraph, layout: BucketLayout, at: Positions) -> int:
    """The run after which a bucket's reduced gradient is there."""
    bucket = layout.buckets[decision.bucket]
    if bucket.num_reduced > 1:
        return at.run(decision.updated_after) if decision.updated_after else at.run_of(step.output)
    return max(at.run_of(step.gradients[slot.name]) for slot in bucket.slots)
