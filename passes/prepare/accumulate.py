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

``by_layer``: the copies of a layer stand next to it, so that all micro-batches have run through it before the next
layer begins (2512.17570 calls that vertical): weights come once a step, and what is handed from layer to layer is held
for all micro-batches. Sums are the same, in the same order:

    y = layer0(x)                           y = layer0(x_0); next_micro_batch(1, []); micro1_y = layer0(x_1)
                                            next_micro_batch(0, [])
    z = layer1(y)                           z = layer1(y); next_micro_batch(1, []); micro1_z = layer1(micro1_y)

Layers between which a buffer is changed and read are one stretch there.

Like ``simplify`` it runs before the plan is made, which names the nodes of the graph it leaves.

Of a step that is one stage of several (``stages.py``), what all micro-batches run through before the next are the runs
that are marked there, whatever layers are in them. Or a stage takes turns, forward ahead of backward, and bodies stand
in the order in which they run (``zerofx/ir/micro_batches.py``):

    y = forward(x_0); next_micro_batch(1, []); micro1_y = forward(x_1); gw = backward(y); next_micro_batch(2, [])
    micro2_y = forward(x_2); micro1_gw = backward(micro1_y); next_micro_batch(3, []); micro2_gw = backward(micro2_y)

Random operators of a layer then draw from a state of their micro-batch's own, so that all draw what they would one by
one (``passes/lib/draws_ahead.py``).

Does not handle: micro-batches of unequal size; layer by layer, random operators whose draws depend on values
(``find_unforeseen_draw`` finds one).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view, storage_source
from zerofx.ir.edit import consumers, insert_call, skip_getitems
from zerofx.ir.facts import (
    Origin,
    Phase,
    Role,
    begun_stretch,
    is_random,
    origin,
    placeholder,
    set_placeholder,
    set_twin,
    set_value,
    slice_of,
    tensor,
)
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import backward_lag, stage_turns, stretch_lags
from zerofx.passes.lib.draws_ahead import draw_ahead, mark_draws
from zerofx.passes.lib.turns import hand_on_values
from zerofx.scheduler.analysis.saved_values import value_node


@dataclass(frozen=True)
class Accumulate:
    """Run a step on micro-batches, one after the other. ``divided`` names the batch tensors that are divided."""

    num_micro_batches: int = 1
    divided: frozenset[str] = frozenset()
    by_layer: bool = False
    name: str = "accumulate"

    def run(self, step: StepGraph) -> None:
        accumulate(step, self.num_micro_batches, self.divided, by_layer=self.by_layer)


def accumulate(step: StepGraph, num_micro_batches: int, divided: Collection[str], *, by_layer: bool = False) -> None:
    """Unroll ``step``, the graph of one micro-batch, in place; ``divided`` names the batch tensors that are divided."""
    if num_micro_batches == 1:
        return
    step.num_micro_batches, step.by_layer = num_micro_batches, by_layer
    if step.takes_turns:
        _copy_extras(step)
    calls, mutations = list(step.calls()), step.mutations
    lags = stretch_lags(step, num_micro_batches) if step.takes_turns else ()
    if step.pipe is not None and lags:
        weights = 0 if step.pipe.weights_lag is None else lags[-1]
        chunk, num_chunks = step.pipe.number, len(step.pipe.cuts) + 1
        longest = backward_lag(chunk, num_chunks, step.pipe.num_stages)
        step.num_before = max(*lags, 1 + weights, 1 + min(longest, num_micro_batches - 1))
    inputs = [node for node in step.placeholders(Role.INPUT) if placeholder(node).name in divided]
    buffers = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}
    for node in inputs:
        set_placeholder(node, replace(placeholder(node), part=0))
    bodies = [{node: node for node in (*step.placeholders(), *calls)}]
    for number in range(1, step.num_bodies):
        bodies.append({node: node for node in step.placeholders()})
        bodies[number] |= {node: _part_of(step, node, number) for node in inputs}
    if lags:
        total = _take_turns(step, _stretches(step, calls, ()), bodies, inputs)
    else:
        total = _run_stretches(step, calls, bodies, buffers)
    step.set_outputs(
        total,
        {name: bodies[-1][node] for name, node in mutations.items()},
        *[{name: copies[node] for name, node in step.gradients.items()} for copies in bodies],
        extras=[copies[node] for copies in bodies for node in step.extras],
    )


