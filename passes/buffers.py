"""Write mutated buffers back, and start the step from rank 0's, as DistributedDataParallel does.

    mean_next = ...                         broadcast([running_mean])           # only on more than one rank
    return loss, mean_next                  ...
                                            copy_(running_mean, mean_next)      # after the last reader of the old value
                                            return loss

Where the step is one stage of several, the buffers that it changes are handed to the others when the step ends, so that
every rank has all of them.

Does not handle: buffers that the step does not change. They were made equal when the step was compiled, and are again
where a step of another shape or mode that changes them has run before (``Runtime.begin_with_equal_buffers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.edit import consumers, insert_call, skip_getitems
from zerofx.ir.facts import Origin, Phase, Role, origin, placeholder, tensor
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.scheduler.plan.mesh import PIPE
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Buffers:
    """Turn the graph's buffer outputs into in-place writes."""

    name: str = "buffers"

    def run(self, step: StepGraph, plan: Plan) -> None:
        buffers = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}
        order = step.positions()
        mutations = step.mutations
        written = {storage_source(source)[0] for node in step.calls() for source in mutated_inputs(node)}  # in backward
        changed = [node for name, node in buffers.items() if name in mutations or node in written]
        step.set_outputs(step.loss, {}, *step.gradients_by_body)
        for name, value in mutations.items():
            buffer = buffers[name]
            last = max([value, *consumers(buffer)], key=order.__getitem__)
            with step.graph.inserting_before(skip_getitems(last).next):
                insert_call(step.graph, torch.ops.aten.copy_.default, (buffer, value), origin(value))
        if step.pipe is not None:
            changed = _hand_on(step, step.pipe, changed)
        if changed and plan.num_ranks > 1:
            with step.graph.inserting_after(step.last_placeholder()):
                insert_call(step.graph, ops.broadcast, (changed,), Origin("", Phase.FORWARD))


def _hand_on(step: StepGraph, pipe: PipeStage, own: Sequence[fx.Node]) -> list[fx.Node]:
    """Send the changed buffers of this stage to the others, and receive theirs; returns those that any changes."""
    buffers, stage_of = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}, dict(pipe.buffers)
    over, at, sent = dict(axes_argument(PIPE)), Origin("", Phase.UPDATE), list[tuple[fx.Node, fx.Node]]()
    with step.graph.inserting_before(step.output):
        for name, stage in pipe.buffers:
            buffer, like = buffers[name], tensor(buffers[name])
            if stage != pipe.number:
                args = (stage, list(like.shape), list(like.stride()), like.dtype)
                how = {"device": like.device, **over}
                pending = insert_call(step.graph, ops.receive_value, args, at, how, fake=like)
                received = insert_call(step.graph, ops.wait, (pending,), at)
                insert_call(step.graph, torch.ops.aten.copy_.default, (buffer, received), at)
                continue
            others = (other for other in range(pipe.num_stages) if other != stage)
            sent += [(insert_call(step.graph, ops.send_value, (buffer, other), at, over), buffer) for other in others]
        for message in sent:
            insert_call(step.graph, ops.wait, message, at)
    return [node for name, node in buffers.items() if name in stage_of or node in own]
