"""Cut a step graph into regions: maximal runs of nodes between scheduled events, inside one unit and one phase, on the
device or on the host, and of one tile: what runs tile by tile must not be fused across tiles. Quantisation
for communication gets its own region: a layer's own region is then the same whether its bucket is quantised or not.
Outside layers a region also ends at the borders of a piece whose values are computed again or offloaded: a compiler
that saw what computes them twice at once would compute them once, and hold them.

Where forward turns into backward without leaving its unit, as it does around the loss, both are one region: what only
they share, such as the logits' softmax, then need not be held between them.

A region is what is compiled as one piece. Only tensors that own their storage cross a border: a view that a later
region needs is made again there from its base, so that a name held is memory held, and a gathered bucket has no other
name. Regions with equal structure, shapes, strides and dtypes have equal keys, and are compiled once.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import Origin, Phase, origin, slice_of, tile_of, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import runs_on_host
from zerofx.ir.text import BareText, target_name


@dataclass(frozen=True)
class Region:
    """A run of nodes with the values that enter and leave it, in order of first use and of definition.

    ``unit`` is the repeated layer that it is in, or ``""``; ``origin`` is that of its first node that computes.
    ``own``: its nodes in the graph, in order. ``nodes``: the lines that are emitted, without views that nothing here
    reads, and with views of the inputs that were made in an earlier region and are made again here.
    """

    own: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    unit: str
    origin: Origin
    key: str = field(compare=False, default="")

    @property
    def is_update(self) -> bool:
        return self.origin.phase is Phase.UPDATE


@dataclass(frozen=True)
class Event:
    """One scheduled node: a collective, a wait, a release, or the making of a buffer."""

    node: fx.Node


Instruction = Region | Event


def cut(step: StepGraph) -> tuple[Instruction, ...]:
    """The step as a sequence of instructions, in the graph's order."""
    runs = list(_runs(step))
    run_of = {node: number for number, run in enumerate(runs) for node in run}
    instructions: list[Instruction] = []
    for number, run in enumerate(runs):
        if run[0].target in ops.EVENTS:
            instructions.append(Event(run[0]))
        else:
            region = _region(step.unit_of(run[0]), run, number, run_of)
            if region is not None:
                instructions.append(region)
    return tuple(instructions)


def regions_of(instructions: tuple[Instruction, ...]) -> list[Region]:
    """The regions among the instructions of a step, in order; equal ones as often as they run."""
    return [i for i in instructions if isinstance(i, Region)]


def _runs(step: StepGraph) -> Iterator[list[fx.Node]]:
    run: list[fx.Node] = []
    group: tuple[str, bool, bool, str | None, str | None, bool] | None = None
    phase: Phase | None = None
    piece: str | None = None
    for node in step.calls():
        is_event = node.target in ops.EVENTS
        here = (
            step.unit_of(node), origin(node).phase is Phase.UPDATE, runs_on_host(node), tile_of(node), slice_of(node),
            node.target in ops.QUANTISERS,
        )  # fmt: skip
        # A view can be made anywhere, and an output of an operator stays with it: neither ends a run.
        stays = node.target is operator.getitem or is_free_view(node)
        # A forward after a backward is the next micro-batch's.
        again = not stays and origin(node).phase is Phase.FORWARD and phase is Phase.BACKWARD
        # What passes have added is of no piece, and runs with its neighbours.
        own = None if stays else step.cut_piece_of(node)
        leaves = own is not None and piece is not None and own != piece
        if run and (is_event or again or leaves or (here != group and not stays)):
            yield run
            run, group, piece = [], None, None
        piece = piece if own is None else own
        if is_event:
            yield [node]
        else:
            group = here if group is None or not stays else group
            phase = phase if stays else origin(node).phase
            run.append(node)
    if run:
        yield run


def is_free_view(node: fx.Node) -> bool:
    """True for a node that costs nothing to compute again anywhere: a view of another value, not an event's result."""
    if node.target in ops.EVENTS or not is_view(node):
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source.target is ops.hyperparameters or is_free_view(source)
    return True


def _region(unit: str, run: list[fx.Node], number: int, run_of: dict[fx.Node, int]) -> Region | None:
    work = [node for node in run if not is_free_view(node)]
    if not work:
        return None
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}

    def require(node: fx.Node) -> None:
        if node in nodes or node in inputs:
            return
        if is_free_view(node):
            for source in node.all_input_nodes:
                require(source)
            nodes[node] = None
        elif run_of.get(node) != number:
            inputs[node] = None

    for node in work:
        for source in node.all_input_nodes:
            require(source)
        nodes[node] = None
    outputs = [
        node for node in work if not isinstance(value(node), list | tuple) and _used_outside(node, number, run_of)
    ]
    region = Region(tuple(run), tuple(nodes), tuple(inputs), tuple(outputs), unit, origin(work[0]))
    return replace(region, key=_key(region))


def _used_outside(node: fx.Node, number: int, run_of: dict[fx.Node, int]) -> bool:
    """True if another region or event reads ``node``, itself or through views."""
    return any(
        _used_outside(user, number, run_of) if is_free_view(user) else run_of.get(user) != number for user in node.users
    )


def _key(region: Region) -> str:
    names = {node: BareText(f"x{i}") for i, node in enumerate(region.inputs)}
    lines = [_describe(value(node)) for node in region.inputs]
    for i, node in enumerate(region.nodes):
        names[node] = BareText(f"v{i}")
        args, kwargs = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(f"v{i} = {target_name(node)} {args} {kwargs} : {_describe(value(node))}")
    lines.append(" ".join(names[node] for node in region.outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _describe(fake: Any) -> str:
    if isinstance(fake, torch.Tensor):
        return f"{fake.dtype} {list(fake.shape)} {list(fake.stride())} {fake.device.type}"
    if isinstance(fake, list | tuple):
        return "(" + ", ".join(_describe(item) for item in fake) + ")"
    return type(fake).__name__