def _copy_extras(step: StepGraph) -> None:
    """Hand out copies of what later runs of nodes read, too, which turns hand on."""
    runs = _stretches(step, list(step.calls()), ())
    run_of = {node: number for number, nodes in enumerate(runs) for node in nodes}
    extras = list(step.extras)
    for number, node in enumerate(extras):
        own = value_node(storage_source(node))
        if any(run_of.get(reader, 0) > run_of[own] for reader in consumers(own)):
            with step.graph.inserting_after(skip_getitems(node)):
                extras[number] = insert_call(step.graph, torch.ops.aten.clone.default, (node,), origin(node))
    step.set_outputs(step.loss, step.mutations, *step.gradients_by_body, extras=extras)


def _run_stretches(
    step: StepGraph, calls: Sequence[fx.Node], bodies: Sequence[dict[fx.Node, fx.Node]], buffers: Mapping[str, fx.Node]
) -> fx.Node:
    """Fill in all bodies of a stretch before those of the next; returns the sum of losses."""
    by_layer, mutations = step.by_layer, step.mutations
    total, loss = step.loss, step.loss
    # An extra stays what it is, while what a loop's round is given becomes what the round leaves.
    given_back = {value_node(storage_source(node)) for node in step.extras}
    draws = list(filter(is_random, calls)) if by_layer else []
    if draws:
        draw_ahead(step, draws, calls[0], lambda before, number: _begin(step, before, number))
    stretches = _stretches(step, calls, [(buffers[name], node) for name, node in mutations.items()])
    for nodes, following in itertools.zip_longest(stretches, [later[0] for later in stretches[1:]]):
        end, within = following or step.output, set(nodes)
        if nodes is not stretches[0]:
            _begin(step, nodes[0], 0)
        draws_here = not within.isdisjoint(draws)
        if draws_here:
            mark_draws(step, nodes[0], ops.take_draws)
        changed = [name for name in mutations if not by_layer or mutations[name] in within]
        latest = {name: mutations[name] for name in changed}
        for number, copies in enumerate(bodies[1:], 1):
            # Layer by layer, its own backward reads what a micro-batch hands on, when others have run: it has a copy.
            own = {bodies[number - 1][node] for node in nodes if node not in given_back and not by_layer}
            handed_on = [name for name in changed if buffers[name].users] if step.has_loop else []
            latest |= {name: _own_value(step, latest[name], own, end) for name in handed_on}
            if loss in within and by_layer and step.has_loop:
                total = _own_value(step, total, (), end)
            carried = [*([total] if loss in within else []), *(latest[name] for name in handed_on)]
            if draws_here:
                mark_draws(step, end, ops.keep_draws, False)
            _begin(step, end, number, carried if step.has_loop else ())
            if draws_here:
                mark_draws(step, end, ops.take_draws)
            copies |= {buffers[name]: node for name, node in latest.items()}
            for node in nodes:
                copies[node] = _copy(step, node, copies, number, end)
            if loss in within:
                total = _sum(step, total, copies[loss])
            latest = {name: copies[mutations[name]] for name in changed}
        if draws_here:
            mark_draws(step, end, ops.keep_draws, False)
    return total


def _take_turns(
    step: StepGraph,
    stretches: Sequence[Sequence[fx.Node]],
    bodies: Sequence[dict[fx.Node, fx.Node]],
    inputs: Sequence[fx.Node],
) -> fx.Node:
    """Fill in all bodies turn by turn (``zerofx/ir/micro_batches.py``); returns the sum of losses.

    What rounds of the loop read of earlier turns they hand on (``passes/lib/turns.py``).
    """
    buffers = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}
    mutations, total, end = step.mutations, step.loss, step.output
    latest, handed_on = dict(mutations), [name for name in mutations if buffers[name].users]
    run_of = {node: number for number, nodes in enumerate(stretches) for node in nodes}
    for turn, running in enumerate(stage_turns(step, step.num_micro_batches, step.num_bodies)):
        if turn:
            carried = list[fx.Node]()
            if step.has_loop and turn - step.num_before in (0, 1):
                latest |= {name: _own_value(step, latest[name], (), end) for name in handed_on}
                total = _own_value(step, total, (), end)
                carried = [total, *(latest[name] for name in handed_on)]
            _begin(step, end, turn, carried)
        for number, body in running:
            copies = bodies[body]
            if not body:
                for node in stretches[number]:
                    end.prepend(node)
                continue
            changed = [name for name, node in mutations.items() if run_of.get(node, 0) == number]
            copies |= {buffers[name]: latest[name] for name in changed}
            for node in stretches[number]:
                copies[node] = _copy(step, node, copies, body, end)
            if number == run_of[step.loss]:
                total = _sum(step, total, copies[step.loss])
            latest |= {name: copies[mutations[name]] for name in changed}
    for number, copies in enumerate(bodies):
        for node in (*inputs, *itertools.chain.from_iterable(stretches)):
            set_twin(copies[node], (node.name, number))
    hand_on_values(step)
    return total


