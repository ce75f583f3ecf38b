"""Move gradients to a slower tier between micro-batches.

    backward of micro-batch 0                   backward of micro-batch 0
    grads_0 = empty_gradients(0, ...)           grads_0 = empty_gradients(0, ...)
    copy_(as_strided(grads_0, ...), gw)         copy_(as_strided(grads_0, ...), gw)
    ...                                         offload_grads_0 = offload(grads_0, "host")       # after its unit
    ...                                         ...
    ...                                         stored_grads_0 = wait(offload_grads_0, grads_0)  # as the plan says
    ...                                         reload_grads_0 = reload(stored_grads_0)          # as the plan says
    backward of micro-batch 1                   backward of micro-batch 1
    ...                                         grads_0_again = wait(reload_grads_0, stored_grads_0)
    add_(as_strided(grads_0, ...), gw)          add_(as_strided(grads_0_again, ...), gw)

A bucket's buffer is then on the device only while its unit's backward runs. What is added to what, and in which order,
stays as it is, and so do the bits.

Does not handle: gradients after the last micro-batch, which are reduced at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import consumers, end_of_unit, insert_call, node_named, start_of_unit
from zerofx.ir.facts import DEVICE, Origin, Phase, set_tier
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import ends_of_backwards, hand_on
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import TIERS
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Gradients:
    """Copy gradient buffers out after a micro-batch, and back before the next one's gradients are added."""

    layout: BucketLayout
    name: str = "gradients"

    def run(self, step: StepGraph, plan: Plan) -> None:
        by_name = step.nodes_by_name()
        empty = {node.args[0]: node for node in step.calls() if node.target is ops.empty_gradients}
        for decision in plan.gradients:
            _check(step, decision, [index for index in empty if isinstance(index, int)])
            buffer = empty[decision.bucket]
            last = self._move(step, decision, buffer, by_name)
            if step.reduced.get(decision.bucket) is buffer:
                step.reduced[decision.bucket] = last

    def _move(self, step: StepGraph, decision: Absence, buffer: fx.Node, by_name: dict[str, fx.Node]) -> fx.Node:
        """Insert all copies of one bucket; returns what has its gradients in the end."""
        bucket = self.layout.buckets[decision.bucket]
        where = Origin(bucket.name, Phase.BACKWARD)
        groups, ends = _writes(buffer, step.num_bodies, len(bucket.slots)), ends_of_backwards(step)
        current = buffer
        for number, (free, reload) in enumerate(zip(decision.free_after, decision.reload_before, strict=True)):
            last, first = groups[number][-1], groups[number + 1][0]
            users = [user for user in current.users if user > last]  # nodes compare by their place in the graph
            with step.graph.inserting_after(end_of_unit(step, last)):
                args = (current, decision.tier)
                down = insert_call(step.graph, ops.offload, args, where, name=f"offload_{current.name}")
                set_tier(down, decision.tier)
            with step.graph.inserting_after(max(down, end_of_unit(step, node_named(by_name, free)))):
                stored = insert_call(step.graph, ops.wait, (down, current), where, name=f"stored_{current.name}")
                set_tier(stored, decision.tier)
            # A view may stand at the end of the run before its own, which an event of another bucket then ends.
            back = min(start_of_unit(step, first), *users)
            with step.graph.inserting_before(
                min(back, max(stored.next, start_of_unit(step, node_named(by_name, reload))))
            ):
                up = insert_call(step.graph, ops.reload, (stored,), where, name=f"reload_{current.name}")
            with step.graph.inserting_before(back):
                again = insert_call(step.graph, ops.wait, (up, stored), where, name=f"{buffer.name}_again_{number}")
            for user in users:
                user.replace_input_with(current, again)
            if step.has_loop:
                hand_on(ends[number], stored)
            current = again
        return current


def _check(step: StepGraph, decision: Absence, buckets: list[int]) -> None:
    crossings = step.num_bodies - 1
    if (
        decision.bucket not in buckets
        or decision.tier not in TIERS
        or decision.tier == DEVICE
        or len(decision.free_after) != crossings
        or len(decision.reload_before) != crossings
    ):
        raise PlanError(
            f"expected gradients of a trained bucket that wait on host or nvme {crossings} times, between the bodies "
            f"of {step.num_micro_batches} micro-batches, found {decision}: make the plan anew"
        )


def _writes(buffer: fx.Node, num_bodies: int, num_slots: int) -> list[list[fx.Node]]:
    """The writes of gradients to a buffer, in order, by body."""
    written = sorted(node for node in consumers(buffer) if mutated_inputs(node))
    # Slots are written through views. The buffer itself is what is divided (in float16 before it is reduced, too), and
    # at stage 0 reduced and gathered where it lies.
    summed = list(itertools.takewhile(lambda node: node.args[0] is not buffer, written))
    assert len(summed) == num_bodies * num_slots, "each body writes every slot once"
    return [summed[start : start + num_slots] for start in range(0, len(summed), num_slots)]
