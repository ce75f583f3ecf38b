"""A schedule as one page for a browser: what a step takes, its memory, its streams, and its table, with words to each.

The page is a single file that asks for nothing from anywhere: the pictures are inline SVG. It can be mailed, or kept as
an artifact of a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from zerofx.report.pictures import KINDS, colour_of, legend, memory_data, memory_picture, tier_picture, timeline_picture
from zerofx.report.rows import legs_of
from zerofx.report.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from zerofx.report.schedule import Schedule

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1f24; --soft: #626a76; --line: #dfe3e8; --card: #f5f7f9;
  --alarm: #c4161c; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e4e7eb; --soft: #99a2ae; --line: #30363d;
  --card: #1e2329; --alarm: #ff7b72; } }
body { margin: 0 auto; max-width: 1240px; padding: 24px 20px 60px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 4px; }
p { margin: 4px 0 10px; max-width: 90ch; } .apart { margin-top: 22px; } .soft, small { color: var(--soft); }
.numbers { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.numbers div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; }
.numbers b { display: block; font-size: 21px; font-weight: 600; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid, .tick { stroke: var(--line); } .track { fill: var(--card); }
.limit, .peak { stroke: var(--alarm); stroke-dasharray: 6 4; } line.peak { stroke: var(--text); }
circle.peak { fill: var(--text); stroke: var(--back); stroke-dasharray: none; }
svg text.limit { fill: var(--alarm); stroke: none; } svg text.peak { fill: var(--text); stroke: none; }
.cursor { stroke: var(--text); } .slice:hover { opacity: .65; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 0; margin: 6px 0; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
#here { min-height: 3em; font-variant-numeric: tabular-nums; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 12px;
  font: 12px/1.45 ui-monospace, monospace; }
#words { display: grid; grid-template-columns: max-content 1fr; gap: 0 14px; margin: 6px 0 10px; font-size: 14px;
  max-width: 90ch; }
#words dt { font: 12px/21px ui-monospace, monospace; } #words dd { margin: 0; color: var(--soft); }
@media (max-width: 900px) { svg text { font-size: 15px; } }
@media print { :root { --back: #fff; --text: #000; --soft: #444; --line: #ccc; --card: #fff; --alarm: #c4161c; }
  body { padding: 0; font-size: 11px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  #here { display: none; } svg, .numbers, .legend { break-inside: avoid; } h2 { break-after: avoid; }
  p, #words { max-width: none; } #words, #words dt { font-size: 10px; line-height: 1.4; }
  pre { overflow: visible; border: 0; padding: 0; font-size: 6.6px; } }
"""

# Says under the memory picture what is held at the time under the pointer.
_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.getElementById("memory"), cursor = svg.querySelector(".cursor");
const here = document.getElementById("here");
const idle = here.textContent = "Move the pointer over the picture to read the bytes at a time.";
const size = mib => mib >= 1024 ? (mib / 1024).toFixed(1) + " GiB" : mib + " MiB";
svg.addEventListener("pointermove", event => {
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  if (x < data.left || x > data.right || !data.points.length) return;
  let low = 0, high = data.points.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1;
    if (data.points[middle][0] <= x) low = middle; else high = middle - 1; }
  const sizes = data.points[low].slice(1), ms = data.ms * (x - data.left) / (data.right - data.left);
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
  here.textContent = "at " + ms.toFixed(2) + " ms: " + size(sizes.reduce((a, b) => a + b, 0)) + " in all, "
    + data.names.map((name, i) => [name, sizes[i]]).filter(entry => entry[1]).reverse()
      .map(entry => entry[0] + " " + size(entry[1])).join(", ");
});
svg.addEventListener("pointerleave", () => {
  cursor.setAttribute("visibility", "hidden"); here.textContent = idle; });
