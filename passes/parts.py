"""Make the views that collectives on values read where they start, and those that a step hands out at its end.

    v = view(x, [2, 4, 8])                          v = part(x, [2, 4, 8], [32, 8, 1], 0)
    sum = reduce_scatter_values(v, 2)        ->     sum = reduce_scatter_values(v, 2)
    s = wait(sum, v)                                s = wait(sum, v)

A view costs nothing inside a region, which makes it again; what the runtime is given it must have. Views of parameters
are views of buckets by now.

Does not handle: other events, whose arguments are whole values by the time that passes put them in.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Role, origin, placeholder, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loops_of
from zerofx.scheduler.plan.plan import Plan


@dataclass(frozen=True)
class Parts:
    """Make the views that collectives on values read where they start, and those that a step hands out at its end."""

    name: str = "parts"

    def run(self, step: StepGraph, plan: Plan) -> None:
        for node in list(step.calls()):
            if node.target in ops.VALUE_COLLECTIVES:
                (read,) = node.all_input_nodes
                _give_part(step, read, node, *node.users)
        # What a loop's rounds hand out each of them makes.
        ends = {node: loop.end for loop in loops_of(step) for node in loop.body()}
        for handed_out in step.output.all_input_nodes:
            _give_part(step, handed_out, step.output, place=ends.get(handed_out))


def _give_part(step: StepGraph, read: fx.Node, first: fx.Node, *others: fx.Node, place: fx.Node | None = None) -> None:
    """Make ``read``, if it is a view, for its ``first`` reader and ``others``, in front of ``place`` or the first."""
    if not is_view(read) or read.target in ops.EVENTS:
        return
    owner, fake, where = _owner(read), tensor(read), origin(read if first is step.output else first)
    offset = int(fake.storage_offset())
    if _is_parameter(owner):
        # What was made of a parameter is of its own memory, which by now is a part of a bucket's.
        (full, _, _, begin) = owner.args
        assert isinstance(full, fx.Node) and isinstance(begin, int)
        offset = begin if read is owner else begin + offset
        owner = full
    else:
        offset -= int(tensor(owner).storage_offset())
    with step.graph.inserting_before(place or first):
        args = (owner, list(fake.shape), list(fake.stride()), offset)
        part = insert_call(step.graph, ops.part, args, where, fake=fake)
    for reader in (first, *others):
        reader.replace_input_with(read, part)


def _owner(view: fx.Node) -> fx.Node:
    """The runtime's own tensor of which a view is a view: a result of an operator or an event, or a parameter."""
    node = view
    while node.target not in ops.EVENTS and is_view(node) and not _is_parameter(node):
        (source,) = node.all_input_nodes
        if node.target is operator.getitem and not is_view(source):
            break
        node = source
    return node


def _is_parameter(node: fx.Node) -> bool:
    """True if a node is a parameter as a view of its bucket (``passes/shard.py``)."""
    if node.target is not torch.ops.aten.as_strided.default:
        return False
    (full, *_) = node.all_input_nodes
    return full.target is ops.wait or (full.op == "placeholder" and placeholder(full).role is Role.FULL)
