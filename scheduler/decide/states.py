"""Offload of optimizer states: the bytes that it frees, what it costs, and on which side the update is cheaper.

A bucket's states and fp32 masters come up for its update and go down again (``update="device"``): copies that overlap
with the backward computation of the bucket's layer, of which the longer is exposed as far as it takes longer. Or the
update runs on the host (``update="host"``; ZeRO-Offload, 2101.06840): the gradient goes down, the host computes, and
the updated parameters come up, all while computation goes on. Either is priced here as if it were the only one; which
buckets go which way is balanced once it is known how many leave the device (``update_sides.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import Phase
from zerofx.ir.operators.elementwise import OPERATORS
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.timeline import UnitPhase
from zerofx.scheduler.cost.transfers import copy_seconds
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.units import format_bytes

_FLOPS = OPERATORS["_fused_adam_"].per_element


def state_menus(
    layout: BucketLayout,
    state_bytes: Mapping[int, int],
    stage: int,
    seconds: Mapping[UnitPhase, float],
    machine: Machine,
    ledger: Ledger,
    activation_bytes: int = 0,
    *,
    clipped: bool = False,
    on_device: Collection[int] = (),
    at_end: Collection[int] = (),
) -> dict[Bucket, tuple[Level, Level]]:
    """For each bucket with states, the last layers first: on the device, and off it.

    Args:
        layout: the buckets.
        state_bytes: bytes of one rank's states and masters, by bucket index.
        stage: the ZeRO stage.
        seconds: computation by unit and phase.
        machine: its links and its host.
        ledger: where states may go; what they take is entered there.
        activation_bytes: what activations may take of the host, which states that do not all fit there leave to them.
        clipped: whether updates are after all reductions: no backward overlaps with them, and gradients of buckets that
            are updated on the host wait there.
        on_device: the buckets that can be updated on the device alone.
        at_end: those whose update is one, where the step ends, which nothing overlaps with.
    """
    ways = {}
    # Gradients of the last layers are complete first, and the rest of backward hides most of their updates.
    for bucket in reversed(layout.buckets):
        num_bytes = state_bytes.get(bucket.index, 0)
        if num_bytes:
            local = bucket.updated_numel(stage)
            overlapping = 0.0 if clipped or bucket.index in at_end else seconds.get((bucket.unit, Phase.BACKWARD), 0.0)
            ways[bucket] = [
                _device_level(num_bytes, overlapping, tier, machine)
                if bucket.index in on_device
                else _cheaper_level(bucket, num_bytes, local, overlapping, tier, machine, clipped=clipped)
                for tier in ledger.tiers
            ]
    untouched = ledger.copy()
    levels = _fill_tiers(ways, ledger)
    if len(levels) < len(ways) and ledger.tiers[:2] == ("host", "nvme"):
        # Not all go to the host: some of it is left to what passes through on its way to nvme and back.
        passing = 4 * max(state_bytes.values())
        activations = host_bytes_for_activations(activation_bytes, machine.host_bytes_per_rank)
        ledger.left = untouched.left
        levels = _fill_tiers(ways, ledger, passing + activations)
    ledger.take_buffers(levels.values())
    return {bucket: (Level(state_bytes[bucket.index], 0.0), off) for bucket, off in levels.items()}


def host_bytes_for_activations(activation_bytes: int, host_bytes: int) -> int:
    """Bytes of ``host_bytes`` left to ``activation_bytes`` where not all fits, at most half: their way to nvme takes as
    long as that of states, and buffers on the host."""
    return min(activation_bytes, host_bytes // 2)


def _fill_tiers(ways: Mapping[Bucket, Sequence[Level]], ledger: Ledger, reserve: int = 0) -> dict[Bucket, Level]:
    """The first of each bucket's levels that fits; buckets without one are left out."""
    placed = {bucket: ledger.place(levels, reserve) for bucket, levels in ways.items()}
    return {bucket: level for bucket, level in placed.items() if level is not None}


