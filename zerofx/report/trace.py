"""A schedule in the Trace Event format, which Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMCN4PYSPXyzRKpKtVQ (times are in microseconds)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerofx.ir.streams import STREAMS, sort_streams
from zerofx.report.rows import ScheduleRow, legs_of

_PROCESS = 0


def chrome_trace(
    rows: Sequence[ScheduleRow],
    instructions: Sequence[ScheduleRow],
    memory: Sequence[tuple[float, Mapping[str, int]]],
    slower_memory: Mapping[str, Sequence[tuple[float, int]]],
) -> dict[str, Any]:
    """A track per stream, with regions around their nodes and waits of the computation, and memory curves.

    Args:
        rows: the nodes.
        instructions: the same as regions and events.
        memory: seconds from the step's start, and bytes on the device by category, in order.
        slower_memory: seconds and bytes, by slower tier.
    """
    events: list[dict[str, Any]] = [_name_event("process_name", 0, "zerofx step (predicted, one rank)")]
    used = {"compute", "collective", *(leg.stream for row in rows for leg in row.legs)}
    used |= {row.stream for row in rows if row.stream not in STREAMS}  # of collectives along other axes
    tracks = {stream: number for number, stream in enumerate(sort_streams({*STREAMS, *used}), 1)}
    events += [_name_event("thread_name", track, stream) for stream, track in tracks.items() if stream in used]
    events += [_slice(row, row.region, tracks) for row in instructions if row.kind == "region" and row.seconds]
    events += [_slice(leg, row.name, tracks) for row in rows for leg in legs_of(row) if leg.seconds]
    events += [_stall(row, tracks) for row in rows if row.exposed_seconds and row.stream == "compute"]
    categories = list(dict.fromkeys(category for _, held in memory for category in held))
    events += [
        {
            "ph": "C",
            "pid": _PROCESS,
            "name": "device memory",
            "ts": seconds * 1e6,
            "args": {category: held.get(category, 0) for category in categories},
        }
        for seconds, held in memory
    ]
    events += [
        {"ph": "C", "pid": _PROCESS, "name": f"{tier} memory", "ts": seconds * 1e6, "args": {"bytes": size}}
        for tier, curve in slower_memory.items()
        for seconds, size in curve
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name_event(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": what, "args": {"name": name}}


def _slice(row: ScheduleRow, name: str, tracks: Mapping[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": tracks[row.stream],
        "name": name,
        "cat": row.phase,
        "ts": row.start_seconds * 1e6,
        "dur": row.seconds * 1e6,
        "args": {
            "op": row.op,
            "layer": row.layer or "(model)",
            "bytes in": row.bytes_in,
            "bytes out": row.bytes_out,
            "bytes sent": row.wire_bytes,
            "live bytes": row.live_bytes,
            "tier": row.tier,
            "FLOPs": row.flops,
        },
    }


def _stall(row: ScheduleRow, tracks: Mapping[str, int]) -> dict[str, Any]:
    """The wait of the computation just before the row starts."""
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": tracks["compute"],
        "name": f"waits for {row.bucket or row.layer}",
        "cat": "exposed",
        "ts": (row.start_seconds - row.exposed_seconds) * 1e6,
        "dur": row.exposed_seconds * 1e6,
        "args": {"layer": row.layer},
    }
