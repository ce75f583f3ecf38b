"""Cuts of a step into the stages of the axis pipe: at borders of layers, so that stages take alike.

A step of several micro-batches takes as long as its slowest stage for each of them, and once through all stages. So the
cuts are those with the least time of the slowest stage; among those, the ones that send the fewest bytes. What a stage
takes of a micro-batch is its part of the forward and of backward, with what it sends: embeddings and heads count like
layers do, and stages need not have as many layers.

Where all micro-batches go through a chunk of each stage before the next, the slowest of the chunks that stages have at
a time sets the pace of all: the cuts are those with the least sum of these, of any number of chunks.

Where no plan of these stages fits a memory budget, they are cut anew, so that they hold alike: of parameters with their
gradients and states, and of what backward reads, of as many micro-batches as a stage has under way by turns, the first
most. Or, where that fits neither, of parameters and what comes in alone: all else may be computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from torch import fx

from zerofx.errors import PlanError, UsageError
from zerofx.ir.aliasing import is_view, node_bytes
from zerofx.ir.facts import Phase, Role, is_random, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.saved_values import saved_values
from zerofx.scheduler.analysis.stages_of_nodes import EVERYWHERE, own_source, sources, stages_of_nodes
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.transfers import collective_seconds
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.units import first_few

_BACKWARD = 2  # times the products of the forward
_AS_LONG = 1.001  # times the seconds of fewer rounds: as fast

Balance = Literal["seconds", "bytes", "parameters"]
"""Stages that take alike, hold alike, or hold alike with all computed again that can be."""
BALANCES: Final[tuple[Balance, ...]] = get_args(Balance)


@dataclass(frozen=True)
class _Run:
    """A part of the forward that is not cut: the name of its first node, its seconds, the bytes of the values that
    cross the border before it, of the parameters that it is the first to read, and of what backward reads of it."""

    first: str
    seconds: float
    crossing_bytes: int
    parameter_bytes: int
    saved_bytes: int


def name_cuts(step: StepGraph, machine: Machine, cuts: Sequence[int]) -> tuple[str, ...]:
    """The nodes of a captured micro-batch that later stages begin with, where ``decide_stages`` cut it, or one of
    another shape, so.

    Raises:
        UsageError: it has not as many parts, or cannot run in these stages.
    """
    runs = _runs(step, machine)
    if cuts[-1] >= len(runs):
        raise UsageError(
            f"expected a step with the parts that the first one had, which was cut before number {cuts[-1]}, found "
            f"{len(runs)}: give batches that go through the same layers"
        )
    names = tuple(runs[cut].first for cut in cuts)
    stages_of_nodes(step, names)  # which refuses what cannot run so
    return names


def find_cuts(step: StepGraph, machine: Machine, names: Sequence[str]) -> tuple[int, ...]:
    """The parts of a captured micro-batch's forward, by their numbers, that begin with these nodes.

    Raises:
        PlanError: it is not cut before one of them.
    """
    numbers = {run.first: number for number, run in enumerate(_runs(step, machine))}
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise PlanError(
            f"expected a step that is cut into stages before {first_few(unknown)}, as the plan says, found one that is "
            f"cut before {first_few(numbers)}: make the plan anew for this model and batch"
        )
    return tuple(numbers[name] for name in names)


def find_borders(step: StepGraph, machine: Machine, units: Sequence[str]) -> list[str]:
    """The nodes of a captured micro-batch's forward that stages may begin with, in each of these layers.

    Raises:
        UsageError: it is not cut before one of them.
    """
    nodes = step.nodes_by_name()
    borders = {step.unit_of(nodes[run.first]): run.first for run in reversed(_runs(step, machine))}
    missing = [unit for unit in units if unit not in borders]
    if missing:
        raise UsageError(
            f"expected a step that can be cut before each of its layers for stages on the axis 'pipe', found "
            f"{first_few(missing)} in one piece with what is before: leave the axis out"
        )
    return [borders[unit] for unit in units]


def decide_stages(
    step: StepGraph,
    mesh: Mesh,
    machine: Machine,
    balance: Balance,
    num_micro_batches: int,
    copies: float,
    num_chunks: int = 1,
) -> tuple[int, ...]:
    """The parts of a captured micro-batch's forward, by their numbers, that later chunks begin with, of which each
    stage has ``num_chunks``.

    ``copies``: how often a rank has each parameter of its stage, with gradients and states.

    Raises:
        UsageError: there are fewer places to cut at than that takes; says how many there are.
    """
    runs, num_parts = _runs(step, machine), num_chunks * mesh.pipe
    _check_number(runs, mesh, num_chunks)

    def send_seconds(num_bytes: int) -> float:
        local = 2 if mesh.num_ranks <= machine.ranks_per_node else 1
        return collective_seconds("shift", 2 * num_bytes, 2, machine, ranks_on_node=local)

    seconds = _sums(run.seconds for run in runs)
    parameters, saved = _sums(run.parameter_bytes for run in runs), _sums(run.saved_bytes for run in runs)

    def cost(stage: int, begin: int, end: int) -> float:
        """Seconds, or bytes, of a stage that has these runs."""
        if balance == "seconds":
            return seconds[end] - seconds[begin] + (send_seconds(runs[begin].crossing_bytes) if stage else 0.0)
        of_each = saved[end] - saved[begin] if balance == "bytes" else runs[begin].crossing_bytes
        return copies * (parameters[end] - parameters[begin]) + min(num_micro_batches, num_parts - stage) * of_each

    # best[k][i]: of k stages over the first i runs, the most that one costs, all bytes sent, and the cuts.
    best: list[tuple[float, int, tuple[int, ...]]] = [(cost(0, 0, i), 0, ()) for i in range(len(runs) + 1)]
    for stage in range(1, num_parts):
        coming = [(math.inf, 0, tuple[int, ...]())] * (len(runs) + 1)
        for end in range(stage + 1, len(runs) + 1):
            coming[end] = min(
                (
                    max(best[cut][0], cost(stage, cut, end)),
                    best[cut][1] + runs[cut].crossing_bytes,
                    (*best[cut][2], cut),
                )
                for cut in range(stage, end)
            )
        best = coming
    return best[len(runs)][2]


def decide_rounds(
    step: StepGraph, mesh: Mesh, machine: Machine, balance: Balance, num_micro_batches: int, copies: float
) -> tuple[int, ...]:
    """The same where all micro-batches go through a chunk of each stage, a round, before the next one, of as many
    rounds as are fastest, and of as fast ones the most: a stage has the parameters of a chunk at a time.

    Raises:
        UsageError: there are too few places to cut at for two chunks a stage.
    """
    runs = _runs(step, machine)
    _check_number(runs, mesh, 2)
    seconds = _sums(run.seconds for run in runs)
    parameters, saved = _sums(run.parameter_bytes for run in runs), _sums(run.saved_bytes for run in runs)

    def cost(begin: int, end: int) -> float:
        """Seconds, or bytes, of a chunk that has these runs."""
        if balance == "seconds":
            return seconds[end] - seconds[begin]
        of_each = saved[end] - saved[begin] if balance == "bytes" else runs[begin].crossing_bytes
        return copies * (parameters[end] - parameters[begin]) + num_micro_batches * of_each

    rounds = [_divide_round(cost, begin, len(runs), mesh.pipe) for begin in range(len(runs))]
    # best[i]: of so many rounds over the first i runs, the sum of what the slowest chunk of each takes, and the cuts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    chosen: tuple[float, tuple[int, ...]] = (math.inf, ())
    for number in range(1, len(runs) // mesh.pipe + 1):
        coming: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (before, cuts) in best.items():
            for end, (slowest, within) in rounds[begin].items() if begin < len(runs) else ():
                if before + slowest < coming.get(end, (math.inf,))[0]:
                    coming[end] = before + slowest, (*cuts, *([begin] if begin else []), *within)
        best, (total, cuts) = coming, coming[len(runs)]
        # The last stage begins once the first chunk of each other has had a micro-batch, and so it ends.
        whole = max(num_micro_batches, mesh.pipe) * total + (mesh.pipe - 1) * total / number
        is_better = whole < _AS_LONG * chosen[0] if balance == "seconds" else True
        if number > 1 and is_better:
            chosen = whole, cuts
    return chosen[1]


def _divide_round(
    cost: Callable[[int, int], float], begin: int, end: int, num_parts: int
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """For each place that so many chunks from ``begin`` on may end at, the least that the slowest takes, and cuts."""
    best = {last: (cost(begin, last), tuple[int, ...]()) for last in range(begin + 1, end + 1)}
    for part in range(1, num_parts):
        coming, cut = {}, begin + part
        for last in range(begin + part + 1, end + 1):
            # The more runs the chunks before have, the longer they take, and the shorter this one.
            while cut + 1 < last and best[cut][0] < cost(cut, last):
                cut += 1
            cut = min(
                (each for each in (cut - 1, cut) if each in best), key=lambda each: max(best[each][0], cost(each, last))
            )
            coming[last] = max(best[cut][0], cost(cut, last)), (*best[cut][1], cut)
        best = coming
    return best


def _check_number(runs: Sequence[_Run], mesh: Mesh, num_chunks: int) -> None:
    num_parts = num_chunks * mesh.pipe
    if len(runs) < num_parts:
        what = "stages" if num_chunks == 1 else f"chunks, {num_chunks} a stage,"
        raise UsageError(
            f"expected at least {num_parts} parts of a step that are not cut, a layer at the least, for as many {what} "
            f"on the axis 'pipe', found {len(runs)} ({first_few([run.first for run in runs])}): give fewer ranks there"
        )


def _runs(step: StepGraph, machine: Machine) -> list[_Run]:
    """The parts of the forward between places where it may be cut: the borders of layers, or where it has none of
    modules, in which the parameters of a stage are apart from others'."""
    whole = stages_of_nodes(step, ())
    nodes = [node for node in step.calls() if whole.homes.get(node, EVERYWHERE) != EVERYWHERE]
    forward = [node for node in nodes if origin(node).phase is Phase.FORWARD and not is_view(node)]
    places = [_place(step, node) for node in forward]
    crossing = _bytes_across(forward)
    runs: list[_Run] = []
    seen: set[fx.Node] = set()
    to_save = dict.fromkeys(saved_values(step))
    first, seconds, num_seen, parameter_bytes, saved_bytes = 0, 0.0, 0, 0, 0
    for number, node in enumerate(forward):
        # Every stage has parameters of its own.
        if places[number] != places[number - 1] and len(seen) > num_seen and not is_random(node):
            runs.append(_Run(forward[first].name, seconds, crossing[first], parameter_bytes, saved_bytes))
            first, seconds, num_seen, parameter_bytes, saved_bytes = number, 0.0, len(seen), 0, 0
        inputs = (source for source in sources(node) if source.op == "placeholder")
        read = {source for source in inputs if placeholder(source).role is Role.PARAMETER} - seen
        parameter_bytes += sum(map(node_bytes, read))
        saved_bytes += node_bytes(node) if node in to_save else 0
        seen |= read
        seconds += (1 + _BACKWARD) * node_cost(node, machine).seconds
    if len(seen) > num_seen:
        return [*runs, _Run(forward[first].name, seconds, crossing[first], parameter_bytes, saved_bytes)]
    if not runs:
        return []
    last = runs.pop()
    return [*runs, replace(last, seconds=last.seconds + seconds, saved_bytes=last.saved_bytes + saved_bytes)]


def _sums(values: Iterable[float]) -> list[float]:
    """The sums of no value, of the first, of the first two, and so on."""
    return [*itertools.accumulate(values, initial=0.0)]


def _place(step: StepGraph, node: fx.Node) -> str:
    """The part of the model that a node is in: its layer, or where there are no layers its module."""
    if step.units:
        return step.unit_of(node)
    return origin(node).layer


def _bytes_across(forward: Sequence[fx.Node]) -> list[int]:
    """Bytes of the values that are made before each node and read from there on."""
    position = {node: number for number, node in enumerate(forward)}
    last: dict[fx.Node, int] = {}
    for number, node in enumerate(forward):
        for source in sources(node):
            if own_source(source) in position:
                last[source] = number
    changes = [0] * (len(forward) + 1)
    for node, number in last.items():
        size = node_bytes(node)
        changes[position[node] + 1] += size
        changes[number + 1] -= size
    total, crossing = 0, []
    for number in range(len(forward)):
        total += changes[number]
        crossing.append(total)
    return crossing
