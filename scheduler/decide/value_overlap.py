"""Overlap of collectives on values with computation that does not wait for them.

Where ranks share one computation, a collective stands between a value and its readers, and most of what follows waits.
What does not are gradients of weights: they are computed of what is there already, and nothing in the step reads them.
Of each layer's run of nodes

    grad_w2 = mm(...); dx = mm(...); sum = reduce_scatter_values(dx); d = wait(sum); ...

those are held back until a collective is under way, as many as take its time; a collective that they alone read starts
where the one before it is awaited; and every collective is awaited where it is first read. What is held back is
computed before the layer's run ends: no gradient is complete a layer later, and what it is made of is held no longer
than that.

Times are those of single operators; a plan's simulation tells what is hidden of it.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.wire_volume import value_collective_seconds
from zerofx.scheduler.plan.decisions import MovedNodes


def decide_overlaps(step: StepGraph, machine: Machine) -> tuple[MovedNodes, ...]:
    """Decide which nodes of one rank's graph to move, so that collectives on values overlap with computation.

    The graph is that of ``passes/prepare/partition.py``, before anything else is put in.
    """
    following = _collectives_from(step)
    overlaps: list[MovedNodes] = []
    for _, run in itertools.groupby(step.calls(), key=lambda node: (step.unit_of(node), origin(node).phase)):
        nodes = list(run)
        if any(node.target in VALUE_COLLECTIVES for node in nodes):
            overlaps += _node_moves(nodes, _Run(nodes, following, machine).order())
    return tuple(overlaps)


def _collectives_from(step: StepGraph) -> Mapping[fx.Node, int]:
    """The longest chain of collectives on values from each node on, the node itself counted."""
    following: dict[fx.Node, int] = {}
    for node in reversed(step.graph.nodes):
        of_readers = max((following[user] for user in node.users), default=0)
        following[node] = of_readers + (node.target in VALUE_COLLECTIVES)
    return following


class _Run:
    """The nodes of one layer and phase as they are put in order, and the time that this takes.

    ``clock`` is the time on the stream of computation, ``link`` that on the collectives'.
    """

    def __init__(self, nodes: Sequence[fx.Node], following: Mapping[fx.Node, int], machine: Machine) -> None:
        self._nodes, self._inside = nodes, set(nodes)
        self._following, self._machine = following, machine
        self._order: dict[fx.Node, None] = {}
        self._held: dict[fx.Node, None] = {}
        self._ends: dict[fx.Node, float] = {}  # of collectives, by the node that starts them
        self._clock = self._link = 0.0

    def order(self) -> list[fx.Node]:
        """All nodes, each after what it reads."""
        waiting: dict[fx.Node, None] = {}
        for segment in _segments(self._nodes):
            for node in segment:
                if self._following[node] == 1 and self._is_ready(node):
                    self._add(node)
            for node in segment:
                if node in self._order:
                    continue
                if not self._following[node] and origin(node).phase is Phase.BACKWARD:
                    self._held[node] = None
                    continue
                if node.target is ops.wait and node.args[0] in self._ends:
                    waiting[node] = None
                    continue
                for read in node.all_input_nodes:
                    if read in waiting:
                        del waiting[read]
                        self._await(read)
                self._add(node)
        return [*self._order, *waiting, *self._held]

    def _is_ready(self, node: fx.Node) -> bool:
        return all(read in self._order or read not in self._inside for read in node.all_input_nodes)

    def _add(self, node: fx.Node) -> None:
        self._order[node] = None
        for part in node.users:  # what names its outputs stays with it
            if part.target is operator.getitem:
                self._order[part] = None
                self._held.pop(part, None)
        if node.target in VALUE_COLLECTIVES:
            self._link = max(self._clock, self._link) + value_collective_seconds(node, self._machine)
            self._ends[node] = self._link
        elif node.target is ops.wait:
            self._clock = max(self._clock, self._end_of(node))
        else:
            self._clock += node_cost(node, self._machine).seconds

    def _end_of(self, wait: fx.Node) -> float:
        source = wait.args[0]
        assert isinstance(source, fx.Node)
        return self._ends.get(source, 0.0)

    def _await(self, wait: fx.Node) -> None:
        """Compute what is held back while the collective runs, and wait for the rest of it."""
        while self._clock < self._end_of(wait):
            ready = next(filter(self._is_computed_next, self._held), None)
            if ready is None:
                break
            del self._held[ready]
            self._add(ready)
        self._add(wait)

    def _is_computed_next(self, held: fx.Node) -> bool:
        """True if all inputs of a held node are there, and it does not wait for a collective that is not done."""
        is_early = held.target is ops.wait and self._end_of(held) > self._clock
        return not is_early and self._is_ready(held)


def _segments(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """``nodes``, cut before each wait."""
    segment: list[fx.Node] = []
    for node in nodes:
        if node.target is ops.wait and segment:
            yield segment
            segment = []
        segment.append(node)
    yield segment


def _node_moves(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> Iterator[MovedNodes]:
    """Moves that turn one order of nodes into another: as few as possible, in front of nodes that stay."""
    places = {node: place for place, node in enumerate(before)}
    stay = _longest_rising([places[node] for node in after])
    moved: list[str] = []
    for node in (*after, before[-1].next):
        if node in places and places[node] not in stay:
            moved.append(node.name)
        elif moved:
            yield (*moved, node.name)
            moved = []


def _longest_rising(numbers: Sequence[int]) -> set[int]:
    """The longest rising subsequence of different numbers (Fredman 1975)."""
    ends: list[int] = []  # the least end of a rising subsequence of each length
    before: dict[int, int | None] = {}
    for number in numbers:
        length = bisect.bisect_left(ends, number)
        before[number] = ends[length - 1] if length else None
        ends[length : length + 1] = [number]
    longest: set[int] = set()
    last = ends[-1] if ends else None
    while last is not None:
        longest.add(last)
        last = before[last]
    return longest
