"""End a step before its first update if a loss, or a gradient, is not finite, or rows have found no room.

    loss = mean(losses)                          loss = mean(losses)
    ...                                          ...
                                                 check_finite(loss)               # the same answer on all ranks
    grad_1 = wait(reduce_1, grads_1)             grad_1 = wait(reduce_1, grads_1)
    add_(shard_1, grad_1, alpha=-0.1)            add_(shard_1, grad_1, alpha=-0.1)

The step's graph says whether it is wanted (``StepGraph.guarded``). What forward has done to buffers stays. What a loss
is computed of that stands after the first update moves in front of it: the ranks of the model axis may each have a term
of the loss, and add these up where the step ends.

    loss = where(missed, -inf, loss)             loss = where(missed, -inf, loss)
                                                 check_overflow(loss, shares)

Where ranks send each other the rows of experts, the loss says whether all have found room; the step is run again with
more of it if some have not. Buffers that forward changes are then written after that, as such a step begins with what
they have been:

    copy_(running_mean, mean_next)               check_overflow(loss, shares)
    ...                                          copy_(running_mean, mean_next)

    largest_gradient = amax(parts)               largest_gradient = amax(parts)
                                                 check_gradients(largest_gradient, [loss])
    return loss                                  return loss

Where gradients are checked, the host waits for all of them, once in a step, as ``torch.amp.GradScaler.step`` does, and
the step gives what it would have given: its loss, its extras and the norm of its gradients.

Does not handle: delayed updates, which are refused next to either; updates before the check of gradients, for which the
update pass comes after it, and the verifier sees to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input, mutated_inputs
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Role, origin
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.row_rounds import may_miss_rows
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.operators import OpOverload

_aten = torch.ops.aten


@dataclass(frozen=True)
class GuardLoss:
    """Look at the loss where the first update begins."""

    name: str = "guard_loss"

    def run(self, step: StepGraph, plan: Plan) -> None:
        place = _first_update(step)
        # With room for all rows, the loss may be -inf by itself.
        shares = _row_shares(step) if any(map(may_miss_rows, step.calls())) else []
        late = set[fx.Node]().union(*(_read_after(place, node) for node in (step.loss, *shares)))
        for node in sorted(late):
            place.prepend(node)
        with step.graph.inserting_before(place):
            if shares:
                _check_loss(step, ops.check_overflow, "check_overflow", shares)
                _write_buffers_before(place, step)
            if step.guarded:
                _check_loss(step, ops.check_finite, "check_finite")


def _check_loss(step: StepGraph, check: OpOverload[..., Any], name: str, *more: Any) -> None:
    insert_call(step.graph, check, (step.loss, *more), Origin("", Phase.UPDATE), name=name)


def _row_shares(step: StepGraph) -> list[fx.Node]:
    """The most rows that a rank has for another, of each micro-batch: the last of what its forward gives."""
    num_extras = step.num_extras // step.num_bodies
    return list(step.extras[num_extras - 1 :: num_extras])


def _write_buffers_before(place: fx.Node, step: StepGraph) -> None:
    """Move what writes to buffers in front of ``place``, from earlier on."""
    buffers = set(step.placeholders(Role.BUFFER))
    writes = [node for node in step.calls() if node.target is _aten.copy_.default and node.args[0] in buffers]
    for write in writes:
        if write < place:
            value = write.args[1]
            assert isinstance(value, fx.Node)
            if value.op == "placeholder" or aliased_input(value) is not None:  # which may be given back by then
                with step.graph.inserting_before(write):
                    copy = insert_call(step.graph, _aten.clone.default, (value,), origin(write))
                write.replace_input_with(value, copy)
            place.prepend(write)


def _first_update(step: StepGraph) -> fx.Node:
    """The first of the nodes in a row that the first change of a parameter, state or gradient is among."""
    # What is loaded from slower tiers for an update may be long before it.
    updates = (node for node in step.calls() if _is_update(node) and node.target not in ops.EVENTS)
    place: fx.Node | None = next((node for node in updates if mutated_inputs(node)), None)
    if place is None:
        return step.output
    while _is_update(place.prev):
        place = place.prev
    return place


def _is_update(node: fx.Node) -> bool:
    return node.op == "call_function" and origin(node).phase is Phase.UPDATE


def _read_after(place: fx.Node, node: fx.Node) -> set[fx.Node]:
    """``node`` and all that it is computed of, as far as these stand after ``place``."""
    late, pending = set[fx.Node](), [node]
    while pending:
        current = pending.pop()
        if place < current and current not in late:
            late.add(current)
            pending.extend(current.all_input_nodes)
    return late


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
