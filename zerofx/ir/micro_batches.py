"""The micro-batches of a step graph: their borders, and the number of times that each runs.

A step of up to three micro-batches has a body for each. A step of more has three bodies too: the first micro-batch, one
for all in between, and the last. The one in between is a loop: it runs once for each micro-batch that it stands for,
and its end restores what it began with. ``ops.next_micro_batch`` separates two bodies, and reads the values that the
first passes to the second: the loop's begin and end pass the same values in the same order.

Micro-batches that run layer by layer (``StepGraph.by_layer``) have all of this once for each *stretch* of the graph,
the nodes of a layer in a row, rather than once for the step. Between two stretches ``next_micro_batch(0)`` leads back
to the first body. Every stretch has a loop of its own, whose round i has what round i of the others has made.

A stage of several that takes micro-batches by *turns* (1F1B, 1806.03377) runs backward of a micro-batch before the
forward of later ones. Each of its stretches has a *lag*: turn t runs a stretch on micro-batch t - lag, where there is
one (``turns``), and ``next_micro_batch(t)`` separates turns. The loop is over turns that are alike. What one hands
to one with a larger lag, rounds hand on (``passes/lib/turns.py``). Of a stage before the last, with 8 micro-batches:

    turn 0: forward(0)
    turn 1: forward(1), backward(0)
    turns 2 to 6, a loop: forward(t), backward(t - 1)
    turn 7: forward(7), backward(6)
    turn 8: backward(7)

Weight gradients may be a stretch of their own, the last, which fills the time until the next message (2401.10241). A
stage of several chunks has a stretch of forward and of backward for each: a later chunk's forward lags by as many turns
as there are stages, since a micro-batch comes back to the first stage then (interleaved, 2104.04473).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import Role, begun_stretch, placeholder
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


def micro_batches_of(body: int, num_micro_batches: int, num_before: int = 1) -> range:
    """The micro-batches that a body of a graph of so many stands for, where ``num_before`` come before the loop."""
    more = num_micro_batches - num_bodies(num_micro_batches, num_before)
    first = body + (more if body > num_before else 0)
    return range(first, first + 1 + (more if body == num_before else 0))


def forward_lag(chunk: int, num_stages: int) -> int:
    """The lag of a chunk's forward in its stage: a micro-batch comes to the next chunk once all stages have had it."""
    return chunk // num_stages * num_stages


def backward_lag(chunk: int, num_chunks: int, num_stages: int) -> int:
    """The lag of a chunk's backward in its stage: a turn for each later stage until the last chunk's forward is done,
    and for each later chunk of the stage as many as a micro-batch takes through the other stages."""
    later = (num_chunks - 1 - chunk) // num_stages
    return forward_lag(num_chunks - 1, num_stages) + num_stages - 1 - chunk % num_stages + later * (num_stages - 1)


def stretch_lags(step: StepGraph, num_micro_batches: int) -> tuple[int, ...]:
    """The lags of a stage's stretches where it takes micro-batches by turns; what is longer than there are is less."""
    assert step.pipe is not None, "turns are taken by stages"
    longer = max(0, step.pipe.num_after - num_micro_batches + 1) if len(step.pipe.chunks) == 1 else 0
    marks = [mark for node in step.calls() if (mark := begun_stretch(node)) is not None]
    return (0, *(mark - longer for mark in marks))


def turns(
    lags: Sequence[int],
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    is_last: bool = False,
    weights_apart: bool = False,
) -> Iterator[list[tuple[int, int]]]:
    """For each turn the stretches that run, in order, each with its micro-batch.

    They are forward of each chunk, backward of each, the last chunk first, waits, and weight gradients, if these are
    ``weights_apart``. Waits, which free what was sent, run before backward; the first of several chunks comes last,
    so that stages receive in the order in which others send. ``is_last``: a stage that has the last chunk, whose
    forward and backward are one stretch.
    """
    end = len(lags) - weights_apart
    backward = range(num_chunks, min(2 * num_chunks - is_last, end))
    forward = [*reversed(range(1, num_chunks))]
    order = [*forward, *reversed(range(backward.stop, end)), *backward]
    order = [*order, 0] if forward else [0, *order]
    order += range(end, len(lags))
    for turn in range(num_micro_batches + max(lags)):
        running = ((number, turn - lags[number]) for number in order)
        yield [(number, batch) for number, batch in running if batch in range(num_micro_batches)]


def stage_turns(step: StepGraph, num_micro_batches: int, num_runs: int) -> Iterator[list[tuple[int, int]]]:
    """The turns of a stage that takes ``num_micro_batches``, of which ``num_runs`` are written out."""
    assert step.pipe is not None, "turns are taken by stages"
    return turns(
        stretch_lags(step, num_micro_batches), num_runs, num_chunks=len(step.pipe.chunks),
        is_last=not step.pipe.num_after, weights_apart=step.pipe.weights_lag is not None,
    )  # fmt: skip


def borders(step: StepGraph) -> list[fx.Node]:
    """The nodes between two bodies, in order."""
    return sorted(step.graph.find_nodes(op="call_function", target=ops.next_micro_batch, sort=False))


def ends_of_backwards(step: StepGraph) -> list[fx.Node]:
    """The border, for each body, of the part of the step that has its backward, or the step's end."""
    lags = stretch_lags(step, step.num_micro_batches) if step.takes_turns else ()
    # Of a stage's last chunk backward is in forward's stretch.
    lag = lags[1] if step.pipe is not None and len(lags) > 1 and step.pipe.num_after else 0
    return [*borders(step), step.output][lag : lag + step.num_bodies]


def hand_on(border: fx.Node, value: fx.Node) -> None:
    """Pass ``value`` to the next body, too. Call it for each border in the same order."""
    number, carried = border.args
    assert isinstance(carried, list | tuple)
    border.args = (number, [*carried, value])


def loops_of(step: StepGraph) -> tuple[Loop, ...]:
    """The loops over the micro-batches between the first and the last, in order: none, one, or one a stretch."""
    if not step.has_loop:
        return ()
    ends = [node for node in borders(step) if body_after(node) in (step.num_before, step.num_before + 1)]
    rounds = num_rounds(step, step.num_before)
    return tuple(Loop(begin, end, rounds) for begin, end in zip(ends[::2], ends[1::2], strict=True))


def loop_numbers(loops: Sequence[Loop]) -> dict[fx.Node, int]:
    """The number of the loop that each call of a round is in; calls outside of all loops are left out."""
    return {node: number for number, loop in enumerate(loops) for node in loop.body()}


def num_rounds(step: StepGraph, number: int) -> int:
    """The number of micro-batches that body ``number`` stands for, or of turns."""
    return len(micro_batches_of(number, step.num_micro_batches, step.num_before))


def body_after(border: fx.Node) -> int:
    """The number of the body that begins after a border."""
    number = border.args[0]
    assert isinstance(number, int)
    return number


def calls_by_body(step: StepGraph) -> Iterator[tuple[fx.Node, int]]:
    """All calls in order, each with the number of its body, or turn; a border is in the one that it begins."""
    number = 0
    for node in step.calls():
        number = body_after(node) if node.target is ops.next_micro_batch else number
        yield node, number


def times_run(step: StepGraph) -> dict[fx.Node, int]:
    """The number of times that each call runs."""
    return {node: num_rounds(step, number) for node, number in calls_by_body(step)}


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