"""

_ABOUT_CATEGORIES: Mapping[str, str] = {
    "parameters": "kept between steps",
    "optimizer states": "kept between steps",
    "buffers": "of the model",
    "gathered": "whole parameters, from gather to release",
    "gradients": "until they are reduced and applied",
    "activations": "made in forward, read in backward",
    "temporaries": "short-lived results of backward and update",
}
_ABOUT_KINDS: Mapping[str, str] = {
    "waits": "computation stands still",
    "gathers": "parameters are collected from all ranks",
    "reductions": "gradients are summed over all ranks",
    "offloads": "copied out to a slower tier",
    "reloads": "copied back towards the device",
    "write-backs": "what an update has changed, to the tier where it stays",
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
    "second_shard": "a part of gathered parameters is kept, so that they are gathered on the node the next time",
    "wait": "computation goes on only when what was started before is there",
    "release": "the memory of whole parameters is given back",
    "empty_gradients": "memory for a bucket's gradients is taken",
    "offload": "starts a copy from the device to a slower tier",
    "reload": "starts a copy back",
    "copy_into": "starts to write back what an update has changed",
    "empty_stored": "room on a slower tier is taken",
    "settle": "computation goes on only when the host is done with an update that the step before has begun",
    "part": "some rows or elements of a tensor, for a tile that is computed by itself",
    "broadcast": "rank 0's buffers go to all ranks",
}


def write_html(
    schedule: Schedule,
    path: str | Path,
    title: str = "zerofx step",
    *,
    limits: Mapping[str, int] | None = None,
    notes: str = "",
) -> None:
    """Write the page of a schedule.

    Args:
        path: the file to write; one that exists is replaced.
        title: the page's heading.
        limits: bytes to draw as lines over the memory curve, by what they are: ``{"device": 80 * 2**30}``.
        notes: text to put at the end as it is, such as ``str(plan)``.
    """
    Path(path).write_text(_page(schedule, title, limits or {}, notes), encoding="utf-8")


def _about_peak(highest_bytes: int, peak_bytes: int) -> str:
    if highest_bytes > peak_bytes:
        return (
            "The curve has operators one by one; the dashed line is the peak of the compiled step, which holds less "
            "where it fuses them"
        )
    return "The dashed line is the peak, which a single operator may reach for a moment above the curve"


def _page(schedule: Schedule, title: str, limits: Mapping[str, int], notes: str) -> str:
    totals, seconds = schedule.totals, schedule.totals.step_seconds
    memory, categories = memory_picture(schedule.memory, schedule.instructions, limits, seconds, totals.peak_bytes)
    tiers = "".join(tier_picture(tier, curve, seconds) for tier, curve in schedule.slower_memory.items())
    about_tiers = '<p class="apart">Bytes on the slower tiers, with what passes through them:</p>' if tiers else ""
    timeline, kinds = timeline_picture(schedule.instructions, seconds)
    highest = max((held for _, held in schedule.memory), key=lambda held: sum(held.values()), default={})
    shares = {name: (colour_of(name), _share(name, highest.get(name, 0))) for name in reversed(categories)}
    words = {kind: (KINDS[kind], _ABOUT_KINDS.get(kind, "")) for kind in kinds}
    about_limits = "".join(
        f" The peak {_verdict(totals.peak_bytes, size)} the {escape(name)}, {format_bytes(size)}."
        for name, size in limits.items()
    )
    plan_text = f"<h2>Plan</h2><p>What was decided, and why.</p><pre>{escape(notes)}</pre>" if notes else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="soft">One training step (forward, backward, gradient reduction, optimizer update) on one of its ranks; all
ranks do the same. All numbers are predictions of the plan.</p>
<div class="numbers">{_numbers(schedule)}</div>
<h2>Memory</h2>
<p>How many bytes are on the device at each moment of the step, and what they are; the height of a colour is its share.
{_about_peak(sum(highest.values()), totals.peak_bytes)}; the dot is where.{about_limits}</p>
{memory}
<p id="here" class="soft"></p>
<p class="soft">Bytes where the curve is highest:</p>
{legend(shares)}
{about_tiers}{tiers}
<h2>Streams</h2>
<p>What runs at the same time, a track each, time from left to right as above: {_about_streams(schedule)}. What runs
below computation costs no time; where computation has to wait, its track is red. Rest the pointer on a slice to read
its operator, layer, bytes and time.</p>
{timeline}
{legend(words)}
<h2>Schedule</h2>
<p>Every instruction in the order it runs. Layers that run the same instructions are shown once, under a line with their
number and sums. <i>in</i> and <i>out</i> are bytes read and written in device memory, <i>live</i> what is held
afterwards, <i>peak</i> the most while it runs, <i>wire</i> what the rank sends, <i>waits</i> how long computation stood
still before it. A <i>bucket</i> is the parameters that are gathered and reduced together, mostly those of a layer.
Names that end in <i>forward</i>, <i>backward</i> or <i>update</i> are functions of the generated step; the others:</p>
{_words(schedule)}
<pre>{escape(schedule.table())}</pre>
{plan_text}
<script type="application/json" id="data">{memory_data(schedule.memory, categories, seconds)}</script>
<script>{_SCRIPT}</script>
</body></html>
"""


def _numbers(schedule: Schedule) -> str:
    totals = schedule.totals
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


def _about_streams(schedule: Schedule) -> str:
    used = {row.stream for one in schedule.instructions for row in legs_of(one)} | {"compute"}
    return ", ".join(f"<i>{stream}</i> ({about})" for stream, about in _ABOUT_STREAMS.items() if stream in used)


def _words(schedule: Schedule) -> str:
    """What the instructions in the table that are no computation do."""
    used = {row.op for row in schedule.instructions}
    entries = (f"<dt>{op}</dt><dd>{about}</dd>" for op, about in ABOUT_INSTRUCTIONS.items() if op in used)
    return f'<dl id="words">{"".join(entries)}</dl>'


def _share(category: str, num_bytes: int) -> str:
    about = _ABOUT_CATEGORIES.get(category, "")
    return f"{format_bytes(num_bytes)}{', ' if about else ''}{about}"


def _verdict(peak_bytes: int, limit: int) -> str:
    return f"is {format_bytes(abs(limit - peak_bytes))} {'below' if peak_bytes <= limit else 'ABOVE'}"
