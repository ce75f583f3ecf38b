"""Coalesce gathers: start several as one collective where latency takes longer than the bytes.

    gather_1 = all_gather(shard_1, 1, 2)        |   gather_1 = all_gather(shard_1, 1, 2, 1)
    y = mm(x, w0)                               |   gather_2 = all_gather(shard_2, 2, 2)    # both start here
    gather_2 = all_gather(shard_2, 2, 2)        |   y = mm(x, w0)
    full_1 = wait(gather_1)                     |   full_1 = wait(gather_1)

Each bucket keeps a buffer, a wait and a release of its own: only the start is shared. No byte more is sent, and nothing
is copied out of a common buffer.

Does not handle: slices that come up from a slower tier, whose pace is that of the copies; reductions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.facts import Job, Task
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Merge:
    """Move each gather that the plan merges right after the one before it, and have them start together."""

    name: str = "merge"

    def run(self, step: StepGraph, plan: Plan) -> None:
        tasks = step.tasks()
        for numbers in plan.launches:
            if len(numbers) == 1:
                continue
            gathers = [node for number in numbers if (node := tasks.get(Task(Job.GATHER, number))) is not None]
            if len(gathers) < len(numbers):
                raise PlanError(
                    f"the plan merges residencies {numbers}, of which some are of buckets on one rank alone"
                )
            if len({node.kwargs.get("over") for node in gathers}) > 1:
                raise PlanError(f"the plan merges {gathers[0].name} with gathers that other ranks take part in")
            for num_following, node in zip(reversed(range(len(gathers))), gathers, strict=True):
                shard = node.args[0]
                if not isinstance(shard, fx.Node) or shard.op != "placeholder":
                    raise PlanError(f"the plan merges {node.name} with others, whose slice has to be copied up first")
                if num_following:
                    node.args = (*node.args[:3], num_following)
            for node, follower in itertools.pairwise(gathers):
                node.append(follower)
