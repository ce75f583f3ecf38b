"""Pictures of a schedule as SVG: memory over the step, and what each stream does when; as large as their pixels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from zerofx.report.memory import Category
from zerofx.report.rows import Row, legs_of
from zerofx.report.units import format_bytes, format_count, format_seconds
from zerofx.scheduler.streams import STREAMS

WIDTH = 1200  # units of the pictures' coordinates; a page shows them about one to one
_LEFT, _RIGHT = 96, 1190  # of the plot: names of tracks and sizes stand to its left
_POINTS = 1094  # of a curve: one a unit, which is all that can be seen
_TOP, _HEIGHT = 22, 300  # of the memory plot
_TRACK, _GAP = 30, 10  # height of a stream's track, and what is between two
_FIRST_TRACKS = ("compute", "collective")
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
}
_OTHER = "#59a14f"
_NOTHING: Mapping[str, int] = {}
KINDS: Mapping[str, str] = {
    "forward": "#4e79a7",
    "backward": "#f28e2b",
    "update": "#59a14f",
    "waits": "#d62728",
    "gathers": "#5fb3b0",
    "reductions": "#b0609f",
    "offloads": "#9c755f",
    "reloads": "#e0a53a",
    "other transfers": "#8a8f98",
}


@dataclass(frozen=True)
class _Slice:
    """What a track shows from ``start`` to ``end`` (seconds): one row, or ``count`` short ones drawn as one."""

    kind: str
    start: float
    end: float
    title: str
    count: int = 1


def memory_picture(
    memory: Sequence[tuple[float, Mapping[str, int]]],
    instructions: Sequence[Row],
    limits: Mapping[str, int],
    seconds: float,
    peak_bytes: int,
) -> tuple[str, list[str]]:
    """The stacked memory curve, and the categories in it from the bottom up.

    Args:
        memory: seconds from the step's begin, and bytes from there on by category. ``instructions``: for the peak.
        limits: bytes by what they are ("device", "budget"); those far above the peak are not drawn.
    """
    points = list(_thinned(memory, seconds))
    present = dict.fromkeys(category for _, held in memory for category in held)
    names = [*(name for name in COLOURS if name in present), *(name for name in present if name not in COLOURS)]
    drawn = {name: size for name, size in limits.items() if size <= _FARTHEST * peak_bytes}
    top = max([peak_bytes, *drawn.values(), 1]) * 1.04
    bottom = _TOP + _HEIGHT
    parts = [_svg_open(bottom + 26, "Memory on the device over the step", "memory")]
    parts += _vertical_axis(top)
    heights = {name: [held.get(name, 0) for _, held in points] for name in names}
    levels = [0] * len(points)
    areas: list[str] = []
    for name in names:
        levels = [below + size for below, size in zip(levels, heights[name], strict=True)]
        outline = _steps([_x(at, seconds) for at, _ in points], [_y(level, top) for level in levels], bottom)
        areas.append(f'<path d="{outline}" fill="{_colour(name)}"><title>{escape(name)}</title></path>')
    parts += reversed(areas)  # each hides the lower part of the one above it, so that only its own share is seen
    for name, size in drawn.items():
        parts += _level(_y(size, top), f"{name}: {format_bytes(size)}", "limit", above=True)
    parts += _level(_y(peak_bytes, top), f"peak: {format_bytes(peak_bytes)}", "peak", above=not drawn)
    at_peak = next((row for row in instructions if row.peak_bytes == peak_bytes), None)
    if at_peak is not None:
        x, y = _x(at_peak.start_seconds + at_peak.seconds / 2, seconds), _y(peak_bytes, top)
        title = f"peak of {format_bytes(peak_bytes)} in {at_peak.name} ({at_peak.layer or 'the model'})"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="peak"><title>{escape(title)}</title></circle>')
    parts += _time_axis(bottom, seconds)
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{bottom}" visibility="hidden"/></svg>')
    return "".join(parts), names


def memory_data(memory: Sequence[tuple[float, Mapping[str, int]]], names: Sequence[str], seconds: float) -> str:
    """The drawn points for the script that says what is under the pointer: JSON of x, and MiB by category."""
    points = [
        [round(_x(at, seconds), 1), *(round(held.get(name, 0) / 2**20) for name in names)]
        for at, held in _thinned(memory, seconds)
    ]
    data = {"left": _LEFT, "right": _RIGHT, "ms": seconds * 1e3, "names": [str(name) for name in names]}
    return json.dumps({**data, "points": points}, separators=(",", ":")).replace("<", "\\u003c")


def timeline_picture(instructions: Sequence[Row], seconds: float) -> tuple[str, list[str]]:
    """A track a stream, and the kinds of slices in them. Hovering names the slice; neighbours under a pixel are one."""
    rows = [leg for row in instructions for leg in legs_of(row)]
    used = {*_FIRST_TRACKS, *(row.stream for row in rows)}
    streams = [stream for stream in STREAMS if stream in used]
    bottom = len(streams) * (_TRACK + _GAP)
    parts = [_svg_open(bottom + 26, "What each stream does when", "timeline")]
    kinds: set[str] = set()
    for number, stream in enumerate(streams):
        y = number * (_TRACK + _GAP) + _GAP / 2
        parts.append(f'<text x="{_LEFT - 8}" y="{y + _TRACK / 2 + 4:.0f}" text-anchor="end">{escape(stream)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y:.0f}" width="{_RIGHT - _LEFT}" height="{_TRACK}" class="track"/>')
        slices = [found for row in rows if row.stream == stream for found in _slices(row)]
        for drawn in _merged(slices, seconds / (_RIGHT - _LEFT)):
            kinds.add(drawn.kind)
            x, end = _x(drawn.start, seconds), _x(drawn.end, seconds)
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.0f}" width="{max(end - x, 0.3):.2f}" height="{_TRACK}" '
                f'fill="{KINDS[drawn.kind]}" class="slice"><title>{escape(_title(drawn))}</title></rect>'
            )
    parts += _time_axis(bottom, seconds)
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
    return _colour(category)


def _thinned(
    memory: Sequence[tuple[float, Mapping[str, int]]], seconds: float
) -> Iterator[tuple[float, Mapping[str, int]]]:
    """Of the points that share a pixel, the highest: a peak must not get lost."""
    pixel, chosen = -1, (0.0, _NOTHING)
    for at, held in memory:
        here = int(at / seconds * _POINTS) if seconds else 0
        if here != pixel:
            if pixel >= 0:
                yield chosen
            pixel, chosen = here, (at, held)
        elif sum(held.values()) > sum(chosen[1].values()):
            chosen = (at, held)
    if pixel >= 0:
        yield chosen


def _slices(row: Row) -> Iterator[_Slice]:
    """The row, and before it the time that computation waited."""
    if row.exposed_seconds > 0 and row.stream == "compute":
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
    yield _Slice(_kind(row), row.start_seconds, row.start_seconds + row.seconds, "\n".join(lines))


def _kind(row: Row) -> str:
    if row.stream == "compute":
        return row.phase if row.phase in KINDS else "forward"
    if row.op.startswith("all_gather"):
        return "gathers"
    if row.op.startswith(("reduce_scatter", "all_reduce")):
        return "reductions"
    return {"offload": "offloads", "reload": "reloads"}.get(row.op, "other transfers")


def _merged(slices: Sequence[_Slice], pixel: float) -> list[_Slice]:
    """Neighbours that are under a pixel each as one slice: all that share a pixel, and on from there those of one kind.

    What shares a pixel has the colour of the kind that takes most of it. So there are at most a few slices a pixel.
    """
    merged: list[_Slice] = []
    shares: dict[str, float] = {}  # seconds by kind in the last of them
    for new in sorted(slices, key=lambda found: found.start):
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
    taken = format_seconds(drawn.end - drawn.start)
    return f"{drawn.count} short ones, mostly {drawn.kind}, in {taken}; the first:\n{drawn.title}"


def _steps(xs: Sequence[float], ys: Sequence[float], bottom: float) -> str:
    """The outline of what is under a curve that keeps each value until the next; equal values are one line."""
    path, level = [f"M{_LEFT} {bottom}"], float(bottom)
    for x, y in zip(xs, ys, strict=True):
        if round(y, 1) != round(level, 1):
            path.append(f"H{x:.1f}V{y:.1f}")
            level = y
    return "".join([*path, f"H{_RIGHT}V{bottom}Z"])


def _svg_open(height: int, label: str, name: str) -> str:
    return f'<svg id="{name}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'


def _vertical_axis(top: float) -> Iterator[str]:
    step = next(size for size in _round_sizes() if top / size <= 6)
    for number in range(int(top / step) + 1):
        y = _y(number * step, top)
        yield f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(number * step)}</text>'


def _round_sizes() -> Iterator[int]:
    """Sizes that read well on an axis: 1, 2, 5, 10 ... of each unit."""
    unit = 1
    while True:
        yield from (unit * factor for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500))
        unit *= 1024


def _time_axis(bottom: int, seconds: float) -> Iterator[str]:
    for tenth in range(0, 11, 2):
        x = _LEFT + (_RIGHT - _LEFT) * tenth / 10
        anchor = "end" if tenth == 10 else "middle"
        text = format_seconds(seconds * tenth / 10) if tenth else "0"
        yield f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{bottom}" y2="{bottom + 5}" class="tick"/>'
        yield f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="{anchor}">{text}</text>'


def _level(y: float, text: str, kind: str, *, above: bool) -> Iterator[str]:
    """A dashed line across the plot, its words at the right end: above it, or below where another line may be."""
    yield f'<line x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'
    at = y - 5 if above else y + 15
    yield f'<text x="{_RIGHT - 4}" y="{at:.1f}" text-anchor="end" class="{kind}">{escape(text)}</text>'


def _x(at: float, seconds: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * (min(max(at / seconds, 0.0), 1.0) if seconds else 0.0)


def _y(num_bytes: float, top: float) -> float:
    return _TOP + _HEIGHT * (1 - num_bytes / top)


def _colour(category: str) -> str:
    return COLOURS.get(category, _OTHER)
