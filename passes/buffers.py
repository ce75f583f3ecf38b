"""Write mutated buffers back, and start the step from rank 0's, as DistributedDataParallel does.

    mean_next = ...                         broadcast([running_mean])           # only on more than one rank
    return loss, mean_next                  ...
                                            copy_(running_mean, mean_next)      # after the last reader of the old value
                                            return loss

Does not handle: buffers that the step does not change. They were made equal when the step was compiled, and are again
where a step of another shape or mode that changes them has run before (``Runtime.begin_with_equal_buffers``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_source
from zerofx.ir.edit import consumers, insert_call, skip_getitems
from zerofx.ir.facts import Origin, Phase, Role, origin, placeholder
from zerofx.ir.graph import StepGraph
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
        if changed and plan.num_ranks > 1:
            with step.graph.inserting_after(step.last_placeholder()):
                insert_call(step.graph, ops.broadcast, (changed,), Origin("", Phase.FORWARD))
