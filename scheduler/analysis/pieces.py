"""Divide the nodes outside repeated layers into pieces, which are decided on as layers are.

Kept at the borders of pieces, and computed again one piece at a time, a run of operators holds the values at the
borders and those of the largest piece: about the square root of what it makes, where its operators are alike
(1604.06174, section 3). Here the borders with the least peak are found exactly, from the last piece to the first:
operators need not be alike, and any number of values may cross a border.

The gradients of a piece are backward's operators from the first that reads what only this piece makes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.aliasing import Storage, is_view, mutated_inputs, storage_source
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, is_random, origin, tile_of, twin_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import calls_by_body
from zerofx.scheduler.analysis.saved_values import is_forward_call, outputs_of, storage_size, value_node
from zerofx.scheduler.plan.decisions import PieceDecision

_PLACES = 128  # of a run in which borders are looked for; far more than pieces, whose number grows with the square root
_GRADIENTS = 2  # as large as its largest value that a piece's backward holds: of a result, and of what it is made from
_PAYS = 0.1  # of what a micro-batch leaves to backward, which borders must save: others only make plans longer


@dataclass(frozen=True)
class ForwardRun:
    """Operators of forward in a row: of the repeated layer ``unit``, or of a piece of what is outside layers (``""``).

    ``name`` is that of the piece, and empty where what is outside layers is not divided. After those that are ``ends``
    backward begins.
    """

    unit: str
    name: str
    nodes: tuple[fx.Node, ...]
    ends: bool = False


def forward_runs(step: StepGraph, crossing: Collection[Storage], *, divides: bool = True) -> list[ForwardRun]:
    """All of forward in order, micro-batch by micro-batch, with what is outside layers divided where that pays.

    A unit of which backward reads hardly more than what it hands on, such as a single convolution in a list of modules,
    is no layer here: there is nothing to decide about it alone.

    Args:
        step: a captured graph; values may be tiled in it.
        crossing: ``saved_storages(step)``.
        divides: whether anything is divided. What is not can be computed again as a whole.
    """
    all_runs: list[ForwardRun] = []
    for runs in _forward_runs(step):
        crossing_bytes = sum(
            storage_size(storage)
            for _, nodes in runs
            for node in nodes
            for storage in dict.fromkeys(outputs_of(node))
            if storage in crossing
        )
        layers = {unit for unit, nodes in runs if unit and _is_layer(nodes, crossing)}
        divided: list[tuple[list[tuple[str, list[fx.Node]]], list[list[fx.Node]]]] = []
        marked = [(unit in layers, (unit, nodes)) for unit, nodes in runs]
        for is_layer, group in itertools.groupby(marked, key=operator.itemgetter(0)):
            stretch = [run for _, run in group]
            nodes = [node for _, run in stretch for node in run]
            divided.append(
                (stretch, [] if is_layer or not divides else _divide(nodes, crossing, _PAYS * crossing_bytes))
            )
        some = any(parts for _, parts in divided)
        for stretch, parts in divided:
            if parts:
                all_runs += [ForwardRun("", _name(part), tuple(part)) for part in parts]
            else:
                all_runs += [ForwardRun(u, _name(run) if some and not u else "", tuple(run)) for u, run in stretch]
        all_runs[-1] = replace(all_runs[-1], ends=not all_runs[-1].unit)
    return all_runs


def pieces(step: StepGraph, runs: Sequence[ForwardRun]) -> tuple[PieceDecision, ...]:
    """The pieces among the ``forward_runs`` of a captured graph, as if all of their values stayed."""
    if not any(run.name for run in runs):
        return ()
    backward = _backward_of(step, runs)
    decisions = []
    for run in runs:
        back = backward.get(run.name)
        if run.name:
            first, last = (back[0].name, back[-1].name) if back else (None, None)
            decisions.append(PieceDecision(run.name, run.nodes[0].name, run.nodes[-1].name, first, last))
    return tuple(decisions)


def _forward_runs(step: StepGraph) -> list[list[tuple[str, list[fx.Node]]]]:
    """The runs of forward by unit, for each micro-batch."""
    by_micro_batch: list[list[tuple[str, list[fx.Node]]]] = [[] for _ in range(step.num_bodies)]
    number = 0
    for node, body in calls_by_body(step):
        # In a turn a later chunk's forward is of an earlier micro-batch, and so is what adds its losses up.
        twin = twin_of(node)
        number = body if not step.takes_turns else number if twin is None else twin[1]
        if is_forward_call(node) and not is_view(node):
            unit, runs = step.unit_of(node), by_micro_batch[number]
            if not runs or runs[-1][0] != unit:
                runs.append((unit, []))
            runs[-1][1].append(node)
    return by_micro_batch


def _is_layer(nodes: Sequence[fx.Node], crossing: Collection[Storage]) -> bool:
    """True if backward reads at least as many bytes of a run's inner values as of those that it passes on."""
    uses = list(_uses(nodes, crossing))
    inside = sum(use.num_bytes for use in uses if use.crosses and use.last < len(nodes))
    return inside >= sum(use.num_bytes for use in uses if use.last == len(nodes))