def _cheaper_level(
    bucket: Bucket, num_bytes: int, numel: int, overlapping: float, tier: Tier, machine: Machine, *, clipped: bool
) -> Level:
    """The states of ``numel`` elements in ``tier``, updated where that exposes less.

    ``overlapping``: seconds of computation that copies overlap with. ``clipped``: as for ``state_menus``.
    """
    gradient_bytes = numel * bucket.reduce_dtype.itemsize
    through = _device_level(num_bytes, overlapping, tier, machine)
    on_host = max(0.0, _host_update_seconds(bucket, num_bytes, numel, tier, machine) - overlapping)
    if through.seconds <= on_host:
        return through
    # What is updated on the host has its parameters there, and takes gradients and gives parameters back.
    parameter_bytes = 0 if bucket.has_master else numel * bucket.dtype.itemsize
    stored, new_bytes = num_bytes + parameter_bytes, numel * bucket.compute_dtype.itemsize
    if tier == "nvme":
        passing, waiting = gradient_bytes + new_bytes + stored, gradient_bytes if clipped else 0
        return Level(0, on_host, tier, "host", stored, passing, waiting, parameter_bytes)
    # They are there until the step ends.
    stored += gradient_bytes + (new_bytes if bucket.has_master else 0)
    return Level(0, on_host, tier, "host", stored, parameter_bytes=parameter_bytes)


def _device_level(num_bytes: int, overlapping: float, tier: Tier, machine: Machine) -> Level:
    """States in ``tier`` that come up to the device for their update."""
    up, down = copy_seconds(num_bytes, tier, "device", machine), copy_seconds(num_bytes, "device", tier, machine)
    seconds = max(0.0, max(up, down) - overlapping)
    return Level(0, seconds, tier, "device", num_bytes, num_bytes if tier == "nvme" else 0)


def _host_update_seconds(bucket: Bucket, num_bytes: int, numel: int, tier: Tier, machine: Machine) -> float:
    seconds = copy_seconds(numel * bucket.reduce_dtype.itemsize, "device", "host", machine)
    seconds += host_seconds(bucket, num_bytes, numel, machine)
    if tier == "nvme":
        seconds += copy_seconds(num_bytes, "nvme", "host", machine)
    return seconds


def host_seconds(bucket: Bucket, num_bytes: int, numel: int, machine: Machine) -> float:
    """Seconds of the host's for an update of ``numel`` elements in one pass over its memory."""
    return machine.host_seconds(_FLOPS * numel, update_traffic_bytes(bucket, num_bytes, numel))


def update_traffic_bytes(bucket: Bucket, num_bytes: int, numel: int) -> int:
    """Bytes that an update of ``numel`` elements reads and writes in one pass: it reads the gradient, reads and writes
    ``num_bytes`` of states and what it updates, and writes new parameters where they are a cast."""
    updated = 0 if bucket.has_master else numel * bucket.dtype.itemsize
    new = numel * bucket.compute_dtype.itemsize if bucket.has_master else 0
    return 2 * (num_bytes + updated) + numel * bucket.reduce_dtype.itemsize + new


def delay_levels(
    layout: BucketLayout, state_bytes: Mapping[int, int], stage: int, on_device: Collection[int] = ()
) -> dict[Bucket, Level]:
    """States on the host, each bucket's with what its delayed update hands over from one step to the next: the
    gradient, and new parameters where their dtype is not the one that is updated. Of buckets that are updated
    ``on_device``, in their own step, only states.

    Args:
        layout: the buckets.
        state_bytes: bytes of one rank's states and masters, by bucket index.
        stage: the ZeRO stage.
        on_device: the buckets that can be updated on the device alone.
    """
    levels = {}
    for bucket in layout.buckets:
        if not bucket.trainable:
            continue
        local = bucket.updated_numel(stage)
        num_bytes = state_bytes.get(bucket.index, 0)
        if bucket.index in on_device:
            if num_bytes:
                levels[bucket] = Level(0, 0.0, "host", "device", num_bytes, 0, delayed_bytes=num_bytes)
            continue
        master = 0 if bucket.has_master else local * bucket.dtype.itemsize
        new_values = bucket.compute_dtype.itemsize if bucket.has_master else 0
        handed_over = local * (bucket.reduce_dtype.itemsize + new_values)
        levels[bucket] = Level(0, 0.0, "host", "host", num_bytes + master + handed_over, 0, delayed_bytes=num_bytes)
    return levels


def decisions_of(delayed: Mapping[Bucket, Level]) -> tuple[Absence, ...]:
    """The decisions about ``delay_levels``, with their reasons."""
    decisions = []
    for bucket, placement in delayed.items():
        frees, is_delayed = format_bytes(placement.delayed_bytes), placement.update == "host"
        how = "gradients down, parameters up" if is_delayed else "whole parameters, updated on the device in each step"
        reason = f"delayed_update: frees {frees}; {how}"
        decisions.append(
            Absence(
                kind="states", bucket=bucket.index, tier="host", update=placement.update, reason=reason,
                delayed=is_delayed,
            )
        )  # fmt: skip
    return tuple(decisions)
