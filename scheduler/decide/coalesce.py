"""Coalescing: which gathers start as one collective, because latency takes longer than their bytes.

A collective takes ``latency + bytes / bandwidth`` (Hockney's model; ``scheduler.cost.transfers.collective_seconds``).
Below ``latency * bandwidth`` bytes the first term is the longer one, and gathers that start together pay it once. The
price is memory: the later bucket is on the device from where the earlier one is gathered.

Decided after everything else, on the step as it will run, one gather after the other in order: a gather joins the
one before it if the whole timeline gets shorter, or stays as it is without a byte held longer, and the limit holds at
every position. What is gathered earlier only adds to memory, so that a smaller limit never leads to a higher peak:
up to the first gather that it refuses all is decided alike, and that one would have led above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Job, Task
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_bodies
from zerofx.ir.streams import COLLECTIVE
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.replay import Start, TimedEvent, Wait, end_seconds, events_of
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.plan.decisions import GatherDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_seconds

_ROUNDING = 1e-9  # of the step's seconds: sums of the same numbers in another order may differ by as much


def may_merge(plan: Plan, layout: BucketLayout, machine: Machine) -> bool:
    """True if latency dominates any of the plan's gathers."""
    gathered = {layout.buckets[gather.bucket] for gather in plan.gathers}
    return any(bucket.num_ranks > 1 and _latency(bucket, machine) >= _transfer(bucket, machine) for bucket in gathered)


def merge_gathers(
    plan: Plan, step: StepGraph, layout: BucketLayout, simulation: Simulation, machine: Machine, limit_bytes: int
) -> Plan:
    """``plan`` with those gathers merged that make the step faster, and still within the limit.

    Args:
        plan: all other decisions; none of its gathers is merged.
        step: the graph after all passes that carry ``plan`` out.
        layout: the buckets.
        simulation: that of ``step`` on ``machine``.
        machine: its links.
        limit_bytes: what no position of the step may take more of, on the device.
    """
    order, tasks = {node: position for position, node in enumerate(step.calls())}, step.tasks()
    held = [simulation.live.during[node] for node in step.calls()]
    # What this rank has whole in a slower tier is not gathered.
    nodes = {number: tasks.get(Task(Job.GATHER, number)) for number in range(len(plan.gathers))}
    gathers = [_Gather.of(n, node, plan, layout, machine, order[node]) for n, node in nodes.items() if node is not None]
    events, bodies = events_of(step, simulation), loop_bodies(step)
    merged = _Merged()
    seconds = merged.seconds(events)
    group = gathers[:1]
    decisions = list(plan.gathers)
    for gather in gathers[1:]:
        first, latency = group[0], _latency(gather.bucket, machine)
        tried = merged.add_gather(gather, first, gather.seconds - latency)
        span = range(first.position, gather.position)
        alone = gather.position - first.position == len(group)  # nothing runs in between
        tried_seconds = seconds
        together = bodies[gather.name] == bodies[first.name] and _could_join(gather, group, latency)
        if together and all(held[at] + gather.num_bytes <= limit_bytes for at in span):
            tried_seconds = tried.seconds(events)
            margin = _ROUNDING * seconds
            if tried_seconds < seconds - margin or (alone and tried_seconds <= seconds + margin):
                merged, seconds = tried, tried_seconds
                group.append(gather)
                decisions[gather.number] = _join(decisions[gather.number], first, decisions[first.number], latency)
                if not alone:
                    for at in span:
                        held[at] += gather.num_bytes
                continue
        group = [gather]
    return replace(plan, gathers=tuple(decisions))


@dataclass(frozen=True)
class _Gather:
    """A decision: its node's name and position, its bucket, and the seconds that the gather takes by itself."""

    number: int
    name: str
    bucket: Bucket
    position: int
    seconds: float
    from_device: bool

    @property
    def num_bytes(self) -> int:
        return self.bucket.full_bytes

    @staticmethod
    def of(number: int, node: fx.Node, plan: Plan, layout: BucketLayout, machine: Machine, position: int) -> _Gather:
        decision = plan.gathers[number]
        bucket = layout.buckets[decision.bucket]
        seconds = seconds_along("all_gather", bucket.full_bytes, bucket.mesh, bucket.gathered_over, machine)
        away = decision.bucket in plan.away
        return _Gather(number, node.name, bucket, position, seconds, not away)


def _could_join(gather: _Gather, group: Sequence[_Gather], latency: float) -> bool:
    """True if a gather is of a kind with a group, and latency dominates it or the whole of the group."""
    if not (gather.from_device and group[0].from_device):
        return False  # copies to the device set the pace
    if any(gather.bucket.index == other.bucket.index for other in group):
        return False  # two copies of one bucket would be on the device
    if gather.bucket.compute_dtype != group[0].bucket.compute_dtype:
        return False
    if gather.bucket.gathered_over != group[0].bucket.gathered_over:
        return False  # other ranks take part
    transfer = sum(other.seconds - latency for other in group)
    return latency >= min(transfer, gather.seconds - latency)


def _join(decision: GatherDecision, first: _Gather, with_it: GatherDecision, latency: float) -> GatherDecision:
    why = f"as one collective with {first.bucket.name}, which saves {format_seconds(latency)} of latency"
    return replace(decision, issue=with_it.issue, merged=True, reason=f"{decision.reason}; started {why}")


def _latency(bucket: Bucket, machine: Machine) -> float:
    return seconds_along("all_gather", 0, bucket.mesh, bucket.gathered_over, machine)


def _transfer(bucket: Bucket, machine: Machine) -> float:
    """The part of a gather's seconds that its bytes take; the rest is latency."""
    whole = seconds_along("all_gather", bucket.full_bytes, bucket.mesh, bucket.gathered_over, machine)
    return whole - _latency(bucket, machine)


@dataclass(frozen=True)
class _Merged:
    """``first``: with which gather another starts; ``extra``: the seconds that this adds to that one; both by name."""

    first: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)

    def add_gather(self, gather: _Gather, first: _Gather, seconds: float) -> _Merged:
        extra = {**self.extra, first.name: self.extra.get(first.name, 0.0) + seconds}
        return _Merged({**self.first, gather.name: first.name}, extra)

    def seconds(self, events: Sequence[TimedEvent]) -> float:
        """The seconds of a step of these events, with gathers merged."""
        return end_seconds(self._rewrite_events(events))

    def _rewrite_events(self, events: Sequence[TimedEvent]) -> Iterator[TimedEvent]:
        for event in events:
            if isinstance(event, Wait) and event.name in self.first:
                yield replace(event, name=self.first[event.name])
            elif isinstance(event, Start) and event.name in self.extra:
                yield replace(event, legs=(*event.legs, (COLLECTIVE, self.extra[event.name])))
            elif not isinstance(event, Start) or event.name not in self.first:
                yield event
