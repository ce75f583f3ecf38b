"""A schedule as one page for a browser: decisions, the peak's tensors, memory, streams and the table, explained.

The page is a single file that loads nothing else: the pictures are inline SVG. It can be mailed, or kept as an artifact
of a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from zerofx.ir.streams import sort_streams
from zerofx.report.page_style import SCRIPT, STYLE
from zerofx.report.page_tables import decisions_table, layer_bars, peak_table, schedule_html
from zerofx.report.pictures import KINDS, colour_of, legend, memory_data, memory_picture, tier_picture, timeline_picture
from zerofx.report.rows import legs_of
from zerofx.report.shared_layer import render_shared_layer
from zerofx.report.table import totals_line
from zerofx.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from zerofx.report.schedule import Schedule

_ABOUT_CATEGORIES: Mapping[str, str] = {
    "parameters": "kept between steps",
    "optimizer states": "kept between steps",
    "buffers": "of the model",
    "gathered": "whole parameters, from gather to release",
    "gradients": "until they are reduced and applied",
    "activations": "made in forward, read in backward",
    "temporaries": "short-lived results of backward and update, and what operators and regions hold inside",
}
_ABOUT_KINDS: Mapping[str, str] = {
    "recomputation": "values of forward, computed again for backward",
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
    "gather_values": "starts to collect a value, whole, from the parts that ranks of one computation have",
    "reduce_scatter_values": "starts to sum what such ranks have of a value, of which each gets a part",
    "all_reduce_values": "starts to sum what such ranks have of a value, or to find its largest elements",
    "shift_values": "starts to hand a value to the next such rank, and to receive the one before's",
    "exchange_values": "starts to send each such rank a part of a value, and to receive the others'",
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
    "check_finite": "computation goes on to the updates only if the loss is finite on every rank",
}


def page(schedule: Schedule, title: str, limits: Mapping[str, int], notes: str) -> str:
    """One self-contained page for a browser; ``limits`` and ``notes`` as for ``Schedule.to_html``."""
    totals, seconds = schedule.totals, schedule.totals.step_seconds
    memory, categories = memory_picture(schedule.memory, schedule.instructions, limits, seconds, totals.peak_bytes)
    tiers = "".join(tier_picture(tier, curve, seconds) for tier, curve in schedule.slower_memory.items())
    about_tiers = '<p class="apart">Bytes on the slower tiers, with what passes through them:</p>' if tiers else ""
    timeline, kinds = timeline_picture(schedule.instructions, seconds)
    highest = max((held for _, held in schedule.memory), key=lambda held: sum(held.values()), default={})
    shares = {name: (colour_of(name), _share(name, highest[name])) for name in reversed(categories) if name in highest}
    words = {kind: (KINDS[kind], _ABOUT_KINDS.get(kind, "")) for kind in kinds}
    about_limits = "".join(
        f" The peak {_verdict(totals.peak_bytes, size)} the {escape(name)}, {format_bytes(size)}."
        for name, size in limits.items()
    )
    whole_plan = (
        f"<details><summary>The whole plan as text</summary><pre>{escape(notes)}</pre></details>" if notes else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="soft">One training step (forward, backward, gradient reduction, optimizer update) on one of its ranks; all
ranks do the same. All numbers are predictions of the plan.</p>
<div class="numbers">{_numbers(schedule)}</div>
<h2>What was decided</h2>
<p>Each decision of the plan with its reason; equal ones of successive layers share a line.</p>
{decisions_table(schedule.decisions)}
{whole_plan}
{render_shared_layer(schedule.shared)}<h2>The peak</h2>
<p>The largest tensors on the device when it holds most, {format_bytes(totals.peak_bytes)}: which they are, the line of
the model that makes them, and why they are there then. Equal tensors of successive layers share a line.</p>
{peak_table(schedule.peak.tensors, totals.peak_bytes)}
<p class="apart">All bytes at the peak by layer; colours as below.</p>
{layer_bars(schedule.peak.layers)}
<h2>Memory</h2>
<p>How many bytes are on the device at each moment of the step, and what they are; the height of a colour is its share.
The dashed line is the peak; the dot is where.{about_limits}</p>
<div class="wide">{memory}</div>
<p id="here" class="soft"></p>
<p class="soft">At the peak, {format_bytes(sum(highest.values()))} in all:</p>
{legend(shares)}
{about_tiers}<div class="wide">{tiers}</div>
<h2>Streams</h2>
<p>What runs at the same time, a track each, time from left to right as above: {_explain_streams(schedule)}. What runs
below computation costs no time; where computation has to wait, its track is red. Rest the pointer on a slice to read
its operator, layer, bytes and time.</p>
<div class="wide">{timeline}</div>
{legend(words)}
<h2>Schedule</h2>
<p>Every instruction in the order it runs. Layers that run the same instructions are shown once, under a line with their
number and sums. <i>in</i> and <i>out</i> are bytes read and written in device memory, <i>live</i> what is held
afterwards, <i>peak</i> the most while it runs, <i>wire</i> what the rank sends, <i>waits</i> how long computation stood
still before it. A <i>bucket</i> is the parameters that are gathered and reduced together, mostly those of a layer.
Names that end in <i>forward</i>, <i>backward</i> or <i>update</i> are functions of the generated step; the others:</p>
{_words(schedule)}
{schedule_html(schedule.instructions)}
<p class="soft">{escape(totals_line(totals))}</p>
<script type="application/json" id="data">{memory_data(schedule.memory, categories, seconds)}</script>
<script>{SCRIPT}</script>
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


def _explain_streams(schedule: Schedule) -> str:
    used = {row.stream for instruction in schedule.instructions for row in legs_of(instruction)} | {"compute"}
    about = {stream: _ABOUT_STREAMS[stream.partition(" ")[0]] for stream in sort_streams(used)}
    return ", ".join(f"<i>{stream}</i> ({text})" for stream, text in about.items())


def _words(schedule: Schedule) -> str:
    """Explanations of the instructions in the table that are not computation."""
    used = {row.op for row in schedule.instructions}
    entries = (f"<dt>{op}</dt><dd>{about}</dd>" for op, about in ABOUT_INSTRUCTIONS.items() if op in used)
    return f'<dl id="words">{"".join(entries)}</dl>'


def _share(category: str, num_bytes: int) -> str:
    about = _ABOUT_CATEGORIES.get(category, "")
    return f"{format_bytes(num_bytes)}{', ' if about else ''}{about}"


def _verdict(peak_bytes: int, limit: int) -> str:
    return f"is {format_bytes(abs(limit - peak_bytes))} {'below' if peak_bytes <= limit else 'ABOVE'}"
