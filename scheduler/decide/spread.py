"""Values that all ranks of the model axis have, of which each may keep a part until backward: what it frees and takes.

A part is cut where forward reads the value last, and gathered where backward reads it first, which waits for it: so the
seconds are those of the gather, whole, and of the cut. Of a layer's values the largest come first; those that are small
next to it would not be worth what a collective takes to start. What of them is computed again, or offloaded, in a plan
is not spread: each value has one fate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.facts import origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.spread import can_be_spread
from zerofx.scheduler.analysis.saved_values import saved_values, storage_size, value_node
from zerofx.scheduler.decide.activations import Segment
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.plan.decisions import Absence

_LEAST = 1 / 8  # of the largest value of a layer


def spread_menu(segment: Segment, num_parts: int, seconds: Callable[[int], float]) -> tuple[Level, ...]:
    """A segment's levels: none of its values in parts, the largest, the two largest, and so on.

    ``seconds``: what it takes to cut and gather so many bytes.
    """
    makers = set(segment.operators)
    own = [i for i in sorted(segment.needed | segment.fixed) if segment.values[i][0] in makers]
    sizes = {i: storage_size(segment.values[i]) for i in own if can_be_spread(value_node(segment.values[i]), num_parts)}
    least = _LEAST * max(sizes.values(), default=0)
    levels = [Level(sum(sizes.values()), 0.0)]
    for i, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
        if size >= least:
            before = levels[-1]
            left = before.num_bytes - size + size // num_parts
            levels.append(Level(left, before.seconds + seconds(size), spread=before.spread | {i}))
    return tuple(levels)


def spreads_of(
    step: StepGraph, reasons: Mapping[str, str], num_parts: int, without: Collection[str]
) -> tuple[Absence, ...]:
    """Values of ``reasons``, by name, that ``step``, whose other decisions are carried out, keeps for backward;
    ``without`` those that are elsewhere meanwhile."""
    return tuple(
        Absence(
            kind="spreads",
            value=node.name,
            num_bytes=storage_bytes(tensors_of(node)[0]),
            reason=reasons[node.name],
            layer=origin(node).layer,
        )
        for node in saved_values(step)
        if node.name in reasons and node.name not in without and can_be_spread(node, num_parts)
    )
