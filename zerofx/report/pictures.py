"""Pictures of a schedule as SVG: memory over the step, and the work of each stream; as large as their pixels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zerofx.ir.streams import COMPUTE, HOST, sort_streams
from zerofx.report.axes import LEFT, RIGHT, byte_axis, draw_dashed_line, steps, svg_open, thin, time_axis, x_of
from zerofx.report.rows import ScheduleRow, legs_of
from zerofx.scheduler.cost.categories import Category
from zerofx.units import format_bytes, format_count, format_seconds

_TOP, _HEIGHT = 22, 300  # of the memory plot
_TIER_HEIGHT = 90  # of the plot of a slower tier
_TRACK, _GAP = 30, 10  # height of a stream's track, and what is between two
_FARTHEST = 1.6  # a limit beyond so many peaks is left out: it would press the curve flat

# In the order of the stack, the lowest first: what stays, then what comes and goes.
COLOURS: Mapping[str, str] = {
    Category.PARAMETERS: "#4e79a7",
    Category.OPTIMIZER: "#9c755f",
    Category.BUFFERS: "#8a8f98",
    Category.BATCH: "#b07aa1",
    Category.GATHERED: "#5fb3b0",
    Category.GRADIENTS: "#e15759",
    Category.ACTIVATIONS: "#f28e2b",
    Category.TEMPORARIES: "#e0c23a",
    Category.GAPS: "#d3d3d3",
}
_OTHER = "#59a14f"
TIER_COLOUR = "#7a88b8"
KINDS: Mapping[str, str] = {
    "forward": "#4e79a7",
    "backward": "#f28e2b",
    "recomputation": "#8f5a1c",
    "update": "#59a14f",
    "waits": "#d62728",
    "gathers": "#5fb3b0",
    "reductions": "#b0609f",
    "offloads": "#9c755f",
    "reloads": "#e0a53a",
    "write-backs": "#7a6fb0",
    "other transfers": "#8a8f98",
}


@dataclass(frozen=True)
class _Slice:
    """A bar of a track from ``start`` to ``end`` (seconds): one row, or ``count`` short ones drawn as one."""

    kind: str
    start: float
    end: float
    title: str
    count: int = 1


def memory_picture(
    memory: Sequence[tuple[float, Mapping[str, int]]],
    instructions: Sequence[ScheduleRow],
    limits: Mapping[str, int],
    seconds: float,
    peak_bytes: int,
) -> tuple[str, list[str]]:
    """The stacked memory curve, and the categories in it from the bottom up.

    Args:
        memory: seconds from the step's start, and bytes from there on by category.
        instructions: for the peak.
        limits: bytes by name ("device", "budget"); those far above the peak are not drawn.
    """
    points = list(thin(memory, seconds, _sum))
    present = dict.fromkeys(category for _, held in memory for category in held)
    names = [*(name for name in COLOURS if name in present), *(name for name in present if name not in COLOURS)]
    drawn = {name: size for name, size in limits.items() if size <= _FARTHEST * peak_bytes}
    top = max([peak_bytes, *drawn.values(), 1]) * 1.04
    bottom = _TOP + _HEIGHT
    parts = [svg_open(bottom + 26, "Memory on the device over the step", "memory")]
    parts += byte_axis(top, lambda size: _y(size, top), 6)
    heights = {name: [held.get(name, 0) for _, held in points] for name in names}
    levels = [0] * len(points)
    areas: list[str] = []
    for name in names:
        levels = [below + size for below, size in zip(levels, heights[name], strict=True)]
        outline = steps([x_of(at, seconds) for at, _ in points], [_y(level, top) for level in levels], bottom)
        areas.append(f'<path d="{outline}" fill="{colour_of(name)}"><title>{escape(name)}</title></path>')
    parts += reversed(areas)  # each hides the lower part of the one above it, so that only its own share is seen
    for name, size in drawn.items():
        parts += draw_dashed_line(_y(size, top), f"{name}: {format_bytes(size)}", "limit", above=True)
    parts += draw_dashed_line(_y(peak_bytes, top), f"peak: {format_bytes(peak_bytes)}", "peak", above=not drawn)
    at_peak = max(instructions, key=lambda row: row.peak_bytes, default=None)
    if at_peak is not None:
        x, y = x_of(at_peak.start_seconds + at_peak.seconds / 2, seconds), _y(peak_bytes, top)
        title = f"peak of {format_bytes(peak_bytes)} in {at_peak.name} ({at_peak.layer or 'the model'})"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="peak"><title>{escape(title)}</title></circle>')
    parts += time_axis(bottom, seconds)
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{bottom}" visibility="hidden"/></svg>')
    return "".join(parts), names


def tier_picture(tier: str, curve: Sequence[tuple[float, int]], seconds: float) -> str:
    """The bytes on a slower tier; ``curve`` has seconds from the step's start, and bytes from there on."""
    points, peak = list(thin(curve, seconds, float)), max(size for _, size in curve)
    bottom = _TOP + _TIER_HEIGHT

    def y_of(size: float) -> float:
        return bottom - _TIER_HEIGHT * size / max(1.04 * peak, 1)

    outline = steps([x_of(at, seconds) for at, _ in points], [y_of(size) for _, size in points], bottom)
    parts = [svg_open(bottom + 26, f"Bytes on {tier} over the step", f"memory-{tier}")]
    parts += byte_axis(max(1.04 * peak, 1), y_of, 4)
    parts.append(f'<path d="{outline}" fill="{TIER_COLOUR}"><title>on {escape(tier)}</title></path>')
    parts += draw_dashed_line(y_of(peak), f"{tier}, peak: {format_bytes(peak)}", "peak", above=True)
    return "".join([*parts, *time_axis(bottom, seconds), "</svg>"])


