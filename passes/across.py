"""Sum the slices of gradients again, across replicas: the second hop of a reduction on a mesh.

    reduce_0 = reduce_scatter(grads_0, 0, 4)     |   reduce_0 = reduce_scatter(grads_0, 0, 4)           # within shard
    ...                                          |   ...
    grad_0 = wait(reduce_0, grads_0)             |   grad_0 = wait(reduce_0, grads_0)
    div_(grad_0, 4)                              |   div_(grad_0, 4)
                                                 |   cross_0 = reduce_scatter(grad_0, 0, 2, over='replicate')
                                                 |   ...                                              # as the plan says
                                                 |   part_grad_0 = wait(cross_0, grad_0)
                                                 |   div_(part_grad_0, 2)

What is left is a part of the slice, which its rank updates; the update pass gathers the new values. Where all replicas
update the whole slice, or at stage 0 the whole bucket, it is an all-reduce in its two halves, both in the slice:

    cross_0 = reduce_scatter_into(grad_0, 0, 2, over='replicate')
    ...                                                                                     # as the plan says
    part_grad_0 = wait(cross_0, grad_0); div_(part_grad_0, 2)
    gather_cross_0 = all_gather_into(grad_0, part_grad_0, 0, over='replicate')
    ...                                                                                     # as the plan says
    slice_grad_0 = wait(gather_cross_0)

Sums of several micro-batches cross once: what is reduced in each of them is added up before.

Does not handle: buckets whose gradients are summed along one axis alone, which is the reduce pass's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import end_of_unit, insert_call, node_named, skip_getitems, skip_releases
from zerofx.ir.facts import Job, Origin, Phase, Task, set_task, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.reduced_gradients import divisors, own_slice
from zerofx.scheduler.plan.decisions import ReduceDecision
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten


@dataclass(frozen=True)
class Across:
    """Reduce what gradients were reduced to across replicas, and leave the results in ``StepGraph.reduced``."""

    layout: BucketLayout
    name: str = "across"

    def run(self, step: StepGraph, plan: Plan) -> None:
        by_name = step.nodes_by_name()
        decided = [(self.layout.buckets[decision.bucket], decision) for decision in plan.reduces]
        for bucket, decision in decided:
            if bucket.crosses != (decision.crossed_after != ""):
                raise PlanError(
                    f"expected a decision about gradients across replicas for the buckets that cross, found {decision} "
                    f"for {bucket.name} on {plan.mesh}: make the plan anew"
                )
        # Every hop is started before one is awaited after another's start, as decisions may ask.
        crossing = [(bucket, decision) for bucket, decision in decided if bucket.crosses]
        sums = {bucket.index: own_slice(step, bucket) for bucket, _ in crossing}
        started = {bucket.index: _start(step, plan, bucket, sums[bucket.index]) for bucket, _ in crossing}
        started_after = {decision.wait_after: started[bucket.index] for bucket, decision in crossing}
        for bucket, decision in crossing:
            cross = started[bucket.index]

            def place(name: str | None, cross: fx.Node = cross) -> fx.Node:
                node = step.output.prev if name is None else end_of_unit(step, skip_getitems(node_named(by_name, name)))
                return max(node, cross, started_after.get(name, cross))  # nodes compare by their place in the graph

            _finish(step, plan, bucket, sums[bucket.index], cross, decision, place)


def _stays_in_slice(plan: Plan, bucket: Bucket) -> bool:
    """True if all replicas have the whole sum in the end."""
    return bucket.num_parts == 1 or not bucket.is_cut(plan.stage)


def _start(step: StepGraph, plan: Plan, bucket: Bucket, total: fx.Node) -> fx.Node:
    """Start the second hop where the first has been awaited."""
    where, num_replicas = Origin(bucket.name, Phase.UPDATE), bucket.mesh.size(bucket.crossed_over)
    place, in_slice = total, _stays_in_slice(plan, bucket)
    while place.next.target is _aten.div_.Tensor and place.next.args[0] is total:
        place = place.next  # the average over the ranks of the first
    size, dtype = (tensor(total).numel() // num_replicas,), tensor(total).dtype
    first = divisors(dtype, num_replicas)[0]
    with step.graph.inserting_before(place.next):
        if first != 1:
            insert_call(step.graph, _aten.div_.Tensor, (total, first), where)
        started = insert_call(
            step.graph, ops.reduce_scatter_into if in_slice else ops.reduce_scatter,
            (total, bucket.index, num_replicas), where, dict(axes_argument(bucket.crossed_over)),
            name=f"cross_{bucket.index}",
            fake=step.fake_view(total, size, (1,), 0) if in_slice else step.fake(size, dtype),
        )  # fmt: skip
    return set_task(started, Task(Job.CROSSING, bucket.index))


def _finish(
    step: StepGraph,
    plan: Plan,
    bucket: Bucket,
    total: fx.Node,
    cross: fx.Node,
    decision: ReduceDecision,
    place: Callable[[str | None], fx.Node],
) -> None:
    """Await the second hop, and have the whole slice where replicas need it; ``place`` gives the node that a name in
    ``decision`` comes after."""
    graph, where, index = step.graph, Origin(bucket.name, Phase.UPDATE), bucket.index
    rest = divisors(tensor(total).dtype, bucket.mesh.size(bucket.crossed_over))[1]
    with graph.inserting_before(skip_releases(place(decision.crossed_after)).next):
        result = part = insert_call(graph, ops.wait, (cross, total), where, name=f"part_grad_{index}")
        if rest != 1:
            insert_call(graph, _aten.div_.Tensor, (part, rest), where)
        if _stays_in_slice(plan, bucket):
            args, how = (total, part, index), dict(axes_argument(bucket.crossed_over))
            result = insert_call(graph, ops.all_gather_into, args, where, how, name=f"gather_cross_{index}")
    if result is not part:
        waits = bucket.is_cut(plan.stage) and decision.gathered_after != ""
        anchor = max(result, place(decision.gathered_after)) if waits else result
        with graph.inserting_before(skip_releases(anchor).next):
            result = insert_call(graph, ops.wait, (result,), where, name=f"slice_grad_{index}")
    whole = step.reduced[index]
    if whole is total:
        step.reduced[index] = result
        return
    # At stage 0 the whole is gathered of slices that have crossed.
    gather_whole = whole.args[0]
    assert isinstance(gather_whole, fx.Node)
    gather_whole.replace_input_with(total, result)
    result.append(gather_whole)
    if whole < gather_whole:
        gather_whole.append(whole)
