"""A number of each bucket's reduced gradient, on this rank, and what the others have."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.collective_axes import axes_argument
from zerofx.ir.edit import consumers, end_of_unit, insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.passes.lib.reduced_gradients import own_slice
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.operators import OpOverload


def numbers_of_slices(
    step: StepGraph, plan: Plan, layout: BucketLayout, operator: OpOverload, what: str
) -> list[fx.Node]:
    """``operator`` of this rank's slice of each gradient, in the order of buckets: float64, shape ``[1]``.

    It runs as soon as the gradient is reduced; its node is called ``what`` and the bucket's index.
    """
    numbers: dict[int, fx.Node] = {}
    for decision in plan.reduces:
        bucket = layout.buckets[decision.bucket]
        own = own_slice(step, bucket)
        place = end_of_unit(step, max([own, *consumers(own)])).next  # nodes compare by their place in the graph
        with step.graph.inserting_before(place):
            numbers[bucket.index] = insert_call(
                step.graph, operator, (own,), Origin(bucket.name, Phase.UPDATE),
                name=f"{what}_{bucket.index}", fake=step.fake((1,), torch.float64),
            )  # fmt: skip
    return [numbers[index] for index in sorted(numbers)]


def gather_number(step: StepGraph, plan: Plan, number: fx.Node, what: str) -> fx.Node:
    """``number``, of shape ``[1]``, gathered from all ranks at the insertion point; itself on one rank."""
    if plan.num_ranks == 1:
        return number
    where = Origin("", Phase.UPDATE)
    args = (number, ops.NO_BUCKET, plan.num_ranks)
    how = dict(axes_argument(plan.mesh.world))
    gather = insert_call(step.graph, ops.all_gather, args, where, how, name=f"gather_{what}")
    return insert_call(step.graph, ops.wait, (gather,), where, name=f"{what}_of_ranks")
