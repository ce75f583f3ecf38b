"""The rows of a schedule: plain data, per node or per instruction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zerofx.scheduler.cost.simulate import Leg


@dataclass(frozen=True)
class ScheduleRow:
    """One node, or one instruction, in the simulated step of one rank.

    ``position`` counts all calls of the graph, views included. ``kind`` is ``"event"`` for a node that is scheduled on
    its own, else ``"node"``, or ``"region"`` for an instruction of many nodes. ``region`` is the function of the
    emitted file, ``layer`` the dotted module path, ``unit`` the repeated layer, ``bucket`` the bucket of an event;
    ``""`` is none.

    ``stream`` is the stream it runs on, ``tier`` the tier of its result; ``legs`` are those of a copy between tiers.
    ``bytes_in`` and ``bytes_out`` are read and written, ``wire_bytes`` sent by the rank. ``live_bytes`` are on the
    device after the row, ``peak_bytes`` while it runs. ``start_seconds`` counts from the step's start,
    ``exposed_seconds`` is the time computation waited just before. ``recompute_seconds`` is the part of ``seconds``
    spent on recomputation for backward.
    """

    position: int
    name: str
    op: str
    kind: str
    region: str
    layer: str
    unit: str
    bucket: str
    phase: str
    stream: str
    bytes_in: int
    bytes_out: int
    live_bytes: int
    peak_bytes: int
    wire_bytes: int
    flops: int
    start_seconds: float
    seconds: float
    exposed_seconds: float
    tier: str = "device"
    legs: tuple[Leg, ...] = ()
    recompute_seconds: float = 0.0


@dataclass(frozen=True)
class Totals:
    """The whole step: peak bytes on the device, seconds, bytes sent, floating-point operations.

    ``slower_peak_bytes`` are those of the slower tiers that it uses, ``link_bytes`` the bytes moved between tiers, by
    stream.
    """

    peak_bytes: int
    step_seconds: float
    exposed_seconds: float
    wire_bytes: int
    flops: int
    slower_peak_bytes: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)


def legs_of(row: ScheduleRow) -> list[ScheduleRow]:
    """A row for each of its legs, on the leg's own stream and in its own time; a row without legs is itself."""
    legs = [
        replace(row, stream=leg.stream, start_seconds=leg.start_seconds, seconds=leg.seconds, legs=())
        for leg in row.legs
    ]
    return legs or [row]
