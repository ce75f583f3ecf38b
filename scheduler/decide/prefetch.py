"""Prefetch from slower tiers: each copy starts as late as it can without keeping computation waiting.

Parameters are wanted where a residency begins (or its gather is issued), activations where backward reads them first,
states where their bucket is updated. All share the links. First the lanes set the pace (``update_sides.py``): each is
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

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import times_run
from zerofx.passes.lib.placed_states import may_run_on
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import Positions, UnitPhase, UnitRun, latest_starts, runs
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import NUM_BUFFERS
from zerofx.scheduler.decide.residency import parameter_uses
from zerofx.scheduler.decide.states import update_traffic_bytes
from zerofx.scheduler.decide.update_sides import (
    Arrival,
    Departure,
    Handed,
    Pace,
    Update,
    balance_updates,
    pace,
)
from zerofx.scheduler.plan.decisions import Absence, GatherDecision, ReduceDecision
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan

_LEGS: Final[tuple[tuple[Tier, Tier], ...]] = (("host", "device"), ("nvme", "host"))  # the last first
_ROUNDING = 1e-9  # of the step's seconds: sums of the same numbers in another order may differ by as much


@dataclass(frozen=True)
class CopyStart:
    """The runs before which a copy is issued, and (if it is from nvme to the device) its read into host memory."""

    copy: int
    read: int


def starts_of(arrivals: Sequence[Arrival], run_seconds: Sequence[float], machine: Machine) -> list[CopyStart]:
    """Start of each copy where the host updates nothing; ``run_seconds`` are those of each run of the step."""
    return _latest_copies(arrivals, pace(arrivals, (), (), run_seconds, machine), machine)


def _latest_copies(coming: Sequence[Arrival], paced: Pace, machine: Machine) -> list[CopyStart]:
    """Start of each copy, as late as it can be on the timeline ``paced``."""
    reached = paced.reached
    reads, copies = [arrival.latest for arrival in coming], [arrival.latest for arrival in coming]
    deadlines = [reached[arrival.needed] for arrival in coming]
    for leg in _LEGS:
        numbers = [number for number, arrival in enumerate(coming) if leg in _legs(arrival)]
        seconds = [copy_seconds(coming[number].num_bytes, *leg, machine) for number in numbers]
        ends, others = [deadlines[number] for number in numbers], paced.new if leg == _LEGS[0] else ()
        # From the last to the first to be asked for.
        ranks = [(coming[number].earliest, coming[number].needed) for number in numbers]
        starts = latest_starts(ends, seconds, ranks, others)
        for number, start in zip(numbers, starts, strict=True):
            run = bisect_right(reached, start + _ROUNDING * reached[-1]) - 1
            run = reads[number] = max(coming[number].earliest, min(reads[number], run))
            deadlines[number] = reached[run]
            if leg == _legs(coming[number])[-1]:
                copies[number] = run
    return [CopyStart(copy, read) for copy, read in zip(copies, reads, strict=True)]


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
    handed: Handed | None = None,
    leaves_down: bool = True,
    on_device: Collection[int] = (),
    at_end: Collection[int] = (),
) -> Plan:
    """``plan`` with the nodes before which parameters, activations and states in slower tiers start on their way.

    Args:
        plan: what is where, and when buckets are gathered, reduced and updated.
        step: the captured graph with tiles and recomputation carried out.
        layout: the buckets.
        state_bytes: bytes of one rank's states and masters, by bucket index.
        seconds: computation by unit and phase (``scheduler.cost.timeline.seconds_by_place``).
        machine: its links.
        ahead: whether copies overlap with computation, for memory that is held on the device meanwhile, or are awaited
            at once; what comes from nvme is read into the host's memory ahead in any case.
        handed: what the host may be handed, where sides of updates are still to be found; None where they are as
            ``plan`` says.
        leaves_down: whether what goes back to its tier may run on into the next step.
        on_device: the buckets that can be updated on the device alone.
        at_end: those whose update is one, where the step ends: their states are copied and awaited there.
    """
    if not plan.parameters and not plan.states and not (plan.offloads and ahead):
        return plan
    if at_end:
        at_once = (_copy_at_once(each) if each.bucket in at_end else each for each in plan.states)
        plan = plan.replace_absences(states=at_once)
    spans = runs(step, seconds)
    coming = _collect_arrivals(
        plan, step, layout, state_bytes, spans, machine,
        leaves_down=leaves_down and ahead, on_device=on_device,
    )  # fmt: skip
    run_seconds = coming.run_seconds
    entries = [*coming.gathers, *(coming.offloads if ahead else ())]
    entries += [entry for entry in coming.states if ahead or plan.states[entry[1]].update == "host"]
    arrivals = [arrival for *_, arrival in entries]
    if handed is not None:
        sides = balance_updates(
            plan.states, coming.updates, arrivals, run_seconds, handed, machine,
            departures=coming.departures, ahead=ahead,
        )  # fmt: skip
        plan = plan.replace_absences(states=sides)
    on_host = {decision.bucket for decision in plan.states if decision.update == "host"}
    paced = None
    if ahead:
        paced = pace(arrivals, coming.updates, on_host, run_seconds, machine, departures=coming.departures)
        through_device = (update.states for update in coming.updates if update.bucket.index not in on_host)
        starts = _latest_copies([*arrivals, *through_device], paced, machine)
    else:
        starts = _read_ahead(arrivals, run_seconds, machine)
    names = [run.first.name for run in spans]
    gathers = list(plan.gathers)
    away = {"offloads": list(plan.offloads), "states": [*(plan.states if ahead else map(_copy_at_once, plan.states))]}
    numbers = {decision.bucket: number for number, decision in enumerate(plan.states)}
    # Those that come up after the last reduction start where the bucket before them is updated.
    through = [] if plan.updates_wait or not ahead else [u for u in coming.updates if u.bucket.index not in on_host]
    entries += [("states", numbers[update.bucket.index], update.states) for update in through]
    for (kind, number, arrival), start in zip(entries, starts, strict=False):
        if kind == "gathers":
            gathers[number] = _gather(gathers[number], arrival, start, names)
        else:
            decision = plan.offloads[number] if kind == "offloads" else plan.states[number]
            read = names[start.read] if start.read < start.copy else None
            away[kind][number] = replace(decision, reload_before=(names[start.copy],), read=read)
    states = away["states"]
    if leaves_down and paced is not None:
        states = _place_write_backs(
            plan.replace_absences(states=states), coming, paced, layout, state_bytes, names, machine
        )
    in_turn = _assign_buffers(states, coming.updated)
    return replace(plan, gathers=tuple(gathers)).replace_absences(offloads=away["offloads"], states=in_turn)


# What comes from a slower tier: the list of the plan that has it, its number there, and when it is wanted.
_Entry = tuple[str, int, Arrival]


@dataclass(frozen=True)
class _Coming:
    """Tensors that come from slower tiers in a plan, and updates whose states are on the host.

    ``states`` are those on nvme. ``departures``: the copies of activations to the host. ``updated``: the run after
    which each trained bucket is updated. ``run_seconds`` are those of runs, with the updates after them whose states
    are on the device.
    """

    gathers: list[_Entry]
    offloads: list[_Entry]
    states: list[_Entry]
    departures: list[Departure]
    updates: list[Update]
    updated: Mapping[int, int]
    run_seconds: list[float]


def _collect_arrivals(
    plan: Plan,
    step: StepGraph,
    layout: BucketLayout,
    state_bytes: Mapping[int, int],
    spans: Sequence[UnitRun],
    machine: Machine,
    *,
    leaves_down: bool,
    on_device: Collection[int],
) -> _Coming:
    at, away = Positions(step, spans), plan.away
    tiers = {decision.bucket: decision.tier for decision in plan.parameters}
    gathers: list[_Entry] = []
    for number, gather in enumerate(plan.gathers):
        if gather.bucket in tiers:
            bucket = layout.buckets[gather.bucket]
            run = at.run(gather.issue if bucket.num_ranks > 1 else gather.first)
            size, tier, begin = bucket.shard_bytes, tiers[gather.bucket], at.begin_of_body(run)
            gathers.append(("gathers", number, Arrival(size, tier, "device", run, run, begin, gather.bucket)))
    updated, last_run = updates_of(plan, step, layout, at), len(spans) - 1
    uses = {
        bucket.index: at.run_of(nodes[0]) for bucket, nodes in parameter_uses(step, layout) if may_run_on(plan, bucket)
    }
    states, updates = list[_Entry](), dict[int, Update]()
    for number, decision in enumerate(plan.states):
        bucket, size = layout.buckets[decision.bucket], state_bytes.get(decision.bucket, 0)
        size += bucket.shard_bytes if decision.bucket in tiers and not bucket.has_master else 0
        if not size or decision.delayed or decision.at_once or decision.bucket not in updated:
            continue
        last = last_run if plan.updates_wait else updated[decision.bucket]
        earliest = last if plan.updates_wait else at.begin_of_body(last)
        if decision.tier == "host" and decision.bucket not in on_device:
            arrival = Arrival(size, "host", "device", last + 1, last, earliest)
            updates[decision.bucket] = Update.from_bucket(
                bucket, arrival, plan.stage, machine, is_away=decision.bucket in away,
                used=uses.get(decision.bucket), waits=plan.updates_wait,
                leaves_down=leaves_down and decision.bucket not in away,
            )  # fmt: skip
        elif decision.tier != decision.update and not plan.updates_wait:
            arrival = Arrival(size, decision.tier, decision.update, last + 1, last, earliest)
            states.append(("states", number, arrival))
    run_seconds = [run.end_seconds - run.start_seconds for run in spans]
    in_states = {decision.bucket for decision in plan.states}
    for index in (index for index in updated if index not in in_states):
        bucket, size = layout.buckets[index], state_bytes.get(index, 0)
        last = last_run if plan.updates_wait else updated[index]
        touched = update_traffic_bytes(bucket, size, bucket.updated_numel(plan.stage))
        run_seconds[last] += touched / machine.memory_bandwidth
    in_order = [updates[bucket] for bucket in updated if bucket in updates]
    reloads, departures = _activations(plan, step, spans, at)
    return _Coming(gathers, reloads, states, departures, in_order, updated, run_seconds)


def _activations(
    plan: Plan, step: StepGraph, spans: Sequence[UnitRun], at: Positions
) -> tuple[list[_Entry], list[Departure]]:
    """The copies back of activations on the host, after those are gone, and not before backward begins; and those out,
    once the last of forward has read them. What the rounds of a layer's loop copy they await themselves."""
    by_name, reloads, departures = step.nodes_by_name(), list[_Entry](), list[Departure]()
    times = times_run(step) if step.by_layer else {}
    for number, offload in enumerate(plan.offloads):
        if offload.tier != "host":
            continue
        value, freed = by_name[offload.value], at.run(*offload.free_after)
        readers = consumers(value)
        again = [node for node in readers if origin(node).phase is not Phase.FORWARD]
        read = max(at.run_of(node) for node in (value, *readers) if node not in again)
        departures.append(Departure(times.get(value, 1) * offload.num_bytes, read, freed))
        if times.get(value, 1) > 1:
            continue
        needed = min(map(at.run_of, again))
        backward = next(run for run in range(freed, needed + 1) if spans[run].phase is not Phase.FORWARD)
        earliest = max(backward, freed + 2)
        reloads.append(("offloads", number, Arrival(offload.num_bytes, "host", "device", needed, needed, earliest)))
    return reloads, departures


