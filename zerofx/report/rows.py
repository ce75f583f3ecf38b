"""The rows of a schedule: plain data, per node or per instruction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One node, or one instruction, in the simulated step of one rank.

    ``position`` counts all calls of the graph, views included. ``kind`` is ``"event"`` for what is scheduled on its
    own, else ``"node"``, or ``"region"`` for an instruction of many nodes. ``region`` is the function of the emitted
    file, ``layer`` the dotted module path, ``unit`` the repeated layer, ``bucket`` the bucket of an event; ``""`` is
    none.

    ``bytes_in`` and ``bytes_out`` are read and written in device memory, ``wire_bytes`` what the rank sends.
    ``live_bytes`` are on the device behind the row, ``peak_bytes`` while it runs. ``start_seconds`` counts from the
    step's begin, ``exposed_seconds`` is how long computation waited just before.
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


@dataclass(frozen=True)
class Totals:
    """The whole step: peak bytes on the device, seconds, bytes sent, floating-point operations."""

    peak_bytes: int
    step_seconds: float
    exposed_seconds: float
    wire_bytes: int
    flops: int
