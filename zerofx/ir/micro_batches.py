"""The micro-batches of a step graph: their borders, and the number of times that each runs.

A step of up to three micro-batches has a body for each. A step of more has three bodies too: the first micro-batch, one
for all in between, and the last. The one in between is a loop: it runs once for each micro-batch that it stands for,
and its end restores what it began with. ``ops.next_micro_batch`` separates two bodies, and reads the values that the
first passes to the second: the loop's begin and end pass the same values in the same order.
"""

from __future__ import annotations

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


def loop_of(step: StepGraph) -> Loop | None:
    """The loop over the micro-batches between the first and the last, if the step has one."""
    if not step.has_loop:
        return None
    begin, end = borders(step)
    return Loop(begin, end, num_rounds(step, 1))


def num_rounds(step: StepGraph, number: int) -> int:
    """The number of micro-batches that body ``number`` stands for."""
    return len(micro_batches_of(number, step.num_micro_batches))


def times_run(step: StepGraph) -> dict[fx.Node, int]:
    """The number of times that each call runs."""
    number, times = 0, {}
    for node in step.calls():
        number += node.target is ops.next_micro_batch
        times[node] = num_rounds(step, number)
    return times


def loop_bodies(step: StepGraph) -> dict[str, int]:
    """The number of the body that each call is in, by name; without a loop all calls are in body 0.

    What is started in one body and done in another must be so between every two: so nothing is, where there is a loop.
    """
    number, numbers = 0, {}
    for node in step.calls():
        number += step.has_loop and node.target is ops.next_micro_batch
        numbers[node.name] = number
    return numbers


def times_held(step: StepGraph, node: fx.Node) -> int:
    """The number of tensors that a placeholder stands for: one for each micro-batch of its body."""
    what = placeholder(node)
    return 1 if what.role is not Role.INPUT or what.part is None else num_rounds(step, what.part)
