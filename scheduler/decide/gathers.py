"""Memory for collectives: which buckets stay gathered between forward and backward, and how far ahead gathers are
issued.

A bucket that is kept saves its second gather, as far as that was not hidden: in backward, the gather and the reduction
of a layer overlap with the computation of one layer. A gather issued a layer ahead overlaps with that layer, and has
its bucket on the device for as long. A reduction that is awaited a layer later overlaps with that layer, and has its
buffer and the reduced slice on the device for as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Phase
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import UnitPhase
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.decide.residency import PolicyOptions, Residency
from zerofx.units import format_bytes, format_seconds


def keep_menus(
    residencies: Sequence[Residency], options: PolicyOptions, seconds: Mapping[UnitPhase, float], machine: Machine
) -> dict[Bucket, tuple[Level, Level]]:
    """For each bucket whose second gather would be exposed: kept, and gathered again; in order of first use."""
    times = Counter(residency.bucket for residency in residencies)
    menus = {}
    for bucket in sorted(times, key=lambda bucket: bucket.index):
        if times[bucket] < 2 or options.keeps(bucket):
            continue
        overlapping = _overlap_seconds(bucket, Phase.BACKWARD, seconds) if options.prefetch else 0.0
        gather = seconds_along("all_gather", bucket.full_bytes, bucket.mesh, bucket.gathered_over, machine)
        reduction = seconds_along("reduce_scatter", bucket.gradient_bytes, bucket.mesh, bucket.gathered_over, machine)
        if not bucket.trainable:
            reduction = 0.0
        exposed = max(0.0, gather + reduction - overlapping) - max(0.0, reduction - overlapping)
        if exposed > 0:
            again = (times[bucket] - 1) * exposed
            menus[bucket] = (Level(bucket.full_bytes, 0.0), Level(0, again))
    return menus


def reason_to_keep(bucket: Bucket, released: Level) -> str:
    """The reason of a bucket that is kept rather than ``released`` in between."""
    return f"holding {format_bytes(bucket.full_bytes)} saves {format_seconds(released.seconds)} of exposed gathering"


def prefetch_menu(
    residencies: Sequence[Residency],
    layout: BucketLayout,
    prefetch: int,
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
) -> tuple[Level, ...]:
    """The levels from gathers issued ``prefetch`` units ahead to gathers issued where they are needed.

    All but the last hide what fits into the computation of a unit; one more unit ahead holds one more unit.
    """
    units: Counter[str] = Counter()
    for bucket in layout.buckets:
        units[bucket.unit] += bucket.full_bytes
    hidden = 0.0
    for residency in residencies:
        bucket = residency.bucket
        gather = seconds_along("all_gather", bucket.full_bytes, bucket.mesh, bucket.gathered_over, machine)
        hidden += min(gather, _overlap_seconds(bucket, Phase.FORWARD, seconds))
    largest = max(units.values(), default=0)
    return tuple(Level(ahead * largest, 0.0 if ahead else hidden) for ahead in range(prefetch, -1, -1))


def reduction_menu(layout: BucketLayout, seconds: Mapping[UnitPhase, float], machine: Machine) -> tuple[Level, Level]:
    """The levels of reductions that are awaited a unit later, and where they are issued."""
    held, hidden = 0, 0.0
    for bucket in filter(lambda bucket: bucket.trainable, layout.buckets):
        held = max(held, bucket.gradient_bytes + bucket.gradient_slice_bytes)
        reduction = seconds_along("reduce_scatter", bucket.gradient_bytes, bucket.mesh, bucket.gathered_over, machine)
        hidden += min(reduction, _overlap_seconds(bucket, Phase.BACKWARD, seconds))
    return Level(held, 0.0), Level(0, hidden)


def _overlap_seconds(bucket: Bucket, phase: Phase, seconds: Mapping[UnitPhase, float]) -> float:
    """Computation that a collective of the bucket overlaps with: that of a unit, or of what is outside all units."""
    return seconds.get((bucket.unit, phase), seconds.get(("", phase), 0.0))
