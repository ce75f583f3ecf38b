"""Keep the reduced gradients that are asked for by name, as copies that the step hands out.

    grad_0 = wait(reduce_0, grads_0)        grad_0 = wait(reduce_0, grads_0)
    div_(grad_0, 2)                         div_(grad_0, 2)
                                            kept_0 = clone(grad_0)
    ...                                     ...
    return loss, grad_norm                  return loss, grad_norm, kept_0

Each rank has of them what it updates: a slice of a bucket, or at stage 0 the whole. They are as they were before
clipping. Where the loss is scaled they are freed of its scale (``unscale.py``), as soon as its inverse is known.

Does not handle: parameters that are not trained, which have no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten


def kept_buckets(layout: BucketLayout, plan: Plan) -> list[Bucket]:
    """The buckets whose gradients are outputs, in this order."""
    return [bucket for bucket in layout.buckets if bucket.trainable and bucket.name in plan.kept_gradients]


@dataclass(frozen=True)
class KeepGradients:
    """Copy the gradients that the plan keeps, and hand the copies out as ``StepGraph.kept_gradients``."""

    layout: BucketLayout
    name: str = "keep_gradients"

    def run(self, step: StepGraph, plan: Plan) -> None:
        copies = []
        for bucket in kept_buckets(self.layout, plan):
            own, where = step.reduced[bucket.index], Origin(bucket.name, Phase.UPDATE)
            operator, args = _aten.clone.default, [own]
            place = end_of_unit(step, max([own, *consumers(own)])).next  # nodes compare by their place in the graph
            if step.unscaling is not None:
                operator, args, place = _aten.mul.Tensor, [own, step.unscaling.inverse], step.output
            with step.graph.inserting_before(place):
                copies.append(insert_call(step.graph, operator, tuple(args), where, name=f"kept_{bucket.index}"))
        step.kept_gradients = tuple(copies)
        step.set_outputs(step.loss, step.mutations)
