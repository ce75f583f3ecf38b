"""Put nodes of one rank's graph where collectives on values overlap with them, as decided.

    g = mm(d, x); dx = mm(d, w)                              dx = mm(d, w)
    sum = reduce_scatter_values(dx, ...)            ->       sum = reduce_scatter_values(dx, ...)
    s = wait(sum); n = norm_backward(s)                      g = mm(d, x)
                                                             s = wait(sum); n = norm_backward(s)

Nothing is computed otherwise, or more than once: only the order changes.

Does not handle: collectives on parameters and gradients, which other passes put in.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.edit import node_named
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.decisions import MovedNodes


@dataclass(frozen=True)
class Overlap:
    """Put nodes of one rank's graph where collectives on values overlap with them, as decided."""

    overlaps: tuple[MovedNodes, ...]
    name: str = "overlap"

    def run(self, step: StepGraph) -> None:
        overlap(step, self.overlaps)


def overlap(step: StepGraph, overlaps: tuple[MovedNodes, ...]) -> None:
    """Move nodes in place.

    Raises:
        PlanError: a decision is about a node that the graph has not, or one would stand before what it reads.
    """
    by_name = step.nodes_by_name()
    for *names, before in filter(None, overlaps):
        place = node_named(by_name, before)
        for name in names:
            place.prepend(node_named(by_name, name))
    seen: set[fx.Node] = set()
    for node in step.graph.nodes:
        early = next((read for read in node.all_input_nodes if read not in seen), None)
        if early is not None:
            raise PlanError(
                f"the plan has {node.name} run before {early.name}, which it reads; make the plan anew for this model"
            )
        seen.add(node)
    step.overlaps = overlaps
