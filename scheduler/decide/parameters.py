"""Offload of parameters: the bytes that it frees, and what it costs to bring them up for each use.

A bucket's slice is copied to the device for each of its residencies, during the computation of its layer in that
phase, and once more for its update, from which it goes down again during the layer's backward. There the copies of the
bucket's states have the links already: what a slice costs is how much longer both are exposed than the states alone.
Where activations leave too, those of a layer come up in front of the slice that is next: computation waits for them.
Where states leave the device too, and are updated on the host, the slice is there for the update: it takes no more
room, and only its uses cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Phase, origin
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import UnitPhase
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.residency import Residency
from zerofx.scheduler.plan.facts import Tier


def parameter_menus(
    residencies: Sequence[Residency],
    layout: BucketLayout,
    state_bytes: Mapping[int, int],
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
    ledger: Ledger,
    states_off: Mapping[Bucket, Level],
    activation_bytes: int = 0,
    reserve: int = 0,
) -> dict[Bucket, tuple[Level, Level]]:
    """For each bucket: its parameters on the device, and off it.

    Args:
        residencies: when buckets are used (``scheduler.decide.residency.residencies``).
        layout: the buckets.
        state_bytes: bytes of one rank's states and masters, by bucket index.
        seconds: computation by unit and phase.
        machine: its links.
        ledger: where parameters may go; what they take is entered there.
        states_off: where the states of buckets go that leave the device; ``ledger`` is without them.
        activation_bytes: what activations take elsewhere, those of all layers.
        reserve: bytes of the host that are left to those.
    """
    menus = {}
    between = activation_bytes // len(layout.buckets)
    for bucket in layout.buckets:
        size, states = bucket.shard_bytes, states_off.get(bucket)
        with_states = states is not None and states.parameter_bytes > 0
        tier = states.tier if states and with_states else ledger.first(size, reserve)
        # A slice whose parts several ranks update is put together where they can reach it.
        if not size or tier is None or bucket.num_parts > 1 or bucket.is_lent:
            continue
        if not with_states:
            ledger.take(tier, size)
        up, down = copy_seconds(size, tier, "device", machine), copy_seconds(size, "device", tier, machine)
        exposed = copy_seconds(between, tier, "device", machine) if between else 0.0
        for residency in residencies:
            if residency.bucket is bucket:
                exposed += max(0.0, up - seconds.get((bucket.unit, origin(residency.first).phase), 0.0))
        if bucket.trainable and not with_states:
            overlapping, num_bytes = seconds.get((bucket.unit, Phase.BACKWARD), 0.0), state_bytes.get(bucket.index, 0)
            for extra, states_alone in (
                (up, copy_seconds(num_bytes, tier, "device", machine)),
                (down, copy_seconds(num_bytes, "device", tier, machine)),
            ):
                exposed += max(0.0, states_alone + extra - overlapping) - max(0.0, states_alone - overlapping)
        menus[bucket] = (Level(size, 0.0), Level(0, exposed, tier))
    return menus


def copies_menu(
    layout: BucketLayout, state_bytes: Mapping[int, int], tier: Tier, machine: Machine
) -> tuple[Level, Level]:
    """On one rank: copies from ``tier`` that start ahead of their use, and copies that start where they are wanted.

    One bucket with its states is there ahead of time, or every copy is waited for.
    """
    sizes = [bucket.shard_bytes + state_bytes.get(bucket.index, 0) for bucket in layout.own.buckets]
    waited = sum(copy_seconds(size, tier, "device", machine) for size in sizes)
    return Level(max(sizes, default=0), 0.0), Level(0, waited)
