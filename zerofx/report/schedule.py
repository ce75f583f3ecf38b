"""The schedule: a row for every node of a step in execution order, with its bytes, time and origin.

Rows are per node; instructions are the same per region or event, one for each line of the emitted file. Views have no
row: they cost neither bytes nor time. All numbers are predictions for one rank of the plan's machine. Inside regions
that Inductor has compiled, memory is known for the region as a whole: its last row has the peak.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import fx

from zerofx.codegen.regions import Event, Instruction
from zerofx.disk.own_files import write_named
from zerofx.ir import ops
from zerofx.ir.aliasing import bound_arguments, is_view, node_bytes, storage_source
from zerofx.ir.facts import copied_from, origin, tier_of
from zerofx.ir.streams import stream_of
from zerofx.ir.text import call_name
from zerofx.lowering.lower import LoweredStep
from zerofx.report.page import ScheduleData, page
from zerofx.report.peak import peak_of
from zerofx.report.rows import ScheduleRow, Totals
from zerofx.report.shared_layer import shared_layer
from zerofx.report.table import schedule_table
from zerofx.report.trace import chrome_trace
from zerofx.scheduler.cost.categories import memory_curve
from zerofx.scheduler.cost.liveness import TierUse
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import tiles_words
from zerofx.scheduler.plan.text.reasons import reasons

FORMAT = 2


@dataclass(frozen=True)
class Schedule(ScheduleData):
    """The table of a step. ``print`` shows it by instruction, with repeated layers folded into one.

    ``rows`` has every node, ``instructions`` every region and event. ``memory`` has seconds from the step's start and
    the bytes on the device from there on, by category; ``slower_memory`` has seconds and bytes of each slower tier in
    use. ``peak`` has the tensors at the peak, ``decisions`` the kind of each decision, its subject, and its reason.
    ``shared`` is one layer as ranks of the axis ``model`` share it, if they do.
    """

    def table(self, fold: bool = True) -> str:
        """The instructions as text; ``fold=False`` writes every layer out."""
        return schedule_table(self.instructions, self.totals, fold)

    def to_json(self, path: str | Path | None = None) -> str:
        """All fields as JSON, in bytes and seconds; also written to ``path`` if one is given."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        if path is not None:
            write_named(path, text)
        return text

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev or chrome://tracing: a track a stream, and memory curves."""
        trace = chrome_trace(self.rows, self.instructions, self.memory, self.slower_memory)
        write_named(path, json.dumps(trace))

    def to_html(
        self, path: str | Path, title: str = "zerofx step", *, limits: Mapping[str, int] | None = None, notes: str = ""
    ) -> None:
        """Write one self-contained page for a browser: decisions, the peak's tensors, memory, streams and the table,
        with explanations.

        ``limits`` are bytes to draw over the memory curve, by name (``{"device": 80 * 2**30}``); ``notes``, such as
        ``str(plan)``, can be opened below the decisions.
        """
        write_named(path, page(self, title, limits or {}, notes))

    def __str__(self) -> str:
        return self.table()


def make_schedule(lowered: LoweredStep) -> Schedule:
    """The schedule of a step after all passes."""
    simulation = lowered.simulation
    functions = {
        node: lowered.emitted.functions[instruction.key]
        for instruction in lowered.instructions
        if not isinstance(instruction, Event)
        for node in instruction.own
    }
    rows = {
        node: _row(lowered, node, position, functions.get(node, ""))
        for position, node in enumerate(lowered.graph.calls())
        if node.target in ops.EVENTS or not is_view(node)
    }
    totals = Totals(
        simulation.live.peak_bytes,
        simulation.step_seconds,
        simulation.exposed_seconds,
        simulation.wire_bytes,
        simulation.flops,
        {tier: use.peak_bytes for tier, use in simulation.live.slower.items()},
        simulation.link_bytes,
    )
    instructions = tuple(_instruction(lowered, instruction, rows) for instruction in lowered.instructions)
    slower = {tier: _slower_memory(lowered, rows, use) for tier, use in simulation.live.slower.items()}
    peak = peak_of(lowered.graph, simulation.live, lowered.plan)
    return Schedule(
        tuple(rows.values()),
        instructions,
        totals,
        _memory(lowered, rows),
        slower,
        peak,
        tuple(_decisions(lowered.plan)),
        shared_layer(lowered, rows),
    )


def _decisions(plan: Plan) -> Iterator[tuple[str, str, str]]:
    if plan.num_micro_batches > 1:
        yield "micro-batches", f"{plan.num_micro_batches} before each update", plan.micro_batches_reason
    for sliced in plan.slices:
        yield "slices", f"{sliced.value} in {sliced.num_tiles}", sliced.reason
    for tiled in plan.tiles:
        yield "tiles", f"{tiled.value} of {tiled.layer or '(model)'} in {tiles_words(tiled)}", tiled.reason
    for kind, listed in reasons(plan).items():
        for reason in listed:
            yield kind, reason.subject, reason.text


