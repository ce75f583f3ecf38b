"""Offload of gradients between micro-batches: the bytes that it frees, what it costs, and when they are copied.

With several micro-batches a rank holds the gradient buffers of all buckets from the first backward on, in whole. A
buffer that waits in a slower tier is on the device only while its unit's backward runs; for each pair of micro-batches
it goes down once and comes up once, during the backward of the units after it and before it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Phase
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_bodies
from zerofx.scheduler.cost.machine import Machine, copy_seconds, first_with_room
from zerofx.scheduler.cost.timeline import Place, Run, runs
from zerofx.scheduler.plan.decisions import GradientDecision
from zerofx.scheduler.plan.tiers import Tier
from zerofx.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Waiting:
    """One level of a menu about gradients between micro-batches: bytes on the device, exposed seconds, tier."""

    num_bytes: int
    seconds: float
    tier: Tier = "device"

    def decision(self, bucket: Bucket, freed_bytes: int) -> GradientDecision:
        """The decision, with its reason, before its copies are placed."""
        reason = f"frees {format_bytes(freed_bytes)} between micro-batches for {format_seconds(self.seconds)} exposed"
        return GradientDecision(bucket.index, self.tier, bucket.full_bytes, (), (), reason)


def gradients_asked(layout: BucketLayout, num_micro_batches: int, tier: Tier | None) -> tuple[GradientDecision, ...]:
    """That all gradients wait in ``tier`` between micro-batches, before copies are placed; nothing if it is None."""
    if tier is None or num_micro_batches == 1:
        return ()
    return tuple(
        GradientDecision(
            bucket.index, tier, bucket.full_bytes, (), (),
            f"as asked: frees {format_bytes(bucket.full_bytes)} between micro-batches",
        )
        for bucket in layout.buckets
        if bucket.trainable and bucket.full_bytes
    )  # fmt: skip


def gradient_menus(
    layout: BucketLayout,
    num_micro_batches: int,
    seconds: Mapping[Place, float],
    machine: Machine,
    capacity: Mapping[Tier, int],
) -> dict[Bucket, tuple[Waiting, Waiting]]:
    """For each trained bucket: its gradients on the device between micro-batches, and off it.

    Args:
        layout: the buckets.
        num_micro_batches: with one, there is nothing to decide.
        seconds: computation by unit and phase in one micro-batch.
        machine: its links.
        capacity: bytes that each slower tier has for a rank's gradients; the first is filled first.
    """
    left, menus = dict(capacity), {}
    for bucket in layout.buckets:
        size = bucket.full_bytes
        tier = first_with_room(left, size)
        if num_micro_batches == 1 or not bucket.trainable or not size or tier is None:
            continue
        left[tier] -= size
        overlapping = seconds.get((bucket.unit, Phase.BACKWARD), 0.0)
        exposed = sum(
            max(0.0, copy_seconds(size, *ends, machine) - overlapping) for ends in (("device", tier), (tier, "device"))
        )
        menus[bucket] = (Waiting(size, 0.0), Waiting(0, (num_micro_batches - 1) * exposed, tier))
    return menus


def place_gradients(
    decisions: Sequence[GradientDecision],
    step: StepGraph,
    layout: BucketLayout,
    seconds: Mapping[Place, float],
    machine: Machine,
) -> tuple[GradientDecision, ...]:
    """``decisions`` with the nodes after which copies out are awaited, and before which copies back start.

    ``step`` is the captured graph with tiles and recomputation carried out, ``seconds`` its computation by unit and
    phase. Each copy has the seconds of the runs of units next to its own, as many as it takes, and no more than half of
    what lies between the two backwards.
    """
    if not decisions:
        return ()
    spans = runs(step, seconds)
    order, numbers = step.positions(), loop_bodies(step)
    bodies = [numbers[run.first.name] for run in spans]
    starts = [order[run.first] for run in spans]

    def run_of(node: fx.Node) -> int:
        return max(0, bisect_right(starts, order[node]) - 1)

    placed = []
    for decision in decisions:
        tier: Tier = "host" if decision.tier == "host" else "nvme"
        slots = layout.buckets[decision.bucket].slots
        used = [[run_of(shares[slot.name]) for slot in slots] for shares in step.gradients_by_body]
        frees, reloads = [], []
        for before, after in itertools.pairwise(used):
            last, first = max(before), min(after)
            middle = (last + first) // 2
            out = copy_seconds(decision.num_bytes, "device", tier, machine)
            back = copy_seconds(decision.num_bytes, tier, "device", machine)
            free = next((n for n in range(last + 1, middle + 1) if _between(spans, last + 1, n) >= out), middle)
            reload = next(
                (n for n in range(first - 1, middle, -1) if _between(spans, n, first - 1) >= back), middle + 1
            )
            if bodies[last] != bodies[first]:  # a round of a loop begins and ends with the gradients away
                border = bodies.index(bodies[first])
                free, reload = min(free, border - 1), max(reload, border)
            frees.append(spans[max(last, free)].last.name)
            reloads.append(spans[min(first, reload)].first.name)
        placed.append(replace(decision, free_after=tuple(frees), reload_before=tuple(reloads)))
    return tuple(placed)


def _between(spans: Sequence[Run], first: int, last: int) -> float:
    """Seconds from the start of one run to the end of another."""
    return spans[last].end_seconds - spans[first].start_seconds
