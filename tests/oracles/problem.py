"""Recomputation as an abstract problem: a graph of nodes with seconds and bytes, schedules of it, and what they take.

A ``Schedule`` says in which order nodes are computed, again where needed, and when each value is given up. ``replay``
checks one from these rules alone and says what it takes: whatever a solver claims is only believed once replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.errors import UsageError
from zerofx.ir.aliasing import is_view, storage_source
from zerofx.ir.facts import copied_from, is_random
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost


@dataclass(frozen=True)
class Problem:
    """Nodes in a topological order: what each costs, and which earlier nodes it reads.

    ``results`` stay resident from their computation to the end. ``once`` may not be computed again (random operators).
    While a node runs, its inputs and its output are resident, and ``base_bytes`` beside them.
    """

    seconds: tuple[float, ...]
    num_bytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    results: frozenset[int] = frozenset()
    once: frozenset[int] = frozenset()
    base_bytes: int = 0

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.num_bytes) == len(self.reads) > 0:
            raise UsageError(
                f"expected seconds, bytes and reads of the same nodes, found {len(self.seconds)}, "
                f"{len(self.num_bytes)} and {len(self.reads)}"
            )
        for node, sources in enumerate(self.reads):
            if any(not 0 <= source < node for source in sources):
                raise UsageError(f"expected node {node} to read earlier nodes only, found {sources}: sort them first")

    @property
    def num_nodes(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Compute:
    """Node ``node`` is computed."""

    node: int


@dataclass(frozen=True)
class Drop:
    """The value of ``node`` is given up."""

    node: int


Schedule = tuple[Compute | Drop, ...]


@dataclass(frozen=True)
class Replay:
    """What a schedule takes: the most bytes at any moment, and the seconds of all computations."""

    peak_bytes: int
    seconds: float
    num_computed: int


def replay(problem: Problem, schedule: Schedule) -> Replay:
    """Carry a schedule out on paper.

    Raises:
        UsageError: it is none: an input is missing, a value is dropped that is not there, a result is missing at the
            end, or something is computed twice that may not be.
    """
    resident: set[int] = set()
    count = [0] * problem.num_nodes
    peak, seconds = problem.base_bytes, 0.0
    for number, action in enumerate(schedule):
        node = action.node
        if isinstance(action, Drop):
            if node not in resident:
                raise UsageError(f"action {number}: expected {node} to be resident, found it dropped already")
            resident.remove(node)
            continue
        missing = [source for source in problem.reads[node] if source not in resident]
        if missing:
            raise UsageError(f"action {number}: expected the inputs of {node} to be resident, found {missing} missing")
        if count[node] and node in problem.once:
            raise UsageError(f"action {number}: expected {node} to be computed once, found it computed again")
        resident.add(node)
        count[node] += 1
        seconds += problem.seconds[node]
        peak = max(peak, problem.base_bytes + sum(problem.num_bytes[i] for i in resident))
    absent = sorted(problem.results - resident) + [node for node, times in enumerate(count) if not times]
    if absent:
        raise UsageError(f"expected all nodes computed and all results resident at the end, found {absent} missing")
    return Replay(peak, seconds, sum(count))


def without_recomputation(problem: Problem) -> Schedule:
    """Every node once, in order; every value dropped after its last reader."""
    return with_drops(problem, range(problem.num_nodes))


def with_drops(problem: Problem, order: Sequence[int]) -> Schedule:
    """The computations of ``order``, and every value dropped as soon as it is not read before it is computed anew.

    No other schedule with these computations has a lower peak.
    """
    drops: dict[int, list[int]] = {}
    last_use: dict[int, int] = {}
    for position, node in enumerate(order):
        if node in last_use:
            drops.setdefault(last_use[node], []).append(node)
        last_use[node] = position
        for source in problem.reads[node]:
            last_use[source] = position
    for node, position in last_use.items():
        if node not in problem.results:
            drops.setdefault(position, []).append(node)
    actions: list[Compute | Drop] = []
    for position, node in enumerate(order):
        actions.append(Compute(node))
        actions.extend(Drop(other) for other in sorted(drops.get(position, ())))
    return tuple(actions)


def problem_of(step: StepGraph, machine: Machine) -> Problem:
    """A step graph without collectives as a problem: its operators, in order; the outputs of one count as one value.

    Placeholders are ``base_bytes``, what the graph returns are ``results``, random operators run ``once``.
    """
    live = liveness(step, on_cpu=False)
    number = {node: i for i, node in enumerate(node for node in step.calls() if not is_view(node))}
    sizes: Counter[fx.Node] = Counter()
    for (node, _), size in live.sizes.items():
        sizes[node] += size
    returned = {storage_source(node)[0] for node in step.output.all_input_nodes}
    return Problem(
        seconds=tuple(node_cost(node, machine).seconds for node in number),
        num_bytes=tuple(sizes[node] for node in number),
        reads=tuple(tuple(number[source] for source in _owners(node) if source in number) for node in number),
        results=frozenset(number[node] for node in returned if node in number),
        once=frozenset(i for node, i in number.items() if is_random(node)),
        base_bytes=live.persistent_bytes,
    )


def order_of(step: StepGraph, recomputed: StepGraph) -> list[int]:
    """What ``recomputed``, a copy of ``step`` after the recompute pass, computes, as nodes of ``problem_of(step)``."""
    number = {node.name: i for i, node in enumerate(node for node in step.calls() if not is_view(node))}
    return [number[copied_from(node) or node.name] for node in recomputed.calls() if not is_view(node)]


def _owners(node: fx.Node) -> dict[fx.Node, None]:
    return dict.fromkeys(storage_source(source)[0] for source in node.all_input_nodes)