def _gather(decision: GatherDecision, arrival: Arrival, start: CopyStart, names: Sequence[str]) -> GatherDecision:
    read = names[start.read] if start.read < start.copy else None
    ahead = arrival.needed - start.copy
    runs = f"{ahead} run{'' if ahead == 1 else 's'} of layers"
    reason = decision.reason + (f", copied up {runs} ahead" if ahead else ", copied up where it is used")
    if read is not None:
        reason += f", read from nvme {arrival.needed - start.read} ahead"
    return replace(decision, reload=names[start.copy], read=read, reason=reason)


def _copy_at_once(decision: Absence) -> Absence:
    if decision.at_once:
        return decision
    return replace(decision, at_once=True, reason=f"{decision.reason}; copied and awaited where the update is")


def _assign_buffers(decisions: Sequence[Absence], updated: Mapping[int, int]) -> list[Absence]:
    """States from nvme with the buckets whose buffers they take over, in the order of updates.

    Those that are copied at once take one buffer, one after the other.
    """
    ahead = {decision.bucket for decision in decisions if decision.tier == "nvme" and not decision.at_once}
    num_buffers = NUM_BUFFERS - any(decision.tier == "nvme" and decision.at_once for decision in decisions)
    order = [bucket for bucket in updated if bucket in ahead]
    before = dict(zip(order[num_buffers:], order, strict=False))
    return [replace(decision, takes_over=before.get(decision.bucket)) for decision in decisions]


