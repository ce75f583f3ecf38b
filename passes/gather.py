"""Give each bucket its residencies: gather before first use, release after last use, again in backward.

    full = wait(all_gather(shard_0))        |   gather_0 = all_gather(shard_0)
    w = as_strided(full, ...)               |   full_0 = wait(gather_0)
    y = mm(x, w)                            |   w = as_strided(full_0, ...)
    ...                                     |   y = mm(x, w)
    gx = mm(gy, t(w))                       |   release(full_0)
                                            |   ...
                                            |   gather_1 = all_gather(shard_0)    # another residency
                                            |   ...

Each residency has views of its own, so that no view keeps a released buffer alive. Where the plan keeps a bucket
between forward and backward, one residency spans both.

A slice in a slower tier is copied to the device first, one on nvme by way of the host where the plan reads it ahead:

    read_0 = reload(shard_0, "host")
    staged_0 = wait(read_0, shard_0)
    reload_0 = reload(staged_0)
    slice_0 = wait(reload_0, staged_0)                  # on one rank this is the whole: full_0
    gather_0 = all_gather(slice_0)
    full_0 = wait(gather_0, slice_0)

Does not handle: how early gathers and copies are issued (the prefetch pass).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call, node_named, read_instead, skip_getitems, start_of_unit
from zerofx.ir.facts import DEVICE, Job, Origin, Role, Task, origin, placeholder, set_task, set_tier, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.scheduler.plan.decisions import GatherDecision
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Gather:
    """Replace the gather at the graph's start by one gather, wait and release for each residency of the plan."""

    layout: BucketLayout
    name: str = "gather"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order = step.positions()
        by_name = step.nodes_by_name()
        whole: dict[int, fx.Node] = {}
        shards: dict[int, fx.Node] = {}
        for shard in step.placeholders(Role.SHARD):
            index = placeholder(shard).bucket
            if index is not None and shard.users:
                whole[index], shards[index] = _whole_at_start(shard), shard
        reads = {index: sorted(consumers(full), key=order.__getitem__) for index, full in whole.items()}
        never_apart = {placeholder(node).bucket for node in step.placeholders(Role.FULL)}
        for number, decision in enumerate(plan.gathers):
            if decision.bucket in never_apart:
                raise PlanError(
                    f"the plan gives bucket {decision.bucket}, which is there whole, a residency: {decision}"
                )
            first, last = (node_named(by_name, name) for name in (decision.first, decision.last))
            inside = [n for n in reads[decision.bucket] if order[first] <= order[n] <= order[last]]
            reads[decision.bucket] = [n for n in reads[decision.bucket] if n not in inside]
            if not inside:
                raise PlanError(f"the plan gives bucket {decision.bucket} a residency without a use: {decision}")
            bucket = self.layout.buckets[decision.bucket]
            _add_residency(step, bucket, number, decision, shards[bucket.index], whole[bucket.index], inside)
        left = {index: nodes for index, nodes in reads.items() if nodes}
        if left:
            raise PlanError(f"the plan gives these uses of buckets no residency: {left}; make the plan anew")
        for full in whole.values():
            _erase_with_views(step.graph, full)


def _whole_at_start(shard: fx.Node) -> fx.Node:
    """The whole bucket that the shard pass has made of a slice."""
    node = shard
    while started := [user for user in node.users if user.target in (ops.reload, ops.all_gather)]:
        (node,) = started[0].users
    return node


def _add_residency(
    step: StepGraph,
    bucket: Bucket,
    number: int,
    decision: GatherDecision,
    shard: fx.Node,
    whole: fx.Node,
    reads: list[fx.Node],
) -> None:
    graph = step.graph
    where = Origin(bucket.name, origin(reads[0]).phase)
    with graph.inserting_before(start_of_unit(step, reads[0])):
        full = shard
        if tier_of(shard) != DEVICE:
            full = _load_slice(graph, bucket, number, decision, shard, where)
        if bucket.num_ranks > 1:
            pending = insert_call(
                graph, ops.all_gather, (full, bucket.index, bucket.num_ranks), where,
                dict(axes_argument(bucket.gathered_over)),
                name=f"gather_{number}",
                fake=step.fake((bucket.numel,), bucket.compute_dtype),
            )  # fmt: skip
            set_task(pending, Task(Job.GATHER, number))
            # A slice that stays needs nobody to hold it until then.
            read = () if full is shard else (full,)
            full = insert_call(graph, ops.wait, (pending, *read), where, name=f"full_{number}")
    clones = {whole: full}
    for node in reads:
        read_instead(node, whole, clones)
    with graph.inserting_after(end_of_unit(step, skip_getitems(reads[-1]))):
        insert_call(graph, ops.release, (full,), Origin(bucket.name, origin(reads[-1]).phase))


def _load_slice(
    graph: fx.Graph, bucket: Bucket, number: int, decision: GatherDecision, shard: fx.Node, where: Origin
) -> fx.Node:
    """This rank's slice, copied to the device from its tier."""
    stored = shard
    if decision.read is not None:
        read = set_tier(insert_call(graph, ops.reload, (shard, "host"), where, name=f"read_{number}"), "host")
        set_task(read, Task(Job.READ, number))
        stored = set_tier(insert_call(graph, ops.wait, (read, shard), where, name=f"staged_{number}"), "host")
    pending = insert_call(graph, ops.reload, (stored,), where, name=f"reload_{number}")
    set_task(pending, Task(Job.RELOAD, number))
    name = f"slice_{number}" if bucket.num_ranks > 1 else f"full_{number}"
    return insert_call(graph, ops.wait, (pending, stored), where, name=name)


def _erase_with_views(graph: fx.Graph, full: fx.Node) -> None:
    doomed = [full]
    while (source := doomed[0].all_input_nodes[0]).op != "placeholder":  # waits and what they wait for read one node
        doomed.insert(0, source)
    for node in doomed:  # and views of views
        doomed.extend(user for user in node.users if user not in doomed)
    for node in reversed(doomed):
        graph.erase_node(node)