def _name(nodes: Sequence[fx.Node]) -> str:
    """By operators, which no other piece has, and modules."""
    modules = list(dict.fromkeys(layer for node in nodes if (layer := origin(node).layer)))
    operators = nodes[0].name if len(nodes) == 1 else f"{nodes[0].name} to {nodes[-1].name}"
    if not modules:
        return operators
    return f"{operators} ({modules[0]})" if len(modules) == 1 else f"{operators} ({modules[0]} to {modules[-1]})"


@dataclass(frozen=True)
class _Sizes:
    """Bytes between places of a run; stretch ``i`` is what is after place ``i - 1``, up to place ``i``.

    ``read_in[a][b]`` are made in stretch ``a`` and read last by forward in stretch ``b``; ``crossing`` of them are read
    by backward too. The last ``b`` is what is after the run. ``largest[a]`` is the largest value of stretch ``a``.
    """

    read_in: list[list[int]]
    crossing: list[list[int]]
    largest: list[int]

    @property
    def whole(self) -> int:
        """The peak of the run if it is not divided."""
        inside = sum(sum(row[:-1]) for row in self.crossing)
        return inside + sum(row[-1] for row in self.read_in) + _GRADIENTS * max(self.largest)


def _divide(nodes: list[fx.Node], crossing: Collection[Storage], pays: float) -> list[list[fx.Node]]:
    """A run in pieces; none if they do not hold ``pays`` bytes less than the run as a whole."""
    uses = list(_uses(nodes, crossing))
    places = _places(nodes, uses)
    sizes = _sizes(uses, places)
    peak, borders = _best_borders(sizes)
    if peak > sizes.whole - max(pays, 1):
        return []
    starts = [0, *(places[i] + 1 for i in borders)]
    return [nodes[start:end] for start, end in itertools.pairwise(starts)]


@dataclass(frozen=True)
class _Use:
    """A value of a run: made at position ``computed_in``, read last by forward at ``last`` (past the end: outside)."""

    computed_in: int
    last: int
    num_bytes: int
    crosses: bool
    written: int  # the last position at which it is made or written to


def _uses(nodes: Sequence[fx.Node], crossing: Collection[Storage]) -> Iterator[_Use]:
    order = {node: position for position, node in enumerate(nodes)}
    source_of = functools.cache(storage_source)
    for node in nodes:
        for storage in dict.fromkeys(outputs_of(node)):
            readers = [r for r in consumers(storage[0]) if storage in map(source_of, r.all_input_nodes)]
            forward = [order.get(reader, len(nodes)) for reader in readers if is_forward_call(reader)]
            writes = [order[r] for r in readers if r in order and storage in map(source_of, mutated_inputs(r))]
            # What a random operator makes is kept, wherever it is read.
            last = len(nodes) if is_random(node) else max([order[node], *forward])
            yield _Use(order[node], last, storage_size(storage), storage in crossing, max([order[node], *writes]))


def _places(nodes: Sequence[fx.Node], uses: Sequence[_Use]) -> list[int]:
    """Positions after which a border may be, the run's last among them: of some in a row, the one that fewest bytes
    are handed on at, those that backward reads counting half."""
    handed_on, blocked = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    sizes_at = [0] * len(nodes)
    for use in uses:
        sizes_at[use.computed_in] += use.num_bytes if use.crosses else 0
        weight = use.num_bytes if use.crosses else 2 * use.num_bytes
        for counts, amount, end in ((handed_on, weight, use.last), (blocked, 1, use.written)):
            counts[use.computed_in] += amount
            counts[min(end, len(nodes))] -= amount
    for counts in (handed_on, blocked):
        counts[:] = itertools.accumulate(counts)
    for position, (node, following) in enumerate(itertools.pairwise(nodes)):
        blocked[position] += tile_of(node) is not None and tile_of(following) is not None
    # A run of few operators has all of them; of a long one, each share of the bytes has one.
    share = max(1, sum(sizes_at)) / _PLACES
    best: dict[int, int] = {}
    for position, before in enumerate(itertools.accumulate(sizes_at[:-1])):
        slot = position if len(nodes) <= _PLACES else int(before / share)
        if not blocked[position] and (slot not in best or handed_on[position] < handed_on[best[slot]]):
            best[slot] = position
    return [*best.values(), len(nodes) - 1]


