"""Gradients that are summed over ranks: divisors, the slice that is this rank's alone, a number of each slice."""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.scheduler.plan.mesh import Axes, Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.operators import OpOverload


def divisors(dtype: torch.dtype, num_ranks: int) -> tuple[int, float]:
    """Divisors of gradients of ``dtype``, before their sum over the ranks and of the sum.

    Where float16 is reduced both parts are near the root of the number of ranks, so that neither small values nor
    large sums leave its range (as in ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``).
    """
    if dtype is not torch.float16:
        return 1, num_ranks
    first = 1
    while num_ranks % first == 0 and num_ranks / first > first:
        first *= 2
    rest = num_ranks / first
    return first, int(rest) if rest.is_integer() else rest


def own_slice(step: StepGraph, bucket: Bucket) -> fx.Node:
    """This rank's own slice of a bucket's reduced gradient, which at stage 0 is gathered from all ranks again."""
    own = step.reduced[bucket.index]
    while isinstance(gather := own.args[0], fx.Node) and gather.target is ops.all_gather_into:
        assert isinstance(gather.args[1], fx.Node)
        own = gather.args[1]
    return own


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


def gather_number(step: StepGraph, number: fx.Node, mesh: Mesh, axes: Axes, what: str) -> fx.Node:
    """``number``, of shape ``[1]``, gathered from the ranks along ``axes`` at the insertion point; itself on one rank.

    Or several numbers.
    """
    num_ranks = mesh.size(axes)
    if num_ranks == 1:
        return number
    where = Origin("", Phase.UPDATE)
    args = (number, ops.NO_BUCKET, num_ranks)
    how = dict(axes_argument(axes))
    gather = insert_call(step.graph, ops.all_gather, args, where, how, name=f"gather_{what}")
    return insert_call(step.graph, ops.wait, (gather,), where, name=f"{what}_of_ranks")
