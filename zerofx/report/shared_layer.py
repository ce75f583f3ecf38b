"""One layer as the ranks of the axis ``model`` share it: its operators, placements of results, and sent bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source, tensors_of
from zerofx.ir.facts import Phase, copied_from, origin
from zerofx.ir.text import call_name
from zerofx.lowering.lower import LoweredStep
from zerofx.report.rows import ScheduleRow
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.scheduler.plan.text.shared import placement_words
from zerofx.units import format_bytes, format_seconds


@dataclass(frozen=True)
class SharedStep:
    """Consecutive operators whose results have one placement, or one collective on a value.

    ``shape`` is that of the last result on one rank, ``placement`` as ``scheduler/plan/placements.py`` writes it. A
    collective has neither: ``num_bytes`` are sent by a rank, ``waited_seconds`` is the time computation waits for it.
    """

    name: str
    shape: tuple[int, ...]
    placement: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class SharedLayer:
    """The forward of one layer, shared by ``num_ranks`` ranks, in execution order."""

    layer: str
    num_ranks: int
    steps: tuple[SharedStep, ...]


def shared_layer(lowered: LoweredStep, rows: Mapping[fx.Node, ScheduleRow]) -> SharedLayer | None:
    """The middle one of the layers that ranks of the axis ``model`` share; None if none is shared."""
    plan, graph = lowered.plan, lowered.graph
    if plan.model == 1:
        return None
    forward = (n for n in graph.calls() if origin(n).phase is Phase.FORWARD and copied_from(n) is None)
    nodes = [node for node in forward if graph.unit_of(node)]
    shared = dict.fromkeys(graph.unit_of(node) for node in nodes if node.target in ops.VALUE_COLLECTIVES)
    if not shared:
        return None
    layer = list(shared)[len(shared) // 2]
    decisions = {decision.node: decision for decision in plan.shardings if not decision.parameter}
    own = [node for node in nodes if graph.unit_of(node) == layer]
    return SharedLayer(layer, plan.model, tuple(_merge(_steps(own, rows, decisions))))


def _steps(
    nodes: list[fx.Node], rows: Mapping[fx.Node, ScheduleRow], decisions: Mapping[str, ShardingDecision]
) -> Iterator[tuple[SharedStep, bool]]:
    """The steps, and whether each may share a line with its neighbours. Views are not among them."""
    waits = {node.args[0]: rows[node].exposed_seconds for node in nodes if node.target is ops.wait and node in rows}
    for node in nodes:
        if node not in rows:
            continue
        row = rows[node]
        if node.target in ops.VALUE_COLLECTIVES:
            source, _ = storage_source(node.all_input_nodes[0])
            moved = "weights" if source.op == "placeholder" or source.target in ops.EVENTS else _name(source)
            name = f"{_name(node)} of {moved}"
            yield SharedStep(name, (), "", row.wire_bytes, row.seconds, waits.get(node, 0.0)), False
            continue
        # Products and attention compute more than they move.
        is_heavy = row.flops > row.bytes_in + row.bytes_out
        placement = _placement(node, decisions, is_heavy=is_heavy)
        if placement:
            yield SharedStep(_name(node), tuple(tensors_of(node)[0].shape), placement), not is_heavy


def _name(node: fx.Node) -> str:
    return call_name(node).partition(".")[0].lstrip("_")


def _placement(node: fx.Node, decisions: Mapping[str, ShardingDecision], *, is_heavy: bool) -> str:
    """The placement of a result: by the decision for it, or for its first reader if it is replaced by other operators;
    ``""`` if there is neither."""
    if node.name in decisions:
        return decisions[node.name].outputs[0] or ""
    if not is_heavy:
        return ""
    while node.users and (reader := next(iter(node.users))).name not in decisions:
        node = reader
    if not node.users:
        return ""
    return dict(zip(reader.all_input_nodes, decisions[reader.name].inputs, strict=False)).get(node, "")


def _merge(steps: Iterator[tuple[SharedStep, bool]]) -> list[SharedStep]:
    """Merge neighbours of one placement, except products and attention."""
    merged: list[SharedStep] = []
    before = False
    for step, may_share in steps:
        if before and may_share and merged[-1].placement == step.placement:
            merged[-1] = replace(step, name=f"{merged[-1].name}, {step.name}")
        else:
            merged.append(step)
        before = may_share
    return merged


def shared_lines(shared: SharedLayer) -> Iterator[tuple[str, str, str]]:
    """Name, shape and placement of each step of the layer; of a collective, what is sent and waited for."""
    for step in shared.steps:
        if step.placement:
            words = placement_words(step.placement)
        else:
            waited = f", {format_seconds(step.waited_seconds)} waited for" if step.waited_seconds else ", hidden"
            words = f"{format_bytes(step.num_bytes)} sent, {format_seconds(step.seconds)}{waited}"
        yield step.name, " x ".join(map(str, step.shape)), words