def memory_data(memory: Sequence[tuple[float, Mapping[str, int]]], names: Sequence[str], seconds: float) -> str:
    """The drawn points for the script that shows the values under the pointer: JSON of x, and MiB by category."""
    points = [
        [round(x_of(at, seconds), 1), *(round(held.get(name, 0) / 2**20) for name in names)]
        for at, held in thin(memory, seconds, _sum)
    ]
    data = {"left": LEFT, "right": RIGHT, "ms": seconds * 1e3, "names": [str(name) for name in names]}
    return json.dumps({**data, "points": points}, separators=(",", ":")).replace("<", "\\u003c")


def timeline_picture(instructions: Sequence[ScheduleRow], seconds: float) -> tuple[str, list[str]]:
    """A track per stream, and its kinds of slices. Hovering names the slice; neighbours under a pixel are one."""
    rows = [leg for row in instructions for leg in legs_of(row)]
    used = {COMPUTE, *(row.stream for row in rows)}
    streams = sort_streams(used)
    bottom = len(streams) * (_TRACK + _GAP)
    parts = [svg_open(bottom + 26, "What each stream does when", "timeline")]
    kinds: set[str] = set()
    for number, stream in enumerate(streams):
        y = number * (_TRACK + _GAP) + _GAP / 2
        parts.append(f'<text x="{LEFT - 8}" y="{y + _TRACK / 2 + 4:.0f}" text-anchor="end">{escape(stream)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y:.0f}" width="{RIGHT - LEFT}" height="{_TRACK}" class="track"/>')
        slices = [drawn for row in rows if row.stream == stream for drawn in _slices(row)]
        for drawn in _merge(slices, seconds / (RIGHT - LEFT)):
            kinds.add(drawn.kind)
            x, end = x_of(drawn.start, seconds), x_of(drawn.end, seconds)
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.0f}" width="{max(end - x, 0.3):.2f}" height="{_TRACK}" '
                f'fill="{KINDS[drawn.kind]}" class="slice"><title>{escape(_title(drawn))}</title></rect>'
            )
    parts += time_axis(bottom, seconds)
    return "".join([*parts, "</svg>"]), [kind for kind in KINDS if kind in kinds]


