"""Random draws of micro-batches that run layer by layer: the generators' states of each, known before the first runs.

    keep_draws(True)                                     # the state of the first micro-batch
    drawn = bernoulli(empty_strided(...), 0.9)           # what it is going to draw, for the generators to go on
    drop_draw(drawn)
    next_micro_batch(1, [])
    keep_draws(False)                                    # the state of the second
    ...
    take_draws(); mask = bernoulli(x, 0.9); keep_draws(False)                # in a layer, of the first
    next_micro_batch(1, [])
    take_draws(); micro1_mask = bernoulli(micro1_x, 0.9); keep_draws(False)  # of the second

Layers run all micro-batches in one order, so that states are taken in the order in which they were kept. The last one
that is kept is the generators' own: they go on from there after the step, as they would one by one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Job, Origin, Phase, Task, is_random, origin, set_task, tensor, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.table import facts_of
from zerofx.torch_private.operators import OpOverload

_aten = torch.ops.aten


def find_unforeseen_draw(step: StepGraph) -> fx.Node | None:
    """A random operator whose draws cannot be made ahead, if there is one: they depend on values."""
    return next((node for node in step.calls() if is_random(node) and not facts_of(node.target).draws_by_shape), None)


def draw_ahead(
    step: StepGraph, draws: Sequence[fx.Node], before: fx.Node, next_body: Callable[[fx.Node, int], None]
) -> None:
    """Keep the states of all bodies in front of the node ``before``: each but the last draws there what it is going to.

    ``next_body`` inserts what stands between two bodies.
    """
    numbers = itertools.count()
    for body in range(step.num_bodies):
        if body:
            next_body(before, body)
        mark_draws(step, before, ops.keep_draws, body == 0)
        for node in draws if body < step.num_bodies - 1 else ():
            added = _draw_again(step, node, before)
            mark_draws(step, before, ops.drop_draw, added[-1])
            for each in added:
                set_task(each, Task(Job.DRAW, next(numbers)))
    next_body(before, 0)


def draw_for_nothing(step: StepGraph, node: fx.Node) -> list[fx.Node]:
    """Have a random operator draw in its place for the generators to go on alone, whatever it reads; returns what is
    inserted."""
    added = _draw_again(step, node, node)
    return [*added, mark_draws(step, node, ops.drop_draw, added[-1])]


def mark_draws(step: StepGraph, before: fx.Node, target: OpOverload, *args: object) -> fx.Node:
    """Insert one of the operators that keep, take and drop draws in front of a node."""
    with step.graph.inserting_before(before):
        return insert_call(step.graph, target, args, Origin("", Phase.FORWARD))


def _draw_again(step: StepGraph, node: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Insert a random operator once more, on memory that nothing has written; returns what is inserted."""
    where, added = origin(node), list[fx.Node]()

    def scratch(read: fx.Node) -> fx.Node:
        like = tensor(read)
        how = {"dtype": like.dtype, "device": like.device}
        args = (list(like.shape), list(like.stride()))
        added.append(insert_call(step.graph, _aten.empty_strided.default, args, where, how, fake=like))
        return added[-1]

    with step.graph.inserting_before(before):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), scratch)
        added.append(insert_call(step.graph, node.target, tuple(args), where, kwargs, fake=value(node)))
        if isinstance(value(node), list | tuple):
            added.append(insert_call(step.graph, operator.getitem, (added[-1], 0), where))
    return added
