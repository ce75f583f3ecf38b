"""When each layer computes: the runs of a step's units in order, with the seconds that each takes.

The scale on which transfers are placed: what is moved during a run is hidden by it. Links carry one copy at a time:
``earliest_ends`` and ``latest_starts`` place the copies on one of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import Phase, copied_from, origin, piece_of, slice_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_bodies, stretches, times_run
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost

UnitPhase = tuple[str, Phase]


@dataclass(frozen=True)
class UnitRun:
    """A unit's nodes in a row in one phase: the first, the last, and when they run, in seconds from the step's begin.

    Those that work on a slice of a weight are a run of their own, and so are those of a piece. ``unit`` is ``""`` for
    nodes outside all units. Where micro-batches run layer by layer, it is all that a layer does for them in a row, in
    the unit and phase that it begins in.
    """

    unit: str
    phase: Phase
    first: fx.Node
    last: fx.Node
    start_seconds: float
    end_seconds: float


def seconds_by_place(
    step: StepGraph, machine: Machine, measured: Mapping[str, float] | None = None
) -> dict[UnitPhase, float]:
    """Seconds of computation in each unit and phase, over all its runs; ``measured`` as for ``simulate``.

    A loop counts as one micro-batch, or where micro-batches run layer by layer as all of its rounds.
    """
    by_place: dict[UnitPhase, float] = {}
    times = times_run(step) if step.by_layer else {}
    for node in step.calls():
        if not is_view(node):
            place = (step.unit_of(node), origin(node).phase)
            seconds = measured.get(node.name) if measured is not None else None
            once = node_cost(node, machine).seconds if seconds is None else seconds
            by_place[place] = by_place.get(place, 0.0) + times.get(node, 1) * once
    return by_place


class Positions:
    """Finds the run that a node is in; one before all of them is in the first."""

    def __init__(self, step: StepGraph, spans: Sequence[UnitRun]) -> None:
        self.order = step.positions()
        self._by_name = step.nodes_by_name()
        self._starts = [self.order[run.first] for run in spans]
        bodies = loop_bodies(step)
        self._bodies = [bodies[run.first.name] for run in spans]

    def begin_of_body(self, run: int) -> int:
        """The first run of the micro-batch of ``run`` where there is a loop over them, or else of the step."""
        return self._bodies.index(self._bodies[run])

    def run(self, name: str) -> int:
        return self.run_of(self._by_name[name])

    def run_of(self, node: fx.Node) -> int:
        return max(0, bisect_right(self._starts, self.order[node]) - 1)


def runs(step: StepGraph, seconds: Mapping[UnitPhase, float]) -> list[UnitRun]:
    """All runs in order of a captured step, whether or not recomputation has been carried out.

    ``seconds`` are divided evenly between the runs of one unit and phase.
    """

    def computes(node: fx.Node) -> bool:
        return not is_view(node) and copied_from(node) is None and node.target not in ops.AROUND_MICRO_BATCHES

    def part_of(node: fx.Node) -> tuple[UnitPhase, str | None, str | None]:
        return (step.unit_of(node), origin(node).phase), slice_of(node), piece_of(node)

    stretch_of, bodies = stretches(step) if step.by_layer else {}, loop_bodies(step)

    def run_key(node: fx.Node) -> object:
        return stretch_of[node] if step.by_layer else (bodies[node.name], part_of(node))

    spans: list[tuple[list[UnitPhase], fx.Node, fx.Node]] = []
    for _, group in itertools.groupby(filter(computes, step.calls()), run_key):
        nodes = list(group)
        spans.append((list(dict.fromkeys(part_of(node)[0] for node in nodes)), nodes[0], nodes[-1]))
    times = Counter(place for places, _, _ in spans for place in places)
    in_order, now = [], 0.0
    for places, first, last in spans:
        end = now + sum(seconds.get(place, 0.0) / times[place] for place in places)
        in_order.append(UnitRun(*places[0], first, last, now, end))
        now = end
    return in_order


def earliest_ends(ready: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """When copies end that are made in order, each as soon as it is ready and the lane is free."""
    ends, free = list[float](), 0.0
    for begin, time in zip(ready, seconds, strict=True):
        free = max(free, begin) + time
        ends.append(free)
    return ends


def latest_starts(
    deadlines: Sequence[float],
    seconds: Sequence[float],
    ranks: Sequence[tuple[int, ...]],
    others: Sequence[tuple[float, float]] = (),
) -> list[float]:
    """When copies that have to end by their ``deadlines`` may begin at the latest.

    Going back from the last deadline, of what may end then the one of the highest rank is copied. ``others``: when what
    else is copied ends, each with the seconds that it takes.
    """
    rank = [tuple(-number for number in key) for key in ranks] + [(-math.inf, 0)] * len(others)  # before all else
    ends = [*deadlines, *(end for end, _ in others)]
    takes = [*seconds, *(time for _, time in others)]
    order = sorted(range(len(ends)), key=lambda n: (ends[n], -rank[n][1], n))
    starts = [0.0] * len(ends)
    free, ending = math.inf, list[tuple[float, ...]]()
    while order or ending:
        if not ending:
            free = min(free, ends[order[-1]])
        while order and ends[order[-1]] >= free:
            number = order.pop()
            heappush(ending, (*rank[number], -number))
        number = -int(heappop(ending)[-1])
        free = starts[number] = min(free, ends[number]) - takes[number]
    return starts[: len(deadlines)]
