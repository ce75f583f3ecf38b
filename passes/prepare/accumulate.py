"""Run a step on several micro-batches, one after the other, and add their gradients up.

    y = mm(x, w); loss = div(sum(y), 2)     y = mm(x_0, w); loss = div(sum(y), 2)
    gw = mm(t(x), gy)                       gw = mm(t(x_0), gy)
    return loss, gw                         next_micro_batch(1, [loss])
                                            micro1_y = mm(x_1, w); micro1_loss = div(sum(micro1_y), 2)
                                            total = add(loss, micro1_loss)
                                            micro1_gw = mm(t(x_1), micro1_gy)
                                            return total, gw, micro1_gw

The captured graph is that of one micro-batch, whose loss is divided by their number already. Forward and backward are
copied for each further one, up to three: of more micro-batches the second copy stands for all between the first and the
last, as a loop (``zerofx/ir/micro_batches.py``), so that a step does not grow with their number. A divided batch
tensor becomes a placeholder for each copy, so that an offset makes no region different from another. A buffer that the
model changes is read as the micro-batch before leaves it. Every micro-batch keeps its own gradients: the reduce pass
adds them up where they arrive. Random operators draw in the order in which a loop over the micro-batches would.

Like ``simplify`` it runs before the plan is made, which names the nodes of the graph it leaves.

Does not handle: micro-batches of unequal size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, Role, origin, placeholder, set_placeholder, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.saved_values import value_node


@dataclass(frozen=True)
class Accumulate:
    """Run a step on micro-batches, one after the other. ``divided`` names the batch tensors that are divided."""

    num_micro_batches: int = 1
    divided: frozenset[str] = frozenset()
    name: str = "accumulate"

    def run(self, step: StepGraph) -> None:
        accumulate(step, self.num_micro_batches, self.divided)


def accumulate(step: StepGraph, num_micro_batches: int, divided: Collection[str]) -> None:
    """Unroll ``step``, the graph of one micro-batch, in place; ``divided`` names the batch tensors that are divided."""
    if num_micro_batches == 1:
        return
    step.num_micro_batches = num_micro_batches
    calls, mutations = list(step.calls()), step.mutations
    inputs = [node for node in step.placeholders(Role.INPUT) if placeholder(node).name in divided]
    buffers = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}
    for node in inputs:
        set_placeholder(node, replace(placeholder(node), part=0))
    total, loss = step.loss, step.loss
    extras, gradients = [*step.extras], [step.gradients]
    # An extra stays what it is, while what a loop's round is given becomes what the round leaves.
    given_back = {value_node(storage_source(node)) for node in step.extras}
    within = [node for node in calls if node not in given_back]
    latest, own = dict(mutations), set(within)
    for number in range(1, step.num_bodies):
        handed_on = [name for name in latest if buffers[name].users] if step.has_loop else []
        latest |= {name: _own_value(step, latest[name], own) for name in handed_on}
        _begin(step, number, (total, *(latest[name] for name in handed_on)) if step.has_loop else ())
        copies = {node: node for node in step.placeholders()}
        copies |= {node: _part_of(step, node, number) for node in inputs}
        copies |= {buffers[name]: node for name, node in latest.items()}
        for node in calls:
            copies[node] = _copy(step, node, copies, number)
        total = _sum(step, total, copies[loss])
        extras += [copies[node] for node in extras[: step.num_extras]]
        gradients.append({name: copies[node] for name, node in gradients[0].items()})
        latest, own = {name: copies[node] for name, node in mutations.items()}, {copies[node] for node in within}
    step.set_outputs(total, latest, *gradients, extras=extras)


def _own_value(step: StepGraph, node: fx.Node, own: Collection[fx.Node]) -> fx.Node:
    """A value that a micro-batch leaves a buffer with, as one of what that micro-batch alone has, its ``own``.

    It may hand on what it was given, where two buffers change places, say, or what the step gives back, an extra.
    """
    if value_node(storage_source(node)) in own:
        return node
    with step.graph.inserting_before(step.output):
        return insert_call(step.graph, torch.ops.aten.clone.default, (node,), Origin("", Phase.FORWARD))


def _begin(step: StepGraph, number: int, carried: Iterable[fx.Node]) -> None:
    """Insert what stands before a further micro-batch, which ``carried`` is handed on to."""
    # Views are made again where they are read.
    owners = [value_node(storage_source(node)) for node in carried]
    with step.graph.inserting_before(step.output):
        args = (number, owners)
        insert_call(step.graph, ops.next_micro_batch, args, Origin("", Phase.FORWARD), name=f"micro_batch_{number}")


def _part_of(step: StepGraph, first: fx.Node, number: int) -> fx.Node:
    """The placeholder of a divided tensor's part for a further micro-batch."""
    what = replace(placeholder(first), part=number)
    node = step.add_placeholder(_name(first, number), what, (), tensor(first).dtype)
    return set_value(node, tensor(first))  # with the strides of the batch


def _copy(step: StepGraph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], number: int) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
    with step.graph.inserting_before(step.output):
        copy = step.graph.create_node("call_function", node.target, tuple(args), kwargs, name=_name(node, number))
    copy.meta = dict(node.meta)
    return copy


def _name(node: fx.Node, number: int) -> str:
    return f"micro{number}_{node.name}"


def _sum(step: StepGraph, total: fx.Node, loss: fx.Node) -> fx.Node:
    """The sum of the losses so far and one more, made where that is."""
    with step.graph.inserting_after(loss):
        return insert_call(step.graph, torch.ops.aten.add.Tensor, (total, loss), origin(loss))
