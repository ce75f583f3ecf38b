"""Issue gathers ahead of their use, so that they run beside the computation before it.

    y = mm(x, w0)                           gather_1 = all_gather(shard_1)
    gather_1 = all_gather(shard_1)          y = mm(x, w0)
    full_1 = wait(gather_1)                 full_1 = wait(gather_1)

Where each gather goes is the plan's decision; the memory it takes from there on is the plan's too.

Does not handle: waits of reductions, which the reduce pass puts where the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.graph import StepGraph
from zerofx.passes.base import start_of_unit
from zerofx.passes.gather import gather_name
from zerofx.scheduler.plan import Plan


@dataclass(frozen=True)
class Prefetch:
    """Move each gather before the node that its decision names."""

    name: str = "prefetch"

    def run(self, step: StepGraph, plan: Plan) -> None:
        by_name = {node.name: node for node in step.graph.nodes}
        order = step.positions()
        for number, decision in enumerate(plan.gathers):
            gather, place = by_name[gather_name(number)], start_of_unit(step, by_name[decision.issue])
            if order[place] < order[gather]:
                place.prepend(gather)