def _row(lowered: LoweredStep, node: fx.Node, position: int, region: str) -> ScheduleRow:
    step, live, timing = lowered.graph, lowered.simulation.live, lowered.simulation.timings[node]
    is_event = node.target in ops.EVENTS
    read, written = timing.bytes_read, timing.bytes_written
    if node.target in ops.COLLECTIVES:
        read = sum(map(node_bytes, node.all_input_nodes))
        written = node_bytes(node) or read
    bucket = _bucket_of(node)
    return ScheduleRow(
        position=position,
        name=node.name,
        op=call_name(node),
        kind="event" if is_event else "node",
        region=region,
        layer=origin(node).layer,
        unit=step.unit_of(node),
        bucket=lowered.plan.buckets[bucket].name if bucket is not None else "",
        phase=str(origin(node).phase),
        stream=stream_of(node),
        bytes_in=read,
        bytes_out=written,
        live_bytes=live.after[node],
        peak_bytes=live.during[node],
        wire_bytes=timing.wire_bytes,
        flops=timing.flops,
        start_seconds=timing.start_seconds,
        seconds=timing.seconds,
        exposed_seconds=timing.exposed_seconds,
        tier=tier_of(storage_source(node)[0]),
        legs=timing.legs,
        recompute_seconds=timing.seconds if copied_from(node) is not None else 0.0,
    )


def _bucket_of(node: fx.Node) -> int | None:
    """The index of an event's bucket; None for other nodes, and if there is none."""
    if node.target in (ops.wait, ops.release):
        source = node.args[0]
        return _bucket_of(source) if isinstance(source, fx.Node) else None
    if node.target not in ops.EVENTS:
        return None
    if node.target is ops.hyperparameters:
        index: object = node.args[0]
    else:
        index = next((value for argument, value in bound_arguments(node) if argument.name == "bucket"), ops.NO_BUCKET)
    assert isinstance(index, int)
    return None if index == ops.NO_BUCKET else index


def _instruction(lowered: LoweredStep, instruction: Instruction, rows: Mapping[fx.Node, ScheduleRow]) -> ScheduleRow:
    """One row for a region or event: sums, the highest peak, and the live bytes after its last node."""
    if isinstance(instruction, Event):
        return rows[instruction.node]
    members = [rows[node] for node in instruction.own if node in rows]
    function = lowered.emitted.functions[instruction.key]
    return replace(
        members[0],
        name=function,
        op=function,
        kind="region",
        layer=instruction.unit or instruction.origin.layer,
        unit=instruction.unit,
        bytes_in=sum(row.bytes_in for row in members),
        bytes_out=sum(row.bytes_out for row in members),
        live_bytes=lowered.simulation.live.after[instruction.own[-1]],
        peak_bytes=max(row.peak_bytes for row in members),
        flops=sum(row.flops for row in members),
        seconds=sum(row.seconds for row in members),
        exposed_seconds=sum(row.exposed_seconds for row in members),
        recompute_seconds=sum(row.recompute_seconds for row in members),
    )


def _memory(lowered: LoweredStep, rows: Mapping[fx.Node, ScheduleRow]) -> tuple[tuple[float, dict[str, int]], ...]:
    """The memory curve over time, a compiled region as one. A collective takes its memory when computation reaches it,
    before it starts."""
    points: list[tuple[float, dict[str, int]]] = []
    now = 0.0
    for moment in memory_curve(lowered.graph, lowered.simulation.live):
        computed = [rows[node] for node in moment.nodes if node in rows and rows[node].stream == "compute"]
        begin = computed[0].start_seconds if computed else now
        now = computed[-1].start_seconds + computed[-1].seconds if computed else now
        for at, held in ((begin, moment.during), (now, moment.after)):
            if not points or points[-1][1] != held:
                points.append((at, {str(category): num_bytes for category, num_bytes in held.items()}))
    return tuple(points)


def _slower_memory(
    lowered: LoweredStep, rows: Mapping[fx.Node, ScheduleRow], use: TierUse
) -> tuple[tuple[float, int], ...]:
    """Bytes on a slower tier over time: the maximum while a node runs, where that changes."""
    points: list[tuple[float, int]] = [(0.0, use.persistent_bytes)]
    now = 0.0  # of computation
    for node in lowered.graph.calls():
        row = rows.get(node)
        if row is not None and row.stream == "compute":
            now = row.start_seconds + row.seconds
        if points[-1][1] != use.during[node]:
            points.append((now, use.during[node]))
    return tuple(points)
