"""The micro-batches of a step graph: their borders, and the number of times that each runs.

A step of up to three micro-batches has a body for each. A step of more has three bodies too: the first micro-batch, one
for all in between, and the last. The one in between is a loop: it runs once for each micro-batch that it stands for,
and its end restores what it began with. ``ops.next_micro_batch`` separates two bodies, and reads the values that the
first passes to the second: the loop's begin and end pass the same values in the same order.

Micro-batches that run layer by layer (``StepGraph.by_layer``) have all of this once for each *stretch* of the graph,
the nodes of a layer in a row, rather than once for the step. Between two stretches ``next_micro_batch(0)`` leads back
to the first body. Every stretch has a loop of its own, whose round i has what round i of the others has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph, num_bodies


@dataclass(frozen=True)
class Loop:
    """The micro-batch that runs ``num_rounds`` times: what is between two calls of ``ops.next_micro_batch``."""

    begin: fx.Node
    end: fx.Node
    num_rounds: int

    @property
    def carries(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """Pairs of loop-carried values, at the start of a round and for the next one; loop invariants are left out."""
        (_, before), (_, after) = self.begin.args, self.end.args
        assert isinstance(before, list | tuple) and isinstance(after, list | tuple)
        pairs = dict.fromkeys(zip(before, after, strict=True))
        return tuple((first, second) for first, second in pairs if first is not second)

    def body(self) -> list[fx.Node]:
        """The calls of a round, in order."""
        nodes, node = [], self.begin.next
        while node is not self.end:
            nodes.append(node)
            node = node.next
        return nodes


def micro_batches_of(body: int, num_micro_batches: int) -> range:
    """The micro-batches that a body of a graph of so many stands for."""
    if num_micro_batches == num_bodies(num_micro_batches):
        return range(body, body + 1)
    last = num_micro_batches - 1
    return (range(1), range(1, last), range(last, last + 1))[body]


def borders(step: StepGraph) -> list[fx.Node]:
    """The nodes between two bodies, in order."""
    return sorted(step.graph.find_nodes(op="call_function", target=ops.next_micro_batch, sort=False))


def hand_on(border: fx.Node, value: fx.Node) -> None:
    """Pass ``value`` to the next body, too. Call it for each border in the same order."""
    number, carried = border.args
    assert isinstance(carried, list | tuple)
    border.args = (number, [*carried, value])


def loops_of(step: StepGraph) -> tuple[Loop, ...]:
    """The loops over the micro-batches between the first and the last, in order: none, one, or one a stretch."""
    if not step.has_loop:
        return ()
    ends = [node for node in borders(step) if body_after(node)]
    return tuple(Loop(begin, end, num_rounds(step, 1)) for begin, end in zip(ends[::2], ends[1::2], strict=True))


def loop_numbers(loops: Sequence[Loop]) -> dict[fx.Node, int]:
    """The number of the loop that each call of a round is in; calls outside of all loops are left out."""
    return {node: number for number, loop in enumerate(loops) for node in loop.body()}


def num_rounds(step: StepGraph, number: int) -> int:
    """The number of micro-batches that body ``number`` stands for."""
    return len(micro_batches_of(number, step.num_micro_batches))


def body_after(border: fx.Node) -> int:
    """The number of the body that begins after a border."""
    number = border.args[0]
    assert isinstance(number, int)
    return number


def calls_by_body(step: StepGraph) -> Iterator[tuple[fx.Node, int]]:
    """All calls in order, each with the number of its body; a border is in the body that it begins."""
    number = 0
    for node in step.calls():
        number = body_after(node) if node.target is ops.next_micro_batch else number
        yield node, number


def times_run(step: StepGraph) -> dict[fx.Node, int]:
    """The number of times that each call runs."""
    rounds = [num_rounds(step, number) for number in range(step.num_bodies)]
    return {node: rounds[number] for node, number in calls_by_body(step)}


def loop_bodies(step: StepGraph) -> dict[str, int]:
    """The number of the body that each call is in, by name; without a loop all calls are in body 0.

    What is started in one body and done in another must be so between every two: so nothing is, where there is a loop.
    What is started and done around the loops of layers is in no round: all calls are in body 0 there, too.
    """
    counts = step.has_loop and not step.by_layer
    return {node.name: number if counts else 0 for node, number in calls_by_body(step)}


def stretches(step: StepGraph) -> dict[fx.Node, int]:
    """The number of the stretch that each call is in, where micro-batches run layer by layer; 0 for all else."""
    number, numbers = 0, {}
    for node in step.calls():
        number += step.by_layer and node.target is ops.next_micro_batch and not body_after(node)
        numbers[node] = number
    return numbers


def times_held(step: StepGraph, node: fx.Node) -> int:
    """The number of tensors that a placeholder stands for: one for each micro-batch of its body."""
    what = placeholder(node)
    return 1 if what.role is not Role.INPUT or what.part is None else num_rounds(step, what.part)
