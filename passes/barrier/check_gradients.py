"""End a step before its first update if a gradient is not finite.

    largest_gradient = amax(parts)          largest_gradient = amax(parts)
                                            check_gradients(largest_gradient, [loss])   # the same on all ranks
    return loss                             return loss

The host waits here for all gradients, once in a step, as ``torch.amp.GradScaler.step`` does. What forward has done to
buffers stays, and the step gives what it would have given: its loss, its extras and the norm of its gradients.

Does not handle: updates before it; the update pass comes after it, and the verifier sees to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class CheckGradients:
    """End the step where a gradient is not finite, before anything is updated."""

    name: str = "check_gradients"

    def run(self, step: StepGraph, plan: Plan) -> None:
        assert step.unscaling is not None, "gradients are looked at first"
        norm = [] if step.clipping is None else [step.clipping.norm]
        squares = [] if step.layer_squares is None else [step.layer_squares]
        largest = step.unscaling.largest or norm[0]
        with step.graph.inserting_before(step.output):
            args = (largest, [step.loss, *step.extras, *norm, *squares, *step.kept_gradients])
            insert_call(step.graph, ops.check_gradients, args, Origin("", Phase.UPDATE), name="check_gradients")
