"""Values that a stage's turns hand on: what backward reads of the forward of some turns before.

    turn 2, the loop, where forward is two turns ahead of backward:

    next_micro_batch(2, [h, micro1_h])                  # of the micro-batches that are under way
    micro2_h = mm(micro2_x, w)
    gw = mm(t(h), gy)
    next_micro_batch(3, [micro1_h, micro2_h])           # of those that are under way for the next round

A round names what it reads by the body that made it first: the value of the micro-batch that is the longest under way.
All that are under way move up by one as a round ends, so that a stage holds as many as it is turns ahead, whatever
their number in all (1F1B, 1806.03377).
"""

from __future__ import annotations

import operator

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.facts import twin_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import Loop, calls_by_body, loops_of
from zerofx.scheduler.analysis.saved_values import value_node


def hand_on_values(step: StepGraph) -> None:
    """Have a loop of turns hand on what its rounds read of earlier turns, and no other values of micro-batches."""
    for loop in loops_of(step) if step.takes_turns else ():
        twins = {twin: node for node in step.graph.nodes if (twin := twin_of(node)) is not None}
        ends = [list[fx.Node](), list[fx.Node]()]
        for before, after in loop.carries:
            if twin_of(before) is None or twin_of(after) is None:  # the sum of losses, say
                ends[0].append(before)
                ends[1].append(after)
        for name, (own_lag, last_lag) in _lags_under_way(step, loop).items():
            for turn, at_end in enumerate(ends, step.num_before):
                at_end += (_carrier(twins[name, turn - lag]) for lag in range(last_lag, own_lag, -1))
        for border, values in zip((loop.begin, loop.end), ends, strict=True):
            border.args = (border.args[0], values)


def _carrier(node: fx.Node) -> fx.Node:
    """The node by which a round hands a value on; of what is still to arrive the message."""
    return node if node.target in ops.MESSAGES else value_node(storage_source(node))


def _lags_under_way(step: StepGraph, loop: Loop) -> dict[str, tuple[int, int]]:
    """The values that a round reads and another turn has made, by the names that they have in the first micro-batch: by
    how many turns what makes one lags, and what reads it last."""
    turn_of = dict(calls_by_body(step))
    lags: dict[str, tuple[int, int]] = {}
    for node in loop.body():
        # What names one of several results is where these are made.
        for read in node.all_input_nodes if node.target is not operator.getitem else ():
            value = _carrier(read)
            twin = twin_of(value)
            if twin is None:
                continue
            name, body = twin
            lag, own_lag = step.num_before - body, turn_of.get(value, body) - body
            if lag > own_lag:
                lags[name] = own_lag, max(lag, lags.get(name, (0, 0))[1])
    return lags
