"""Gradients between micro-batches: summed whole, reduced in each and summed in slices, or away in a slower tier.

With several micro-batches a rank holds the gradient buffers of all buckets from the first backward on, in whole, where
they are reduced once, after the last. Reduced in each micro-batch, they leave this rank's slice of their sum, and are
sent as often as there are micro-batches. A buffer that waits in a slower tier is on the device only while its unit's
backward runs; for each pair of micro-batches it goes down once and comes up once, during the backward of the units
after it and before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerofx.choices import ReduceOption
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Phase
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import Positions, UnitPhase, UnitRun, runs
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.units import format_bytes


def gradients_asked(layout: BucketLayout, num_micro_batches: int, tier: Tier | None) -> tuple[Absence, ...]:
    """That all gradients wait in ``tier`` between micro-batches, before copies are placed; nothing if it is None."""
    if tier is None or num_micro_batches == 1:
        return ()
    return tuple(
        Absence(
            kind="gradients", bucket=bucket.index, tier=tier, num_bytes=bucket.gradient_bytes,
            reason=f"as asked: frees {format_bytes(bucket.gradient_bytes)} between micro-batches",
        )
        for bucket in layout.buckets
        if bucket.trainable and bucket.gradient_bytes
    )  # fmt: skip


def slice_bytes(bucket: Bucket) -> int:
    """Bytes of the sum of this rank's slices of a bucket's gradients, in the dtype that it is updated in."""
    return bucket.shard_numel * bucket.dtype.itemsize


def buckets_reduced_each(
    layout: BucketLayout, stage: int, num_micro_batches: int, asked: ReduceOption, *, searched: bool
) -> dict[int, str]:
    """The buckets whose gradients are reduced in each micro-batch before any move is made, with reasons.

    Stages 2 and 3 stand for gradients in slices. Where a budget is searched for (``searched``) memory is what that has
    to give: whole buffers are sent least, and give way to slices first.
    """
    if num_micro_batches == 1 or asked == "once":
        return {}
    reduced = [bucket for bucket in layout.buckets if bucket.trainable and bucket.may_reduce_each(stage)]
    if asked == "each":
        return {bucket.index: "reduced in each micro-batch, as asked" for bucket in reduced}
    if searched or stage == 1:
        return {}
    return {
        bucket.index: f"reduced in each micro-batch: stage {stage} holds slices of gradients"
        for bucket in reduced
        if slice_bytes(bucket) < bucket.gradient_bytes
    }


def gradient_menus(
    layout: BucketLayout,
    stage: int,
    num_micro_batches: int,
    asked: ReduceOption,
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
    ledger: Ledger,
) -> dict[Bucket, tuple[Level, ...]]:
    """For each trained bucket: its gradients whole on the device between micro-batches, in slices, and off it.

    Args:
        layout: the buckets.
        stage: gradients are reduced in each micro-batch at stages 1 to 3, on several ranks.
        num_micro_batches: with one, there is nothing to decide.
        asked: whether they are reduced in each micro-batch as a search finds, never, or always, and then nothing is
            left to decide.
        seconds: computation by unit and phase in one micro-batch.
        machine: its links.
        ledger: where gradients may go; what they take is entered there.

    Slices are what stages 2 and 3 stand for: there a reduction in each micro-batch counts 0 seconds, so that a search
    takes that level before anything is computed again or offloaded.
    """
    menus = {}
    for bucket in layout.buckets:
        size = bucket.gradient_bytes
        if num_micro_batches == 1 or not bucket.trainable or not size or asked == "each":
            continue
        overlapping = seconds.get((bucket.unit, Phase.BACKWARD), 0.0)
        levels = [Level(size, 0.0)]
        if asked == "auto" and bucket.may_reduce_each(stage) and slice_bytes(bucket) < size:
            reduction = seconds_along("reduce_scatter", size, bucket.mesh, bucket.gathered_over, machine)
            exposed = (num_micro_batches - 1) * max(0.0, reduction - overlapping)
            counted = exposed if stage == 1 else 0.0
            levels.append(Level(slice_bytes(bucket), counted, each=True, exposed_seconds=exposed))
        tier = ledger.first(size)
        if tier is not None:
            ledger.take(tier, size)
            exposed = sum(
                max(0.0, copy_seconds(size, *ends, machine) - overlapping)
                for ends in (("device", tier), (tier, "device"))
            )
            levels.append(Level(0, (num_micro_batches - 1) * exposed, tier))
        if len(levels) > 1:
            menus[bucket] = tuple(levels)
    return menus


def place_gradients(
    decisions: Sequence[Absence],
    step: StepGraph,
    layout: BucketLayout,
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
) -> tuple[Absence, ...]:
    """``decisions`` with the nodes after which copies out are awaited, and before which copies back start.

    ``step`` is the captured graph with tiles and recomputation carried out, ``seconds`` its computation by unit and
    phase. Each copy has the seconds of the runs of units next to its own, as many as it takes, and no more than half of
    what lies between the two backwards.
    """
    if not decisions:
        return ()
    spans = runs(step, seconds)
    at, placed = Positions(step, spans), []
    for decision in decisions:
        slots = layout.buckets[decision.bucket].slots
        used = [[at.run_of(shares[slot.name]) for slot in slots] for shares in step.gradients_by_body]
        frees, reloads = [], []
        for before, after in itertools.pairwise(used):
            last, first = max(before), min(after)
            middle = (last + first) // 2
            out = copy_seconds(decision.num_bytes, "device", decision.tier, machine)
            back = copy_seconds(decision.num_bytes, decision.tier, "device", machine)
            free = next((n for n in range(last + 1, middle + 1) if _seconds_between(spans, last + 1, n) >= out), middle)
            reload = next(
                (n for n in range(first - 1, middle, -1) if _seconds_between(spans, n, first - 1) >= back), middle + 1
            )
            border = at.begin_of_body(first)
            if last < border:  # a round of a loop begins and ends with the gradients away
                free, reload = min(free, border - 1), max(reload, border)
            frees.append(spans[max(last, free)].last.name)
            reloads.append(spans[min(first, reload)].first.name)
        placed.append(replace(decision, free_after=tuple(frees), reload_before=tuple(reloads)))
    return tuple(placed)


def _seconds_between(spans: Sequence[UnitRun], first: int, last: int) -> float:
    """Seconds from the start of one run to the end of another."""
    return spans[last].end_seconds - spans[first].start_seconds
