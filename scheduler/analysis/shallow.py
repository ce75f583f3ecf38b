"""A captured step with fewer of its repeated layers: what a deep one costs is read from two of these.

    forward    0 1 2 3 4 5 ... 31        ->   0 1 30 31        layer 30 reads of layer 1 what it read of layer 29
    backward   31 30 ... 2 1 0           ->   31 30 1 0        and layer 1 of layer 30

Each layer that is alike adds the same to a step: its seconds, its bytes, what it sends. So a step of 32 layers takes
what one of four takes, and 28 times by how much one of five takes more. That is an estimate: what begins and ends a row
of layers is there, and what happens once in many layers is not.

Does not handle: what is outside the layers and reads all of them is left with as many operands, of the layers that are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.facts import Phase, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.layer_classes import layers_of
from zerofx.scheduler.plan.text.fold import fold

KEPT = 4  # of each row of layers: the first two and the last two


@dataclass(frozen=True)
class LayerRow:
    """Layers that repeat one after the other, in the order of forward; each of ``repetitions`` is one layer, or several
    that differ."""

    repetitions: tuple[tuple[str, ...], ...]

    def layers_left_out(self, remaining: int) -> tuple[tuple[str, ...], ...]:
        """The repetitions in the middle that are left out where so many stay."""
        return self.repetitions[remaining - 2 : -2] if len(self.repetitions) > remaining else ()


def rows_of(step: StepGraph) -> tuple[LayerRow, ...]:
    """The rows of a captured step that can be made shorter."""
    layers = layers_of(step)
    units = list(dict.fromkeys(unit for node in step.calls() if (unit := step.unit_of(node))))
    blocks = fold([layers[unit].signature for unit in units])
    rows = [LayerRow(tuple(tuple(units[i] for i in b.repetition(n)) for n in range(b.count))) for b in blocks]
    return tuple(row for row in rows if len(row.repetitions) > KEPT + 1)


def shallow(
    step: StepGraph, rows: Sequence[LayerRow], longer: LayerRow | None = None, remaining: int = KEPT
) -> StepGraph:
    """A copy of ``step`` with ``remaining`` repetitions of each row, if it has more, and one more of ``longer``."""
    short = step.clone()
    layers = layers_of(short)
    others: dict[fx.Node, fx.Node] = {}
    units: set[str] = set()
    for row in rows:
        number = remaining + (row is longer)
        dropped = row.layers_left_out(number)
        units |= {unit for repetition in dropped for unit in repetition}
        before, after = row.repetitions[number - 3], row.repetitions[-2]
        for repetition in dropped:
            for unit, front, back in zip(repetition, before, after, strict=True):
                for node, early, late in zip(*(layers[u].nodes for u in (unit, front, back)), strict=True):
                    is_backward = node.op == "call_function" and origin(node).phase is Phase.BACKWARD
                    others[node] = late if is_backward else early
    for node in short.graph.nodes:
        if node.op == "call_function" and node not in others:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda read: others.get(read, read))
    gone = {placeholder(node).name for node in others if node.op == "placeholder"}
    gradients = {name: node for name, node in short.gradients.items() if name not in gone}
    mutations = {name: node for name, node in short.mutations.items() if node not in others}
    short.set_outputs(short.loss, mutations, gradients, extras=[others.get(node, node) for node in short.extras])
    for node in reversed(list(short.graph.nodes)):
        if node in others and not node.users:
            short.graph.erase_node(node)
    parameters = tuple(info for info in short.parameters if info.name not in gone)
    short.graph.lint()
    return replace(short, parameters=parameters, units=short.units - units)