def _sizes(uses: Sequence[_Use], places: Sequence[int]) -> _Sizes:
    stretch = [i for i, (start, end) in enumerate(itertools.pairwise([-1, *places])) for _ in range(end - start)]
    count = len(places)
    read_in, crossing = ([[0] * (count + 1) for _ in range(count)] for _ in range(2))
    largest = [0] * count
    for use in uses:
        computed_in, last = stretch[use.computed_in], stretch[use.last] if use.last < len(stretch) else count
        read_in[computed_in][last] += use.num_bytes
        crossing[computed_in][last] += use.num_bytes if use.crosses else 0
        largest[computed_in] = max(largest[computed_in], use.num_bytes)
    return _Sizes(read_in, crossing, largest)


def _best_borders(sizes: _Sizes) -> tuple[int, list[int]]:
    """The least peak that any borders lead to, and the stretches that pieces end with.

    While a piece runs backward, all that those before it hand on is held: what the first piece hands on is on top of
    the least peak of the pieces after it. Of the borders with that peak, those are taken that hand on least.
    """
    count = len(sizes.largest)
    own = [list(_pieces_from(sizes, start)) for start in range(count)]  # by first and last stretch: handed on, and held
    least = [0] * (count + 1)
    for start in range(count - 1, -1, -1):
        least[start] = min(
            handed_on + max(held, least[start + length + 1]) for length, (handed_on, held) in enumerate(own[start])
        )
    # By the stretch that pieces end with: bytes handed on, the number of pieces, and where the last one begins.
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for end in range(count):
        options = []
        for start in range(end + 1):
            handed_on, held = own[start][end - start]
            before, pieces_before, _ = best[start]
            if before + handed_on + held <= least[0]:
                options.append((before + handed_on, pieces_before + 1, start))
        best.append(min(options, default=(least[0] + 1, 0, 0)))
    borders, end = [], count
    while end > 0:
        borders.append(end - 1)
        end = best[end][2]
    return least[0], borders[::-1]


def _pieces_from(sizes: _Sizes, start: int) -> Iterator[tuple[int, int]]:
    """For each stretch that a piece from ``start`` on may end with: bytes it hands on, and holds in its backward."""
    count = len(sizes.largest)
    # Bytes of the piece so far that are read last in each stretch; of them, those that backward reads too.
    read_in, crossing = [0] * (count + 1), [0] * (count + 1)
    handed_on = still_held = inside = widest = 0
    for end in range(start, count):
        handed_on += sum(sizes.read_in[end][end + 1 :]) - read_in[end]
        still_held += sum(sizes.crossing[end][end + 1 :]) - crossing[end]
        inside += sum(sizes.crossing[end])
        widest = max(widest, sizes.largest[end])
        for stretch in range(end + 1, count + 1):
            read_in[stretch] += sizes.read_in[end][stretch]
            crossing[stretch] += sizes.crossing[end][stretch]
        yield handed_on, inside - still_held + _GRADIENTS * widest


def _backward_of(step: StepGraph, runs: Sequence[ForwardRun]) -> dict[str, list[fx.Node]]:
    """The operators of backward, outside layers, by piece; in order, backward goes from the last piece to the first."""
    run_of = {node: number for number, run in enumerate(runs) for node in run.nodes}
    inside = {
        storage: number
        for node, number in run_of.items()
        for storage in outputs_of(node)
        if all(run_of.get(reader) == number for reader in consumers(value_node(storage)) if is_forward_call(reader))
    }
    layers = {run.unit for run in runs if run.unit}
    backward: dict[str, list[fx.Node]] = {}
    for stretch in _backward_stretches(step, layers):
        waiting: list[fx.Node] = []
        current: int | None = None
        here: dict[str, list[fx.Node]] = {}
        for node in stretch:
            read = [inside[s] for source in node.all_input_nodes if (s := storage_source(source)) in inside]
            mine = [number for number in read if runs[number].name]
            if mine and (current is None or min(mine) < current):
                current = min(mine)
            waiting.append(node)
            if current is not None:
                here.setdefault(runs[current].name, []).extend(waiting)
                waiting = []
        backward = {**here, **backward}
    return backward


def _backward_stretches(step: StepGraph, layers: Collection[str]) -> Iterator[list[fx.Node]]:
    """Backward's operators outside ``layers``, in a row but for layers' own."""
    computing = (node for node in step.calls() if not is_view(node))
    for outside, nodes in itertools.groupby(
        computing, lambda node: origin(node).phase is Phase.BACKWARD and step.unit_of(node) not in layers
    ):
        if outside:
            yield list(nodes)
