"""Overlap of collectives with computation, as far as memory allows.

Gathers and reductions that are awaited where they are issued hold no buffer longer than is needed, and computation
waits for them. A gather that is issued a unit ahead, or a reduction that is awaited a unit later, overlaps with that
unit's computation, with its buffers on the device. A plan that gives this up as a whole, because the step is too large
at a few positions, gets it back here wherever else there is room: one collective after the other, in order, if the
limit holds at every position that it spans.

What is held longer only adds to memory, so that a smaller limit never leads to a higher peak: up to the first
collective that it refuses all is decided alike, and that one would have led above it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerofx.ir.aliasing import storage_source
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import start_of_unit
from zerofx.ir.facts import Job, Task
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_bodies
from zerofx.scheduler.cost.simulate import Simulation
from zerofx.scheduler.plan.decisions import GatherDecision, ReduceDecision
from zerofx.scheduler.plan.plan import Plan

LAST_REDUCTION = "the last reduction: awaited where the step ends"


def issue_ahead(
    gathers: Sequence[GatherDecision], layout: BucketLayout, distance: int, bodies: Mapping[str, int]
) -> tuple[GatherDecision, ...]:
    """``gathers``, each issued where it is needed, issued ``distance`` units ahead instead.

    The buckets of one unit are needed together, and are gathered ahead together. ``bodies`` are those of
    ``zerofx.ir.micro_batches.loop_bodies``, for all nodes that gathers are needed at.
    """
    runs = itertools.groupby(gathers, key=lambda gather: (layout.buckets[gather.bucket].unit, bodies[gather.first]))
    together = [list(run) for _, run in runs]
    places = [bodies[run[0].first] for run in together]
    issued = []
    for number, gather in ((n, gather) for n, run in enumerate(together) for gather in run):
        # Without slices nothing is issued ahead: a bucket that comes from a slower tier is copied, not gathered.
        units = (
            min(number - places.index(places[number]), distance) if layout.buckets[gather.bucket].num_ranks > 1 else 0
        )
        earlier = together[number - units][0]
        hidden = f", issued {units} ahead to overlap with {layout.buckets[earlier.bucket].name}" if units else ""
        issued.append(replace(gather, issue=earlier.first, reason=gather.reason + hidden))
    return tuple(issued)


def await_later(reduces: Sequence[ReduceDecision], layout: BucketLayout) -> tuple[ReduceDecision, ...]:
    """``reduces``, each awaited where its bucket's gradients are complete, awaited a unit later instead; what crosses
    replicas where that is starts there."""
    awaited = []
    for number, reduce in enumerate(reduces):
        unit = layout.buckets[reduce.bucket].unit
        # A bucket of the same unit is complete at about the same time: there is nothing to overlap with.
        following = next((late for late in reduces[number + 1 :] if layout.buckets[late.bucket].unit != unit), None)
        if following is None:
            place, reason = None, LAST_REDUCTION
        else:
            name = layout.buckets[following.bucket].name
            reason = f"awaited when the gradients of {name} are complete, to overlap with their computation"
            place = following.wait_after
        crossed_after = place if reduce.crossed_after != "" else ""
        awaited.append(replace(reduce, wait_after=place, crossed_after=crossed_after, reason=reason))
    return tuple(awaited)


def gather_later(reduces: Sequence[ReduceDecision]) -> tuple[ReduceDecision, ...]:
    """``reduces`` of stage 0, in order, the sum of each gathered while the next one is awaited."""
    gathered = list(reduces)
    for number, (reduce, following) in enumerate(itertools.pairwise(reduces)):
        reason = f"{reduce.reason}; the sum is gathered until the next reduction is awaited"
        gathered[number] = replace(reduce, reason=reason, gathered_after=following.wait_after)
    return tuple(gathered)


def crossings(
    reduces: Sequence[ReduceDecision], layout: BucketLayout, stage: int, *, later: bool
) -> tuple[ReduceDecision, ...]:
    """``reduces``, in order, those that cross replicas awaited where that starts, or ``later``, where the following
    one does; sums that all replicas update with are then gathered until the one after that starts."""
    placed = list(reduces)
    for number, reduce in enumerate(reduces):
        bucket = layout.buckets[reduce.bucket]
        if not bucket.crosses:
            continue
        place, reason = reduce.wait_after, reduce.reason
        if later:
            place = next((late.wait_after for late in reduces[number + 1 :]), None)
            reason += "; summed across replicas until the next reduction is awaited"
        gathered_after = reduce.gathered_after
        is_gathered = bucket.num_parts == 1 if stage else gathered_after != ""
        if is_gathered and later:
            gathered_after = next((late.wait_after for late in reduces[number + 2 :]), None)
        placed[number] = replace(reduce, crossed_after=place, gathered_after=gathered_after, reason=reason)
    return tuple(placed)


def hide_collectives(
    plan: Plan, step: StepGraph, layout: BucketLayout, simulation: Simulation, prefetch: int, limit_bytes: int
) -> Plan:
    """``plan`` with collectives that overlap with computation as far as the limit allows.

    Args:
        plan: all decisions. Collectives that overlap already stay so.
        step: the graph after all passes that carry ``plan`` out.
        layout: the buckets.
        simulation: that of ``step``.
        prefetch: units that gathers may be issued ahead.
        limit_bytes: what no position of the step may take more of, on the device.
    """
    slack = _Room(step, simulation, limit_bytes)
    away = plan.away  # copies from slower tiers set the pace
    gathers = list(plan.gathers)
    if plan.gathers_parameters and all(gather.issue == gather.first for gather in gathers):
        for number, early in enumerate(issue_ahead(gathers, layout, prefetch, loop_bodies(step))):
            bucket = layout.buckets[early.bucket]
            if early.bucket not in away and slack.takes_gather(number, early, bucket.full_bytes):
                gathers[number] = early
    # What only this rank has of parameters in parts is not summed with anybody.
    reduces = [reduce for reduce in plan.reduces if layout.buckets[reduce.bucket].num_reduced > 1]
    if reduces and all(reduce.wait_after is not None for reduce in reduces):
        # Where each reduction is issued, by where its gradients are complete.
        issued = {reduce.wait_after: reduce.bucket for reduce in reduces}
        for number, late in enumerate(await_later(reduces, layout)):
            bucket = layout.buckets[late.bucket]
            result_bytes = bucket.gradient_bytes if plan.stage == 0 else bucket.gradient_slice_bytes
            if slack.takes_reduction(late.bucket, issued.get(late.wait_after), result_bytes):
                reduces[number] = late
        if plan.stage == 0:
            for number, late in enumerate(gather_later(reduces)[:-1]):
                first, last = issued.get(late.wait_after), issued.get(late.gathered_after)
                if slack.takes_sum(first, last, layout.buckets[late.bucket].gradient_bytes):
                    reduces[number] = late
        for number, late in enumerate(crossings(reduces, layout, plan.stage, later=True)):
            bucket = layout.buckets[late.bucket]
            first, last = issued.get(late.wait_after), issued.get(late.crossed_after)
            if bucket.crosses and slack.takes_sum(first, last, 2 * bucket.gradient_slice_bytes):
                reduces[number] = late
    placed = {reduce.bucket: reduce for reduce in reduces}
    return replace(
        plan, gathers=tuple(gathers), reduces=tuple(placed.get(reduce.bucket, reduce) for reduce in plan.reduces)
    )


class _Room:
    """Bytes below the limit at every position of a step."""

    def __init__(self, step: StepGraph, simulation: Simulation, limit_bytes: int) -> None:
        calls, self._live = list(step.calls()), simulation.live
        self._step, self._by_name, self._tasks = step, step.nodes_by_name(), step.tasks()
        self._order = {node: position for position, node in enumerate(calls)}
        self._left = [limit_bytes - self._live.during[node] for node in calls]

    def takes_gather(self, number: int, early: GatherDecision, num_bytes: int) -> bool:
        """Hold a gathered bucket from where ``early`` issues it, if it fits."""
        first = start_of_unit(self._step, self._by_name[early.issue])
        return self._take((self._order[first], self._order[self._tasks[Task(Job.GATHER, number)]], num_bytes))

    def takes_reduction(self, bucket: int, until: int | None, result_bytes: int) -> bool:
        """Hold what a reduction works on, and its result, to the update after that of the bucket ``until``, if it fits.

        None: to the end of the step.
        """
        awaited, stop = self._tasks[Task(Job.GRADIENT, bucket)], self._place(until) + 1
        given_back = self._live.after[awaited.prev] - self._live.after[awaited]
        updated = self._live.last_use.get(storage_source(awaited), awaited)
        return self._take((self._order[awaited] + 1, stop, given_back), (self._order[updated] + 1, stop, result_bytes))

    def takes_sum(self, first: int | None, until: int | None, num_bytes: int) -> bool:
        """Hold gradients from the update after the reduction of the bucket ``first`` to that after that of ``until``,
        if they fit; None: to the end of the step.
        """
        return self._take((self._place(first) + 1, self._place(until) + 1, num_bytes))

    def _place(self, bucket: int | None) -> int:
        return self._order[self._tasks[Task(Job.REDUCTION, bucket)]] if bucket is not None else len(self._left) - 1

    def _take(self, *spans: tuple[int, int, int]) -> bool:
        """Take bytes from each first position to what is after the last, if all of it fits."""
        needed: Counter[int] = Counter()
        for first, stop, num_bytes in spans:
            needed.update(dict.fromkeys(range(first, stop), num_bytes))
        if any(self._left[position] < num_bytes for position, num_bytes in needed.items()):
            return False
        for position, num_bytes in needed.items():
            self._left[position] -= num_bytes
        return True