def legend(entries: Mapping[str, tuple[str, str]]) -> str:
    """Colour, name and a few words about each entry; ``entries`` maps names to colours and words."""
    items = (
        f'<li><span class="swatch" style="background:{colour}"></span>{escape(name)}'
        + (f" <small>{escape(words)}</small></li>" if words else "</li>")
        for name, (colour, words) in entries.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def colour_of(category: str) -> str:
    """The colour of a category of memory."""
    return COLOURS.get(category, _OTHER)


def _slices(row: ScheduleRow) -> Iterator[_Slice]:
    """The row, and before it the time that computation waited."""
    if row.exposed_seconds > 0 and row.stream == COMPUTE:
        title = f"waits for {row.bucket or row.layer or 'a transfer'}: {format_seconds(row.exposed_seconds)}"
        yield _Slice("waits", row.start_seconds - row.exposed_seconds, row.start_seconds, title)
    if row.seconds <= 0:
        return
    lines = [
        f"{row.region or row.op}: {format_seconds(row.seconds)}",
        f"{row.layer or row.bucket or '(model)'}, {row.phase}",
        f"from {format_seconds(row.start_seconds)}; reads {format_bytes(row.bytes_in)}, writes "
        f"{format_bytes(row.bytes_out)}",
    ]
    if row.wire_bytes:
        lines.append(f"sends {format_bytes(row.wire_bytes)}")
    if row.flops:
        lines.append(f"{format_count(row.flops)} FLOPs")
    if row.recompute_seconds:
        lines.append(f"{format_seconds(row.recompute_seconds)} of it computes values of forward again")
    title, again = "\n".join(lines), row.start_seconds + row.recompute_seconds
    # A region may recompute anywhere in it: the recomputed share is drawn at the front.
    if row.recompute_seconds:
        yield _Slice("recomputation", row.start_seconds, again, title)
    if again < row.start_seconds + row.seconds:
        yield _Slice(_kind(row), again, row.start_seconds + row.seconds, title)


def _kind(row: ScheduleRow) -> str:
    if row.stream in (COMPUTE, HOST):
        return row.phase if row.phase in KINDS else "forward"
    if row.op.startswith(("all_gather", "gather_on_node")):
        return "gathers"
    if row.op.startswith(("reduce_scatter", "all_reduce", "exchange")):
        return "reductions"
    return {"offload": "offloads", "reload": "reloads", "copy_into": "write-backs"}.get(row.op, "other transfers")


def _merge(slices: Sequence[_Slice], pixel: float) -> list[_Slice]:
    """Merge neighbours that are under a pixel each: all that share a pixel, and then further ones of the same kind.

    Slices that share a pixel have the colour of the kind that takes most of it: at most a few slices per pixel.
    """
    merged: list[_Slice] = []
    shares: dict[str, float] = {}  # seconds by kind in the last of them
    for new in sorted(slices, key=lambda drawn: drawn.start):
        last = merged[-1] if merged else None
        small = last is not None and new.end - new.start < pixel and (last.count > 1 or last.end - last.start < pixel)
        if (
            last is not None
            and small
            and (new.end - last.start < pixel or (last.kind == new.kind and new.start - last.end < pixel))
        ):
            shares[new.kind] = shares.get(new.kind, 0.0) + new.end - new.start
            kind = max(shares, key=lambda name: shares[name])
            merged[-1] = _Slice(kind, last.start, max(last.end, new.end), last.title, last.count + 1)
        else:
            shares = {new.kind: new.end - new.start}
            merged.append(new)
    return merged


def _title(drawn: _Slice) -> str:
    if drawn.count == 1:
        return drawn.title
    duration = format_seconds(drawn.end - drawn.start)
    return f"{drawn.count} short ones, mostly {drawn.kind}, in {duration}; the first:\n{drawn.title}"


def _sum(held: Mapping[str, int]) -> int:
    return sum(held.values())


def _y(num_bytes: float, top: float) -> float:
    return _TOP + _HEIGHT * (1 - num_bytes / top)
