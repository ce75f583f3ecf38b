"""A schedule as one page for a browser: decisions, the peak's tensors, memory, streams and the table, explained.

The page is a single file that loads nothing else. It can be mailed, or kept as an artifact of a build. What each stream
does when is in the trace (``trace.py``), which Perfetto opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from zerofx.ir.streams import COMPUTE, sort_streams
from zerofx.report.peak import Peak
from zerofx.report.rows import ScheduleRow, Totals, legs_of
from zerofx.report.shared_layer import SharedLayer, shared_lines
from zerofx.report.table import HEADERS, INDENT, schedule_lines, totals_line
from zerofx.scheduler.cost.categories import Category
from zerofx.units import format_bytes, format_count, format_seconds

_WIDTH, _HEIGHT, _LEFT = 1200, 320, 8  # of the memory picture, and where its curve begins
_FARTHEST = 1.6  # a limit beyond so many peaks is left out: it would press the curve flat
_FIRST_NUMBER = 5  # column of the schedule: names stand before it

# In the order of the stack, the lowest first: what stays, then what comes and goes. Each with a few words.
CATEGORIES: Mapping[str, tuple[str, str]] = {
    Category.PARAMETERS: ("#4e79a7", "kept between steps"),
    Category.OPTIMIZER: ("#9c755f", "kept between steps"),
    Category.BUFFERS: ("#8a8f98", "of the model"),
    Category.BATCH: ("#b07aa1", ""),
    Category.GATHERED: ("#5fb3b0", "whole parameters, from gather to release"),
    Category.GRADIENTS: ("#e15759", "until they are reduced and applied"),
    Category.ACTIVATIONS: ("#f28e2b", "made in forward, read in backward"),
    Category.TEMPORARIES: (
        "#e0c23a",
        "short-lived results of backward and update, and what operators and regions hold inside",
    ),
    Category.GAPS: ("#d3d3d3", ""),
}
_ABOUT_STREAMS: Mapping[str, str] = {
    "compute": "the device's operators",
    "collective": "communication between ranks",
    "host": "updates on the CPU",
    "to_host": "copies from the device to host memory",
    "to_device": "copies from host memory to the device",
    "nvme_read": "reads from the drive",
    "nvme_write": "writes to the drive",
}
ABOUT_INSTRUCTIONS: Mapping[str, str] = {
    "all_gather": "starts to collect a bucket's parameters, whole, from the slices that the ranks keep",
    "all_gather_into": "the same into a buffer that the parameters stay in",
    "reduce_scatter": "starts to sum a bucket's gradients over the ranks, of which each gets a slice",
    "reduce_scatter_into": "the same, with the slice in its place in the buffer that the gradients lie in",
    "gather_on_node": "starts to collect a bucket's parameters from second shards of this node's ranks",
    "exchange": "starts to send each rank its part of a bucket's gradients, in few bits, and to receive the others'",
    "gather_values": "starts to collect a value, whole, from the parts that ranks of one computation have",
    "reduce_scatter_values": "starts to sum what such ranks have of a value, of which each gets a part",
    "all_reduce_values": "starts to sum what such ranks have of a value, or to find its largest elements",
    "shift_values": "starts to hand a value to the next such rank, and to receive the one before's",
    "send_value": "starts to send a value to the rank of another stage that is in this one's place",
    "receive_value": "starts to receive a value from there",
    "exchange_values": "starts to send each such rank a part of a value, and to receive the others'",
    "to_owners": "starts to send slices of a bucket to the ranks that update its parameters whole",
    "from_owners": "starts to send their new values back to the slices",
    "cast_owned": "the new values of these, in the dtype that the model computes with",
    "update_whole": "the optimizer's own step, on whole parameters, where this rank owns some",
    "fp8_slice_largest": "the largest magnitudes of weights in this rank's slice, of which scales for fp8 are made",
    "fp8_slice_cast": "the slice in fp8, with the scales of all ranks",
    "second_shard": "a part of gathered parameters is kept, so that they are gathered on the node the next time",
    "wait": "computation goes on only when what was started before is there",
    "release": "the memory of whole parameters is given back",
    "empty_gradients": "memory for a bucket's gradients is taken",
    "offload": "starts a copy from the device to a slower tier",
    "reload": "starts a copy back",
    "copy_into": "starts to write back what an update has changed",
    "empty_stored": "room on a slower tier is taken",
    "settle": "computation goes on only when the host is done with a bucket's update, and with copies of it",
    "run_on": "a bucket's update on the host, and copies of it, may go on while the next step begins",
    "part": "some rows or elements of a tensor, for a tile or a collective of its own",
    "broadcast": "rank 0's buffers go to all ranks",
    "next_micro_batch": "a micro-batch is over, and the next one begins; a second one may stand for several",
    "check_gradients": "computation goes on to the updates only if every gradient is finite",
    "keep_draws": "the states of random generators are kept for the micro-batch that is run",
    "swap_draws": "random generators draw for an earlier micro-batch, and go on here afterwards",
    "take_draws": "random generators go on for the micro-batch that is run next",
    "drop_draw": "what was drawn for the generators to go on is dropped",
    "check_overflow": "computation goes on to the updates only if all rows of experts have found room on their ranks",
    "check_finite": "computation goes on to the updates only if the loss is finite on every rank",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 60px; font: 15px/1.5 system-ui, sans-serif; }
p { margin: 4px 0 10px; max-width: 90ch; } small { color: GrayText; display: block; }
.numbers { display: flex; flex-wrap: wrap; gap: 10px; }
.numbers div { border: 1px solid var(--line); padding: 8px 14px; }
svg { width: 100%; height: auto; } svg text { fill: CanvasText; font: 12px system-ui, sans-serif; }
.limit, .peak { stroke: #c4161c; stroke-dasharray: 6 4; } .peak { stroke: CanvasText; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 6px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; background: Canvas; position: sticky; top: 0; } th, td { padding: 3px 9px; vertical-align: top; }
td { border-top: 1px solid var(--line); overflow-wrap: anywhere; } .number { text-align: right; white-space: nowrap; }
#schedule { max-height: 80vh; overflow: auto; } #schedule td { white-space: nowrap; }
.folded td { font-weight: 600; } .inner td:nth-child(2) { padding-left: 26px; } pre, .wide { overflow-x: auto; }
"""


