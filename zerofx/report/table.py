"""The schedule as a text table: aligned, with sizes and times in their own units."""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.report.rows import ScheduleRow, Totals
from zerofx.scheduler.plan.text.fold import Block, fold, span
from zerofx.units import format_bytes, format_count, format_seconds, text_table, tiers_text

HEADERS = ("#", "what", "layer", "phase", "stream", "in", "out", "live", "peak", "wire", "FLOPs", "waits", "time")
INDENT = "  "  # before what a folded layer runs


def schedule_table(instructions: Sequence[ScheduleRow], totals: Totals, fold_layers: bool) -> str:
    """A line per instruction, and the totals; see ``schedule_lines``."""
    lines = schedule_lines(instructions, fold_layers)
    return f"{text_table(lines, HEADERS, left=(1, 2, 3, 4))}\n\n{totals_line(totals)}"


def schedule_lines(instructions: Sequence[ScheduleRow], fold_layers: bool) -> list[list[str]]:
    """A line per instruction, with the cells of ``HEADERS``.

    ``fold_layers``: show layers that run the same instructions once, indented under a line with their names, their
    number and the sums over all of them. Instructions without bytes or time (hyperparameters) are omitted.
    """
    shown = [row for row in instructions if row.op != "hyperparameters"]
    shapes = [(row.region or row.op, row.phase, row.stream, row.tier) for row in shown]
    anchors = [fold_layers and row.kind == "region" and row.unit != "" for row in shown]
    lines: list[list[str]] = []
    for block in fold(shapes, anchors):
        first = [shown[i] for i in block.repetition(0)]
        if block.count > 1:
            lines.append(_header(shown, block))
        if block.count == 1 or any(anchors[i] for i in block.repetition(0)):
            lines += [_line(row, INDENT if block.count > 1 else "") for row in first]
    return lines


def totals_line(totals: Totals) -> str:
    """The step in one line."""
    return (
        f"predicted, per rank: peak {format_bytes(totals.peak_bytes)}{tiers_text(totals.slower_peak_bytes)}, step "
        f"{format_seconds(totals.step_seconds)} of which {format_seconds(totals.exposed_seconds)} waits for "
        f"communication, {format_bytes(totals.wire_bytes)} sent, {format_count(totals.flops)} FLOPs"
    )


def _header(shown: Sequence[ScheduleRow], block: Block) -> list[str]:
    """Sums over all repetitions: of a layer, or of one repeated event or region, which then has no lines of its own."""
    members = [shown[i] for i in range(block.start, block.start + block.length * block.count)]
    first, stream = members[0], "compute"
    if any(row.kind == "region" and row.unit for row in members):
        names = [_layer_of([shown[i] for i in block.repetition(n)]) for n in range(block.count)]
        title = ["", f"{span(names)}  x{block.count}", "", "", ""]
    else:
        names, stream = [row.layer or row.bucket for row in members], first.stream
        title = [
            str(first.position),
            f"{first.region or first.op}  x{block.count}",
            span(names),
            first.phase,
            first.stream,
        ]
    return [
        *title,
        _bytes(sum(row.bytes_in for row in members)),
        _bytes(sum(row.bytes_out for row in members)),
        _bytes(members[-1].live_bytes),
        _bytes(max(row.peak_bytes for row in members)),
        _bytes(sum(row.wire_bytes for row in members)),
        _count(sum(row.flops for row in members)),
        _seconds(sum(row.exposed_seconds for row in members)),
        _seconds(sum(row.seconds for row in members if row.stream == stream)),
    ]


def _layer_of(members: Sequence[ScheduleRow]) -> str:
    """The repeated layer that a repetition computes; its update may belong to another. There may be none."""
    units = [row.unit for row in members if row.kind == "region" and row.unit]
    units = [row.unit for row in members if row.kind == "region" and row.unit and row.phase != "update"] or units
    return units[0] if units else members[0].layer or members[0].bucket or "(model)"


def _line(row: ScheduleRow, indent: str) -> list[str]:
    return [
        str(row.position),
        indent + (row.region or row.op),
        row.layer or row.bucket or "(model)",
        row.phase,
        row.stream if row.tier == "device" else f"{row.stream}, on {row.tier}",
        _bytes(row.bytes_in),
        _bytes(row.bytes_out),
        _bytes(row.live_bytes),
        _bytes(row.peak_bytes),
        _bytes(row.wire_bytes),
        _count(row.flops),
        _seconds(row.exposed_seconds),
        _seconds(row.seconds),
    ]


def _bytes(number: int) -> str:
    return format_bytes(number) if number else ""


def _count(number: int) -> str:
    return format_count(number) if number else ""


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 5e-7 else ""
