"""Issue gathers, and copies from slower tiers, ahead of their use, so that they overlap with computation.

    y = mm(x, w0)                           gather_1 = all_gather(shard_1)
    gather_1 = all_gather(shard_1)          y = mm(x, w0)
    full_1 = wait(gather_1)                 full_1 = wait(gather_1)

A slice on nvme comes in up to three steps, each ahead of the next: read into the host's memory, copied to the device,
gathered. Each is awaited where the next is issued.

Where each goes is the plan's decision; the memory it takes from there on is the plan's too.

Does not handle: waits of reductions, which the reduce pass puts where the plan says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.edit import node_named, start_of_unit
from zerofx.ir.facts import Job, Task
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.decisions import GatherDecision
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Prefetch:
    """Move each gather, and each copy of a slice, before the node that its decision names."""

    name: str = "prefetch"

    def run(self, step: StepGraph, plan: Plan) -> None:
        by_name, tasks = step.nodes_by_name(), step.tasks()
        order = step.positions()
        for number, decision in enumerate(plan.gathers):
            for job, place in _places(decision):
                node = tasks.get(Task(job, number))
                if node is None:
                    continue
                before = start_of_unit(step, node_named(by_name, place))
                if order[before] < order[node]:
                    source = node.args[0]
                    assert isinstance(source, fx.Node)
                    if source.target is ops.wait:
                        before.prepend(source)
                    before.prepend(node)


def _places(decision: GatherDecision) -> Iterator[tuple[Job, str]]:
    """The jobs that start for a residency, in order, each with the node that it starts before."""
    reload = decision.reload or decision.issue
    yield Job.READ, decision.read or reload
    yield Job.RELOAD, reload
    yield Job.GATHER, decision.issue