@dataclass(frozen=True)
class ScheduleData:
    """The contents of a schedule, as ``Schedule`` has them; a page is made of these alone."""

    rows: tuple[ScheduleRow, ...]
    instructions: tuple[ScheduleRow, ...]
    totals: Totals
    memory: tuple[tuple[float, dict[str, int]], ...]
    slower_memory: dict[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    peak: Peak = field(default_factory=lambda: Peak((), {}))
    decisions: tuple[tuple[str, str, str], ...] = ()
    shared: SharedLayer | None = None


def page(schedule: ScheduleData, title: str, limits: Mapping[str, int], notes: str) -> str:
    """One self-contained page for a browser; ``limits`` and ``notes`` as for ``Schedule.to_html``."""
    totals = schedule.totals
    highest = max((held for _, held in schedule.memory), key=lambda held: sum(held.values()), default={})
    about_limits = "".join(
        f" The peak is {format_bytes(abs(size - totals.peak_bytes))} "
        f"{'below' if totals.peak_bytes <= size else 'ABOVE'} the {escape(name)}, {format_bytes(size)}."
        for name, size in limits.items()
    )
    whole_plan = (
        f"<details><summary>The whole plan as text</summary><pre>{escape(notes)}</pre></details>" if notes else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>One training step (forward, backward, gradient reduction, optimizer update) on one of its ranks; all ranks do the
same. All numbers are predictions of the plan.</p>
<div class="numbers">{_numbers(totals)}</div>
<h2>What was decided</h2>
<p>Each decision of the plan with its reason; equal ones of successive layers share a line.</p>
{_decisions(schedule.decisions)}
{whole_plan}
{_shared(schedule.shared)}<h2>The peak</h2>
<p>The largest tensors on the device when it holds most, {format_bytes(totals.peak_bytes)}: which they are, the line of
the model that makes them, and why they are there then. Equal tensors of successive layers share a line.</p>
{_peak_tensors(schedule.peak, totals.peak_bytes)}
<details><summary>All bytes at the peak by layer</summary>{_peak_layers(schedule.peak)}</details>
<h2>Memory</h2>
<p>How many bytes are on the device at each moment of the step, and what they are; the height of a colour is its share.
The dashed line is the peak.{about_limits}</p>
{_memory_picture(schedule.memory, limits, totals)}
<p>At the peak, {format_bytes(sum(highest.values()))} in all:</p>
{_categories(highest)}
<h2>Streams</h2>
<p>How long each is busy in a step of {format_seconds(totals.step_seconds)}. What runs below computation costs no time;
computation waits for {format_seconds(totals.exposed_seconds)}. What runs when is in the trace for ui.perfetto.dev
(<code>step.schedule().to_chrome_trace(path)</code>, <code>zerofx plan --trace</code>).</p>
{_streams(schedule)}
<h2>Schedule</h2>
<p>Every instruction in the order it runs. Layers that run the same instructions are shown once, under a line with their
number and sums. <i>in</i> and <i>out</i> are bytes read and written in device memory, <i>live</i> what is held
afterwards, <i>peak</i> the most while it runs, <i>wire</i> what the rank sends, <i>waits</i> how long computation stood
still before it. A <i>bucket</i> is the parameters that are gathered and reduced together, mostly those of a layer.
Names that end in <i>forward</i>, <i>backward</i> or <i>update</i> are functions of the generated step; the others:</p>
{_words(schedule)}
{_instructions(schedule.instructions)}
<p>{escape(totals_line(totals))}</p>
</body></html>
"""


def _numbers(totals: Totals) -> str:
    waits = totals.exposed_seconds / totals.step_seconds if totals.step_seconds else 0.0
    numbers = [
        (format_bytes(totals.peak_bytes), "peak on the device"),
        (format_seconds(totals.step_seconds), "time of a step"),
        (format_seconds(totals.exposed_seconds), f"of it computation waits ({waits:.1%})"),
        (format_bytes(totals.wire_bytes), "sent by each rank"),
        (format_count(totals.flops), "FLOPs on each rank"),
        *((format_bytes(size), f"peak on {tier}") for tier, size in totals.slower_peak_bytes.items()),
    ]
    return "".join(f"<div><b>{value}</b><small>{escape(name)}</small></div>" for value, name in numbers)


def _decisions(decisions: Sequence[tuple[str, str, str]]) -> str:
    if not decisions:
        return "<p>Nothing had to be: parameters, states and activations stay on the device.</p>"
    return _table(("what", "of", "decision and reason"), [list(map(_cell, decision)) for decision in decisions])


def _shared(shared: SharedLayer | None) -> str:
    """One layer as ranks of the axis ``model`` share it; empty if there is none."""
    if shared is None:
        return ""
    return f"""<h2>One layer, shared</h2>
<p>The forward of {escape(shared.layer)} as the {shared.num_ranks} ranks of the axis <i>model</i> share it, from top to
bottom: each result with the shape that one of them has, and the collectives between them.</p>
{_table(("what", "shape", "on the ranks"), [list(map(_cell, line)) for line in shared_lines(shared)])}
"""


def _peak_tensors(peak: Peak, peak_bytes: int) -> str:
    rows = [
        [
            _number(format_bytes(tensor.num_bytes)),
            _number(f"{tensor.num_bytes / peak_bytes:.0%}" if peak_bytes else ""),
            *map(_cell, (tensor.category, tensor.what + (f"  x{tensor.count}" if tensor.count > 1 else ""))),
            *map(_cell, (tensor.layer, tensor.line, tensor.fate)),
        ]
        for tensor in peak.tensors
    ]
    return _table(("bytes", "share", "kind", "tensor", "layer", "line", "why it is there"), rows)


def _peak_layers(peak: Peak) -> str:
    present = [str(name) for name in CATEGORIES if any(name in sizes for sizes in peak.layers.values())]
    rows = [
        [
            _cell(layer),
            _number(format_bytes(sum(sizes.values()))),
            *(_number(format_bytes(sizes[name]) if name in sizes else "") for name in present),
        ]
        for layer, sizes in peak.layers.items()
    ]
    return _table(("layer", "bytes", *present), rows)


def _memory_picture(
    memory: Sequence[tuple[float, Mapping[str, int]]], limits: Mapping[str, int], totals: Totals
) -> str:
    """The stacked memory curve as SVG, no larger than its pixels; limits far above the peak are not drawn."""
    drawn = {name: size for name, size in limits.items() if size <= _FARTHEST * totals.peak_bytes}
    top = max([totals.peak_bytes, *drawn.values(), 1]) * 1.08
    points = list(_thin(memory, totals.step_seconds))
    areas, levels = [], [0] * len(points)
    for name, (colour, _) in CATEGORIES.items():
        sizes = [held.get(name, 0) for _, held in points]
        if any(sizes):
            levels = [below + size for below, size in zip(levels, sizes, strict=True)]
            steps = "".join(f"H{x}V{_y(level, top):.1f}" for (x, _), level in zip(points, levels, strict=True))
            outline = f"M{_LEFT} {_HEIGHT}{steps}H{_WIDTH}V{_HEIGHT}Z"
            areas.append(f'<path d="{outline}" fill="{colour}"><title>{escape(name)}</title></path>')
    # The peak's words are at the other end and below, as a limit may be next to it.
    lines = [
        *((size, name, "limit", f'x="{_LEFT + 4}"', -5) for name, size in drawn.items()),
        (totals.peak_bytes, "peak", "peak", f'x="{_WIDTH - 4}" text-anchor="end"', 15),
    ]
    marks = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{_y(size, top):.1f}" y2="{_y(size, top):.1f}" class="{kind}"/>'
        f'<text {place} y="{_y(size, top) + below:.1f}">{escape(name)}: {format_bytes(size)}</text>'
        for size, name, kind, place, below in lines
    )
    # Each area hides the lower part of the one above it, so that only its own share is seen.
    return (
        f'<svg id="memory" viewBox="0 0 {_WIDTH} {_HEIGHT + 20}" role="img" aria-label="Memory over the step">'
        f"{''.join(reversed(areas))}{marks}"
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{format_seconds(totals.step_seconds)}</text></svg>'
    )


def _thin(curve: Sequence[tuple[float, Mapping[str, int]]], seconds: float) -> Iterator[tuple[int, Mapping[str, int]]]:
    """The highest point of those that share a pixel, and their last one from the next pixel on: a peak must not get
    lost, and must not last longer than it does."""
    pixels: dict[int, list[Mapping[str, int]]] = {}
    for at, held in curve:
        place = round((_WIDTH - _LEFT) * min(max(at / seconds, 0.0), 1.0)) if seconds else 0
        pixels.setdefault(_LEFT + place, []).append(held)
    for x, held_there in pixels.items():
        yield x, max(held_there, key=lambda held: sum(held.values()))
        if x + 1 not in pixels and x < _WIDTH:
            yield x + 1, held_there[-1]


def _y(num_bytes: int, top: float) -> float:
    return _HEIGHT * (1 - num_bytes / top)


def _categories(highest: Mapping[str, int]) -> str:
    rows = [
        [
            f'<td><span class="swatch" style="background:{colour}"></span>{escape(name)}</td>',
            _number(format_bytes(highest[name])),
            _cell(about),
        ]
        for name, (colour, about) in reversed(list(CATEGORIES.items()))
        if name in highest
    ]
    return _table(("kind", "bytes", "about"), rows)


def _streams(schedule: ScheduleData) -> str:
    busy: dict[str, float] = {COMPUTE: 0.0}
    for row in (leg for instruction in schedule.instructions for leg in legs_of(instruction)):
        busy[row.stream] = busy.get(row.stream, 0.0) + row.seconds
    rows = [
        [_cell(stream), _number(format_seconds(busy[stream])), _cell(_ABOUT_STREAMS[stream.partition(" ")[0]])]
        for stream in sort_streams(set(busy))
    ]
    return _table(("stream", "busy", "about"), rows)


def _words(schedule: ScheduleData) -> str:
    """Explanations of the instructions in the table that are not computation."""
    used = {row.op for row in schedule.instructions}
    return _table(
        ("instruction", "about"), [[_cell(op), _cell(about)] for op, about in ABOUT_INSTRUCTIONS.items() if op in used]
    )


def _instructions(instructions: Sequence[ScheduleRow]) -> str:
    """The schedule as a table whose header stays in view; repeated layers are shown once, as in its text."""
    rows, kinds = [], []
    for cells in schedule_lines(instructions, fold_layers=True):
        kinds.append("inner" if cells[1].startswith(INDENT) else "folded" if "  x" in cells[1] else "")
        rows.append([_cell(cell.strip()) if 1 <= i < _FIRST_NUMBER else _number(cell) for i, cell in enumerate(cells)])
    return f'<div id="schedule">{_table(HEADERS, rows, kinds)}</div>'


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], kinds: Iterable[str] | None = None) -> str:
    """``rows`` are lists of whole cells; ``kinds`` are their classes."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    classes = [f' class="{kind}"' if kind else "" for kind in kinds] if kinds is not None else [""] * len(rows)
    body = "".join(f"<tr{name}>{''.join(row)}</tr>" for name, row in zip(classes, rows, strict=True))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'