def _place_write_backs(
    plan: Plan,
    coming: _Coming,
    paced: Pace,
    layout: BucketLayout,
    state_bytes: Mapping[int, int],
    names: Sequence[str],
    machine: Machine,
) -> list[Absence]:
    """The states of ``plan``, with the run of the next step that those of the last update are to be back before.

    Those of the others are back where the next update is. What is on the device until then is held no longer than the
    copy takes; what is written to nvme, whose buffers are those of a bucket, is there before as many others are read as
    there are buffers. Parameters that go back are read first in the next step, and so nothing of theirs runs on.
    """
    decisions, numbers = list(plan.states), {decision.bucket: n for n, decision in enumerate(plan.states)}
    in_order = [
        number
        for bucket in coming.updated
        if (number := numbers.get(bucket)) is not None
        and not (plan.updates_wait and _is_of_the_host(decisions[number]) and may_run_on(plan, layout.buckets[bucket]))
    ]
    last = in_order[-1] if in_order else None
    if last is None or _is_of_the_host(decisions[last]) or decisions[last].at_once or decisions[last].delayed:
        return decisions
    decision = decisions[last]
    if decision.bucket in plan.away:
        return decisions
    if decision.tier == "nvme":
        seconds = copy_seconds(state_bytes.get(decision.bucket, 0), decision.update, "nvme", machine)
        run = bisect_left(list(itertools.accumulate(coming.run_seconds, initial=0.0)), seconds)
        reads = [
            decisions[n].read or next(iter(decisions[n].reload_before), None)
            for n in in_order
            if decisions[n].tier == "nvme"
        ]
        if len(reads) >= NUM_BUFFERS and (third := reads[NUM_BUFFERS - 1]) is not None:
            run = min(run, names.index(third) - 1)
    else:
        run = bisect_left(paced.reached, paced.down - _ROUNDING * paced.end_seconds)
    if 0 < run < len(names):
        decisions[last] = replace(decision, back_by=names[run])
    return decisions


def _is_of_the_host(decision: Absence) -> bool:
    return decision.tier == decision.update == "host"


def updates_of(plan: Plan, step: StepGraph, layout: BucketLayout, at: Positions) -> dict[int, int]:
    """The run after which each trained bucket is updated."""
    readers = {bucket.index: nodes[-1] for bucket, nodes in parameter_uses(step, layout)}
    updates = {}
    for decision in plan.reduces:
        last = _gradient_run(decision, step, layout, at)
        if decision.bucket in readers:
            last = max(last, at.run_of(readers[decision.bucket]))
        updates[decision.bucket] = last
    return updates


def _gradient_run(decision: ReduceDecision, step: StepGraph, layout: BucketLayout, at: Positions) -> int:
    """The run after which a bucket's reduced gradient is there."""
    bucket = layout.buckets[decision.bucket]
    if bucket.num_reduced > 1:
        return at.run(decision.update_after) if decision.update_after else at.run_of(step.output)
    return max(at.run_of(step.gradients[slot.name]) for slot in bucket.slots)