def _stretches(
    step: StepGraph, calls: Sequence[fx.Node], changes: Sequence[tuple[fx.Node, fx.Node]]
) -> list[list[fx.Node]]:
    """The calls in runs of a layer, or of a slice of a weight; ``changes`` are buffers with their next values.

    What reads a buffer and what changes it are in one run. All calls are one where micro-batches run one by one.
    """
    if step.pipe is not None:
        starts = [number for number, node in enumerate(calls) if begun_stretch(node) is not None]
        return [list(calls[start:end]) for start, end in itertools.pairwise([0, *starts, len(calls)])]
    if not step.by_layer:
        return [list(calls)]
    starts, here = [0], None
    for position, node in enumerate(calls):
        if is_view(node):
            continue
        place = step.unit_of(node), slice_of(node)
        if here not in (None, place):
            starts.append(position)
        here = place
    order = {node: position for position, node in enumerate(calls)}
    for buffer, changed in changes:
        # A buffer that takes another's place is changed by no call: nothing may stand between micro-batches.
        spans = [order.get(node, end) for node in (*buffer.users, changed) for end in (0, len(calls))]
        starts = [start for start in starts if not min(spans) < start <= max(spans)]
    return [list(calls[start:end]) for start, end in itertools.pairwise([*starts, len(calls)])]


def _own_value(step: StepGraph, node: fx.Node, own: Collection[fx.Node], before: fx.Node) -> fx.Node:
    """A value that a micro-batch leaves a buffer with, as one of what that micro-batch alone has, its ``own``.

    It may hand on what it was given, where two buffers change places, say, or what the step gives back, an extra.
    """
    if value_node(storage_source(node)) in own:
        return node
    with step.graph.inserting_before(before):
        return insert_call(step.graph, torch.ops.aten.clone.default, (node,), Origin("", Phase.FORWARD))


def _begin(step: StepGraph, before: fx.Node, number: int, carried: Iterable[fx.Node] = ()) -> None:
    """Insert what stands between two bodies, the second of which ``carried`` is handed on to."""
    # Views are made again where they are read.
    owners = [value_node(storage_source(node)) for node in carried]
    with step.graph.inserting_before(before):
        args = (number, owners)
        insert_call(step.graph, ops.next_micro_batch, args, Origin("", Phase.FORWARD), name=f"micro_batch_{number}")


def _part_of(step: StepGraph, first: fx.Node, number: int) -> fx.Node:
    """The placeholder of a divided tensor's part for a further micro-batch."""
    what = replace(placeholder(first), part=number)
    node = step.add_placeholder(_name(first, number), what, (), tensor(first).dtype)
    return set_value(node, tensor(first))  # with the strides of the batch


def _copy(step: StepGraph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], number: int, before: fx.Node) -> fx.Node:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
    if node.target is ops.keep_draws:
        args = (False,)  # the first is that of the first micro-batch
    with step.graph.inserting_before(before):
        copy = step.graph.create_node("call_function", node.target, tuple(args), kwargs, name=_name(node, number))
    copy.meta = dict(node.meta)
    return copy


def _name(node: fx.Node, number: int) -> str:
    return f"micro{number}_{node.name}"


def _sum(step: StepGraph, total: fx.Node, loss: fx.Node) -> fx.Node:
    """The sum of the losses so far and one more, made where that is."""
    with step.graph.inserting_after(loss):
        return insert_call(step.graph, torch.ops.aten.add.Tensor, (total, loss), origin(loss))
