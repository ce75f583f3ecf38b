"""Look at all reduced gradients, and say what frees them of the loss's scale.

    grad_0 = wait(reduce_0, grads_0)        grad_0 = wait(reduce_0, grads_0)
    div_(grad_0, 2)                         div_(grad_0, 2)
                                            largest_0 = largest(grad_0)                   # of this rank's slice
    ...                                     ...
                                            largest = amax(cat([largest_0, largest_1]))
                                            parts = wait(all_gather(largest, -1, 2))      # a number from each rank
                                            largest_gradient = amax(parts)
                                            inverse_scale = reciprocal(loss_scale)        # in float64, as GradScaler
    return loss                             return loss

The largest magnitude of values is infinite or NaN exactly where one of them is. ``passes/barrier/guard_loss.py``
ends the step before its updates then; else the update pass multiplies each bucket's gradient by ``inverse_scale``.

Where gradients are clipped, and all of them are in float16, their norm says as much, and is all that is read of them:
no sum of squares of float16 leaves the range of float32. Squares of other dtypes may.

Does not handle: delayed updates, which are refused together with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph, Unscaling
from zerofx.passes.lib.reduced_gradients import gather_number, numbers_of_slices
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten
_WHERE = Origin("", Phase.UPDATE)


@dataclass(frozen=True)
class Unscale:
    """Find the largest of all reduced gradients, and leave it in ``StepGraph.unscaling`` with what unscales them."""

    layout: BucketLayout
    name: str = "unscale"

    def run(self, step: StepGraph, plan: Plan) -> None:
        scale = step.loss_scale
        if scale is None:
            raise PlanError("expected a graph whose loss is scaled, found one whose loss is not: make the plan anew")
        if any(decision.delayed for decision in plan.states):
            raise PlanError("expected no delayed updates together with loss scaling, found some: make the plan anew")
        largest, begin = (None, None) if self._norm_says(plan) else self._largest(step, plan)
        with step.graph.inserting_before(step.output):
            # What GradScaler computes: its inverse in double precision, rounded once.
            double = insert_call(step.graph, _aten._to_copy.default, (scale,), _WHERE, {"dtype": torch.float64})
            inverse = insert_call(step.graph, _aten.reciprocal.default, (double,), _WHERE)
            kind = {"dtype": torch.float32}
            rounded = insert_call(step.graph, _aten._to_copy.default, (inverse,), _WHERE, kind, name="inverse_scale")
        step.unscaling = Unscaling(rounded, largest, double if begin is None else begin)

    def _norm_says(self, plan: Plan) -> bool:
        """True if the norm that clipping takes is not finite exactly if a gradient is not."""
        trained = [bucket for bucket in self.layout.buckets if bucket.trainable]
        return plan.max_grad_norm is not None and all(bucket.reduce_dtype is torch.float16 for bucket in trained)

    def _largest(self, step: StepGraph, plan: Plan) -> tuple[fx.Node, fx.Node]:
        """The largest magnitude, and the first node of its computation where the step ends."""
        graph, parts = step.graph, numbers_of_slices(step, plan, self.layout, ops.largest, "largest")
        with graph.inserting_before(step.output):
            together = insert_call(graph, _aten.cat.default, (parts,), _WHERE, name="largest_of_buckets")
            largest = insert_call(graph, _aten.amax.default, (together, [0], True), _WHERE)
            largest = gather_number(step, largest, plan.mesh, plan.mesh.world, "largest")
            largest = insert_call(graph, _aten.amax.default, (largest,), _WHERE, name="largest_gradient")
        return largest, together
