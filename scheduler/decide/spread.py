"""Values that all ranks of the model axis have, of which each may keep a part until backward: what it frees and takes.

A part is cut where forward reads the value last, and gathered where backward reads it first, which waits for it: so the
seconds are those of the gather, whole, and of the cut. Of a layer's values the largest come first; those that are small
next to it would not be worth what a collective takes to start. What of them is computed again, or offloaded, in a plan
is not spread: each value has one fate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.spread import can_be_spread
from zerofx.scheduler.analysis.saved_values import saved_values, storage_size, value_node
from zerofx.scheduler.decide.activations import Segment
from zerofx.scheduler.plan.decisions import SpreadDecision

_LEAST = 1 / 8  # of the largest value of a layer


@dataclass(frozen=True)
class SpreadLevel:
    """``values`` are kept in parts, by their nodes' names: bytes that the layer's still take, and seconds."""

    values: tuple[str, ...]
    num_bytes: int
    seconds: float


def spread_menu(segment: Segment, num_parts: int, seconds: Callable[[int], float]) -> tuple[SpreadLevel, ...]:
    """A segment's levels: none of its values in parts, the largest, the two largest, and so on.

    ``seconds``: what it takes to cut and gather so many bytes.
    """
    makers = set(segment.operators)
    of_segment = [segment.values[i] for i in sorted(segment.needed | segment.fixed) if segment.values[i][0] in makers]
    sizes = {value_node(storage): storage_size(storage) for storage in of_segment}
    sizes = {node: size for node, size in sizes.items() if can_be_spread(node, num_parts)}
    least = _LEAST * max(sizes.values(), default=0)
    levels = [SpreadLevel((), sum(sizes.values()), 0.0)]
    for node, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
        if size >= least:
            before = levels[-1]
            left = before.num_bytes - size + size // num_parts
            levels.append(SpreadLevel((*before.values, node.name), left, before.seconds + seconds(size)))
    return tuple(levels)


def spreads_of(
    step: StepGraph, reasons: Mapping[str, str], num_parts: int, without: Collection[str]
) -> tuple[SpreadDecision, ...]:
    """What of the values in ``reasons``, by name, is kept for backward in ``step``, whose other decisions are carried
    out; ``without`` those that are elsewhere meanwhile."""
    return tuple(
        SpreadDecision(node.name, storage_bytes(tensors_of(node)[0]), reasons[node.name], origin(node).layer)
        for node in saved_values(step)
        if node.name in reasons and node.name not in without and can_be_spread(node, num_parts)
    )
