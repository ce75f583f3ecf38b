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

Does not handle: how early a gather is issued (the prefetch pass).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx import ops
from zerofx.buckets import BucketLayout
from zerofx.errors import PlanError
from zerofx.graph import Origin, StepGraph, insert_call, origin
from zerofx.passes.base import after, consumers, end_of_unit, is_view_of, named, start_of_unit, view_again
from zerofx.scheduler.plan import GatherDecision, Plan


@dataclass(frozen=True)
class Gather:
    """Replace the gather at the graph's start by one gather, wait and release for each residency of the plan."""

    layout: BucketLayout
    name: str = "gather"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order = step.positions()
        by_name = {node.name: node for node in step.graph.nodes}
        whole = {
            int(node.args[1]): next(iter(node.users))  # type: ignore[arg-type]  # the op's schema says int
            for node in step.calls()
            if node.target is ops.all_gather
        }
        reads = {index: sorted(consumers(full), key=order.__getitem__) for index, full in whole.items()}
        for number, decision in enumerate(plan.gathers):
            first, last = (named(by_name, name) for name in (decision.first, decision.last))
            inside = [n for n in reads[decision.bucket] if order[first] <= order[n] <= order[last]]
            reads[decision.bucket] = [n for n in reads[decision.bucket] if n not in inside]
            _add_residency(step, self.layout, number, decision, whole[decision.bucket], inside)
        left = {index: nodes for index, nodes in reads.items() if nodes}
        if left:
            raise PlanError(f"the plan gives these uses of buckets no residency: {left}; make the plan anew")
        for full in whole.values():
            _erase_with_views(step.graph, full)


def _add_residency(
    step: StepGraph, layout: BucketLayout, number: int, decision: GatherDecision, whole: fx.Node, reads: list[fx.Node]
) -> None:
    graph, bucket = step.graph, layout.buckets[decision.bucket]
    shard = whole.args[0].args[0]  # type: ignore[union-attr]  # wait(all_gather(shard))
    where = Origin(bucket.name, origin(reads[0]).phase)
    with graph.inserting_before(start_of_unit(step, reads[0])):
        pending = insert_call(
            graph, ops.all_gather, (shard, bucket.index, bucket.num_ranks), where, name=gather_name(number),
            fake=step.fake((bucket.numel,), bucket.compute_dtype),
        )  # fmt: skip
        full = insert_call(graph, ops.wait, (pending,), where, name=f"full_{number}")
    clones = {whole: full}
    for node in reads:
        for source in list(node.all_input_nodes):
            if is_view_of(source, whole):
                with graph.inserting_before(node):
                    node.replace_input_with(source, view_again(graph, source, clones))
    with graph.inserting_after(end_of_unit(step, after(reads[-1]))):
        insert_call(graph, ops.release, (full,), Origin(bucket.name, origin(reads[-1]).phase))


def gather_name(number: int) -> str:
    """The name of the gather node of the plan's decision ``number``, by which later passes find it."""
    return f"gather_{number}"


def _erase_with_views(graph: fx.Graph, full: fx.Node) -> None:
    doomed = [*full.all_input_nodes, full]  # the started gather, its wait, then views of views
    for node in doomed:
        doomed.extend(user for user in node.users if user not in doomed)
    for node in reversed(doomed):
        graph.erase_node(node)
