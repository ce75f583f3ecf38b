"""End a step before its first update if a loss is not finite.

    loss = mean(losses)                          loss = mean(losses)
    ...                                          ...
                                                 check_finite(loss)               # the same answer on all ranks
    grad_1 = wait(reduce_1, grads_1)             grad_1 = wait(reduce_1, grads_1)
    add_(shard_1, grad_1, alpha=-0.1)            add_(shard_1, grad_1, alpha=-0.1)

The step's graph says whether it is wanted (``StepGraph.guarded``). What forward has done to buffers stays.

Does not handle: delayed updates, which are refused next to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.facts import Origin, Phase, origin
from zerofx.ir.graph import StepGraph, insert_call
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class GuardLoss:
    """Look at the loss where the first update begins."""

    name: str = "guard_loss"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order = step.positions()
        updates = [node for node in step.calls() if origin(node).phase is Phase.UPDATE]
        if any(order[node] < order[step.loss] and mutated_inputs(node) for node in updates):
            raise PlanError("expected the loss before all updates, found one before it: make the plan anew")
        place = next((node for node in updates if order[node] > order[step.loss]), step.output)
        with step.graph.inserting_before(place):
            insert_call(step.graph, ops.check_finite, (step.loss,), Origin("", Phase.UPDATE), name="check_finite")
