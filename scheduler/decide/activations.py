"""Recomputation: for each layer and piece a menu of levels, from all saved activations kept to as few as possible.

A menu entry is a set of forward values to keep; the rest of what backward reads is computed again. The best set for a
price mu (bytes that a second of computation is worth) is a minimum cut: cutting the edge from an operator to a value
keeps the value and pays its bytes, cutting the edge from the source to an operator runs it again and pays mu times its
seconds. Lowering mu from "nothing is worth computing again" gives sets that keep less and less: the lower convex hull
of bytes against seconds. (The cut without prices is AOTAutograd's partitioner's; see also Checkmate, 1910.02653.)
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import networkx as nx
from torch import fx

from zerofx.ir.aliasing import Storage, is_view, storage_source, tensors_of
from zerofx.ir.edit import consumers, runs_once
from zerofx.ir.facts import is_random
from zerofx.ir.graph import StepGraph
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.ir.text import target_name
from zerofx.scheduler.analysis.pieces import ForwardRun, forward_runs
from zerofx.scheduler.analysis.saved_values import is_forward_call, outputs_of, saved_storages, storage_size
from zerofx.scheduler.cost.fusion import is_inlined, is_loop
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.wire_volume import value_collective_seconds
from zerofx.scheduler.decide.ledger import Level

_PRICES = 24  # how many prices are tried between the cheapest and the dearest value
_STEPS = 64  # between keeping all and nothing, those at most that are looked for between prices


@dataclass(frozen=True)
class Dataflow:
    """Dataflow graph of a segment: its operators and values, by number.

    ``makers`` has the operator that makes each value, -1 for what is made elsewhere; ``reads`` the values that each
    operator reads; ``random`` whether it draws, or is a message between stages.
    """

    makers: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    random: tuple[bool, ...]


@dataclass(frozen=True)
class Segment:
    """The forward run of one repeated layer, or of a piece of what is outside layers; ``unit`` is then ``""``.

    ``piece`` is the piece's name, empty where what is outside layers is not divided.
    ``operators`` compute; ``values`` are the storages they make and the ones of other segments that they read.
    ``needed`` are positions in ``values`` that backward reads, ``fixed`` those that are kept whatever is chosen.
    ``sizes`` are bytes of values on the device while they wait for backward.
    """

    unit: str
    piece: str
    operators: tuple[fx.Node, ...]
    values: tuple[Storage, ...]
    needed: frozenset[int]
    fixed: frozenset[int]
    sizes: tuple[int, ...]
    key: str

    @functools.cached_property
    def links(self) -> Dataflow:
        """Its structure, which menus are made from many times."""
        position = {storage: i for i, storage in enumerate(self.values)}
        number = {node: n for n, node in enumerate(self.operators)}
        read = [[position.get(storage_source(source)) for source in node.all_input_nodes] for node in self.operators]
        return Dataflow(
            tuple(number.get(storage[0], -1) for storage in self.values),
            tuple(tuple(i for i in reads if i is not None) for reads in read),
            tuple(map(runs_once, self.operators)),
        )

    @property
    def name(self) -> str:
        """Name of the segment in a reason."""
        if self.unit:
            return self.unit
        return f"the piece {self.piece}" if self.piece else "what is outside layers"


def segments(
    step: StepGraph,
    runs: Sequence[ForwardRun] | None = None,
    kept_bytes: Mapping[Storage, int] = MappingProxyType({}),
) -> list[Segment]:
    """The forward runs of all repeated layers, and of the pieces of what is outside them, in order.

    Outside layers, the piece that ends in the loss is left as it is: backward begins there. ``runs``: forward's
    runs and pieces, found here if not given. ``kept_bytes``: of values that wait for backward in fewer than they have.
    """
    crossing = saved_storages(step)
    if runs is None:
        runs = forward_runs(step, crossing)
    run_of = {node: number for number, run in enumerate(runs) for node in run.nodes}
    leaving = _read_elsewhere(step, run_of)
    return [_segment(run, crossing, leaving, kept_bytes) for run in runs if run.unit or not run.ends]


def _read_elsewhere(step: StepGraph, run_of: Mapping[fx.Node, int]) -> set[Storage]:
    """Storages that a forward operator outside their own run reads."""
    read = set()
    for node in step.calls():
        if is_forward_call(node) and not is_view(node):
            for source in node.all_input_nodes:
                storage = storage_source(source)
                if run_of.get(storage[0]) != run_of[node]:
                    read.add(storage)
    return read


def _segment(
    run: ForwardRun, crossing: Mapping[Storage, None], leaving: set[Storage], kept_bytes: Mapping[Storage, int]
) -> Segment:
    nodes, members = run.nodes, set(run.nodes)
    values: dict[Storage, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            storage = storage_source(source)
            if is_forward_call(storage[0]):
                values.setdefault(storage, len(values))
        for storage in outputs_of(node):
            values.setdefault(storage, len(values))
    needed = frozenset(i for s, i in values.items() if s in crossing and s[0] in members)
    # What another run reads stays: that run's own choice counts on it.
    fixed = frozenset(i for s, i in values.items() if s in crossing and (s in leaving or s[0] not in members))
    sizes = tuple(kept_bytes.get(storage, storage_size(storage)) for storage in values)
    key = _key(nodes, values, needed, fixed, sizes)
    return Segment(run.unit, run.name, nodes, tuple(values), needed, fixed, sizes, key)


def _key(
    nodes: Sequence[fx.Node],
    values: Mapping[Storage, int],
    needed: frozenset[int],
    fixed: frozenset[int],
    sizes: tuple[int, ...],
) -> str:
    """Equal for segments that have the same menu."""
    lines = []
    for node in nodes:
        reads = [values.get(storage_source(s), -1) for s in node.all_input_nodes]
        shapes = [(str(t.dtype), tuple(t.shape), tuple(t.stride())) for t in tensors_of(node)]
        lines.append(f"{target_name(node)} {reads} {shapes}")
    lines += [str(sorted(needed)), str(sorted(fixed)), str(sizes)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def menu(segment: Segment, machine: Machine, *, inlines: bool = False) -> tuple[Level, ...]:
    """The levels of a segment, from keeping all to computing most again; each keeps less than the one before.

    ``inlines``: whether backward is compiled so that some of it costs nothing: first come ``free_levels`` then.
    """
    seconds = {node: 0.0 if inlines and _is_free_again(node) else _seconds(node, machine) for node in segment.operators}
    sizes = segment.sizes
    rates = [sizes[i] / seconds[s[0]] for i, s in enumerate(segment.values) if seconds.get(s[0]) and sizes[i]]
    levels = list(free_levels(segment)) if inlines else [keep_all(segment)]
    if not rates:
        return tuple(levels)
    high, low = 2 * max(rates), min(rates) / len(segment.operators)
    prices = [high * (low / high) ** (step / (_PRICES - 1)) for step in range(_PRICES)]
    for level in levels_at_prices(prices, lambda price: cheapest(segment, sizes, seconds, price)):
        if level.num_bytes < levels[-1].num_bytes:
            grain = levels[0].num_bytes // _STEPS
            levels += [*_levels_between(segment, sizes, seconds, levels[-1], level, grain), level]
    return tuple(levels)


def free_levels(segment: Segment) -> tuple[Level, ...]:
    """Keeping all, and where less is kept then, computing again what costs nothing in a compiled backward."""
    seconds = {node: 0.0 if _is_free_again(node) else float("inf") for node in segment.operators}
    everything, free = keep_all(segment), cheapest(segment, segment.sizes, seconds, 1.0)
    return (everything, free) if free.num_bytes < everything.num_bytes else (everything,)


def _is_free_again(node: fx.Node) -> bool:
    """True if the kernels of a compiled backward that read ``node`` compute it again for nothing: they move less
    through memory if they read what it needs, as ``f(silu(x), x)`` does next to ``f(silu, x)``.

    (AOTAutograd's partitioner goes by the bytes that are saved, too, but also computes again what has to be written out
    to be read: what a matrix product or another operator with a kernel of its own reads.)
    """
    if not is_inlined(node) or is_random(node):
        return False
    readers = (reader for reader in consumers(node) if reader.op == "call_function" and not is_forward_call(reader))
    return all(map(is_loop, readers))


def _seconds(node: fx.Node, machine: Machine) -> float:
    """Seconds to run a node again: a collective too, with nothing next to it."""
    if node.target in VALUE_COLLECTIVES:
        return value_collective_seconds(node, machine)
    return node_cost(node, machine).seconds


def levels_at_prices(prices: Sequence[float], cut: Callable[[float], Level]) -> list[Level]:
    """Levels that ``cut`` gives for ``prices``, which go down: where two prices give the same, all between them do.

    At a lower price of a second, no value is kept that a higher price computes again: minimum cuts are nested.
    """
    levels = {0: cut(prices[0]), len(prices) - 1: cut(prices[-1])}
    pending = [(0, len(prices) - 1)]
    while pending:
        first, last = pending.pop()
        middle = (first + last) // 2
        if (levels[first].saved, levels[first].seconds) == (levels[last].saved, levels[last].seconds):
            levels |= dict.fromkeys(range(first + 1, last), levels[first])
        elif middle > first:
            levels[middle] = cut(prices[middle])
            pending += [(first, middle), (middle, last)]
    return [levels[number] for number in range(len(prices))]


def keep_all(segment: Segment) -> Level:
    """The level at which nothing is computed again."""
    saved = segment.needed | segment.fixed
    return Level(sum(segment.sizes[i] for i in saved), 0.0, saved=saved)


def _levels_between(
    segment: Segment,
    sizes: Sequence[int],
    seconds: Mapping[fx.Node, float],
    before: Level,
    after: Level,
    grain: int,
) -> Iterator[Level]:
    """Steps on the way from one level to the next, a value at a time, the best first: a budget may lie between.

    Where operators cost about as much for each byte that they make, as matrix products do, one price takes them all.
    Steps of fewer than ``grain`` bytes are not worth the time that they take to find.
    """
    current = before
    while current.num_bytes - after.num_bytes > grain:
        tried = [_recompute_level(segment, sizes, seconds, current.saved - {i}) for i in current.saved - after.saved]
        steps = [
            level
            for level in tried
            if level is not None
            and after.num_bytes < level.num_bytes < current.num_bytes - grain
            and current.seconds < level.seconds < after.seconds
        ]
        if not steps:
            return
        rates = {level: (current.num_bytes - level.num_bytes) / (level.seconds - current.seconds) for level in steps}
        current = max(steps, key=lambda level: (rates[level], sorted(level.saved)))
        yield current


def _recompute_level(
    segment: Segment, sizes: Sequence[int], seconds: Mapping[fx.Node, float], saved: frozenset[int]
) -> Level | None:
    """The level that computes again what ``saved`` lacks; None where that would run a random operator again."""
    links, free = segment.links, saved | segment.fixed
    again = set[int]()
    read = {*segment.fixed, *(segment.needed & saved)}
    pending = [links.makers[i] for i in sorted(segment.needed - saved)]
    while pending:
        number = pending.pop()
        if links.random[number]:
            return None
        if number in again:
            continue
        again.add(number)
        for i in links.reads[number]:
            if i in free or links.makers[i] < 0:
                read.add(i)
            else:
                pending.append(links.makers[i])
    return Level(sum(sizes[i] for i in read), _sum(segment, seconds, again), saved=frozenset(read))


def cheapest(segment: Segment, sizes: Sequence[float], seconds: Mapping[fx.Node, float], price: float) -> Level:
    """The minimum cut when keeping value i costs ``sizes[i]``, and a second of computing again ``price`` (in bytes).

    ``num_bytes`` of the result are the costs of what it keeps.
    """
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    links = segment.links
    for number, node in enumerate(segment.operators):
        operator = ("operator", number)
        cost = float("inf") if links.random[number] else price * seconds[node]
        graph.add_edge("source", operator, capacity=cost)
        for i in links.reads[number]:
            graph.add_edge(("value", i), operator, capacity=float("inf"))
    for i, maker in enumerate(links.makers):
        size = 0.0 if i in segment.fixed else float(sizes[i])
        graph.add_edge("source" if maker < 0 else ("operator", maker), ("value", i), capacity=size)
        if i in segment.needed:
            graph.add_edge(("value", i), "sink", capacity=float("inf"))
    if "sink" not in graph:
        return Level(int(sum(sizes[i] for i in segment.fixed)), 0.0, saved=segment.fixed)
    _, (_, sink_side) = nx.minimum_cut(graph, "source", "sink")
    again = {number for number in range(len(segment.operators)) if ("operator", number) in sink_side}
    saved = {i for i, maker in enumerate(links.makers) if ("value", i) in sink_side and maker not in again}
    saved |= segment.fixed
    return Level(int(sum(sizes[i] for i in saved)), _sum(segment, seconds, again), saved=frozenset(saved))


def _sum(segment: Segment, seconds: Mapping[fx.Node, float], numbers: set[int]) -> float:
    """Seconds of operators, added up in the segment's order: a set's own order changes from run to run."""
    return sum(seconds[segment.operators[number]] for number in sorted(numbers))
