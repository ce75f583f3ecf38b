"""Keep what one stage of a step runs, and have it send and receive what crosses its borders.

    h = relu(mm(x, w0)); y = mm(h, w1); loss = sum(y)        # stage 0 of two, cut at y
    gh = mm(gy, t(w1)); gw1 = mm(t(h), gy)                   h = relu(mm(x, w0)); to = send_value(h, 1)
    gw0 = mm(t(x), relu_backward(gh, h))                     loss = wait(receive_value(1, [], []))
    return loss, gw0, gw1                              ->    wait(to, h)
                                                             gh = wait(receive_value(1, [4, 8], [8, 1]))
                                                             gw0 = mm(t(x), relu_backward(gh, h))
                                                             return loss, gw0

Every rank captures the whole step, and has one stage of it from then on: a step with its own parameters, which other
passes shard, gather and update as those of any step. Where a stage's nodes are is said by
``scheduler/analysis/stages_of_nodes.py``.

Between two stages values arrive in the order in which they are sent. Nothing waits for what it sends to have arrived
but where that is known to be so (a forward value, once the loss is there), or where the stage is done: whatever a stage
waits for comes from one that does not wait for it, so that no order of stages stands still. Where stages take turns
(``zerofx/ir/micro_batches.py``) what is sent to the stage before is waited for a turn later, when that has come to its
backward, to the one before that two turns later, and so on. The runs of nodes that micro-batches go through are marked:
forward, backward, and these waits. Of the last stage forward and backward are one run. Where weight gradients come some
turns later, what no message depends on is a run of its own, the last.

What a step or an evaluation gives, each value of it, goes to all stages, when its forward is over.

Random operators of other stages draw here, too, for nothing: the generators go on as those of one process would.

Does not handle: steps that change buffers in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from zerofx.errors import UsageError
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_bytes
from zerofx.ir.edit import consumers, insert_call, skip_getitems, view_again
from zerofx.ir.facts import (
    Origin,
    Phase,
    Role,
    is_random,
    origin,
    placeholder,
    set_begun_stretch,
    set_message_number,
    set_origin,
    set_value,
    tensor,
    value,
)
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.draws_ahead import draw_for_nothing
from zerofx.scheduler.analysis.stages_of_nodes import (
    EVERYWHERE,
    Message,
    StageMap,
    own_source,
    sources,
    stages_of_nodes,
    weight_gradients,
)
from zerofx.scheduler.plan.mesh import PIPE

_aten = torch.ops.aten
_OVER = dict(axes_argument(PIPE))


@dataclass(frozen=True)
class Stages:
    """Keep what one stage runs, and have it send and receive what crosses its borders."""

    pipe: PipeStage
    name: str = "stages"

    def run(self, step: StepGraph) -> None:
        keep_stage(step, self.pipe)


def keep_stage(step: StepGraph, pipe: PipeStage) -> None:
    """Keep the part of a captured micro-batch that a stage runs, in place.

    Raises:
        UsageError: the step cannot run in stages; says why.
    """
    check_stages(step)
    where, stage = stages_of_nodes(step, pipe.cuts), pipe.number
    step.pipe = replace(pipe, buffers=tuple(where.changed.items()))
    calls, order = list(step.calls()), step.positions()
    loss, gradients = own_source(step.loss), dict(step.gradients)
    first_backward = next((node for node in calls if order[node] >= where.backward), step.output)
    arrived = _receive(step, where, stage, first_backward, order)
    waits = _send(step, where, stage, calls[0], arrived.get(loss) if gradients else None)
    remade = dict(arrived)
    for reader in [*(node for node in calls if where.homes.get(node) == stage), step.output]:
        for source in list(reader.all_input_nodes):
            if own_source(source) in arrived:
                with step.graph.inserting_before(reader):
                    reader.replace_input_with(source, view_again(step.graph, source, remade))
    own = {placeholder(node).name for node in step.placeholders(Role.PARAMETER) if where.homes[node] == stage}
    mutations = {name: node for name, node in step.mutations.items() if where.changed.get(name, stage) == stage}
    step.set_outputs(step.loss, mutations, {name: node for name, node in gradients.items() if name in own})
    if gradients:
        _copy_for_backward(step, mutations, calls[0], first_backward, order)
    _drop_others(step, where, calls, stage)
    if gradients:
        _divide_convolutions(step)
        _mark_stretches(step, pipe, arrived.get(loss), waits)
    step.parameters = tuple(info for info in step.parameters if info.name in own)


def end_forward(step: StepGraph) -> None:
    """Compute the step's results before backward begins, in place: ranks of the model axis put theirs together last."""
    order = step.positions()
    first = next((node for node in step.calls() if origin(node).phase is Phase.BACKWARD), step.output)
    late, pending = set[fx.Node](), [step.loss, *step.extras]
    while pending:
        node = pending.pop()
        if order[node] > order[first] and node not in late:
            late.add(node)
            pending.extend(node.all_input_nodes)
    for node in sorted(late, key=order.__getitem__):
        first.prepend(node)
        set_origin(node, replace(origin(node), phase=Phase.FORWARD))


def check_stages(step: StepGraph) -> None:
    """Check that a captured step can run in stages.

    Raises:
        UsageError: it changes buffers in backward.
    """
    for name in buffers_of_backward(step):
        raise UsageError(
            f"expected a model that changes buffers in its forward alone where the mesh has an axis 'pipe', found "
            f"that backward changes {name}: leave the axis 'pipe' out of the mesh"
        )


def buffers_of_backward(step: StepGraph) -> list[str]:
    """The buffers that the backward of a captured step changes; what forward does to them are results of the step."""
    buffers = step.placeholders(Role.BUFFER)
    return [placeholder(node).name for node in buffers if any(node in mutated_inputs(user) for user in node.users)]


def _copy_for_backward(
    step: StepGraph,
    mutations: Mapping[str, fx.Node],
    first: fx.Node,
    first_backward: fx.Node,
    order: Mapping[fx.Node, int],
) -> None:
    """Have backward read copies of buffers that the forwards of later micro-batches change."""
    for buffer in step.placeholders(Role.BUFFER):
        late = [node for node in consumers(buffer) if order.get(node, -1) >= order[first_backward]]
        if placeholder(buffer).name not in mutations or not late:
            continue
        with step.graph.inserting_before(first):
            copy = insert_call(step.graph, _aten.clone.default, (buffer,), Origin("", Phase.FORWARD))
        for reader in late:
            for source in list(reader.all_input_nodes):
                if own_source(source) is buffer:
                    with step.graph.inserting_before(reader):
                        reader.replace_input_with(source, view_again(step.graph, source, {buffer: copy}))


def _receive(
    step: StepGraph, where: StageMap, stage: int, first_backward: fx.Node, order: Mapping[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """Receive other stages' values, each before its first reader, and before what the same stage sends after it is;
    returns what is in their places."""
    readers: dict[fx.Node, fx.Node] = {}
    for node in step.calls():
        if where.homes.get(node) == stage:
            for source in _all_sources(where, node):
                readers.setdefault(source, node)
    arrived: dict[fx.Node, fx.Node] = {}
    places: dict[int, fx.Node] = {}
    is_loss = own_source(step.loss)
    chosen: list[tuple[Message, fx.Node]] = []
    for message in reversed(where.messages_to(stage)):
        reader = readers.get(message.value, first_backward)
        if message.value is is_loss:
            reader = min(reader, first_backward, key=order.__getitem__)
        if message.sender < stage:
            reader = min(reader, first_backward, key=order.__getitem__)
        elif message.sender > stage:
            reader = max(reader, first_backward, key=order.__getitem__)
        reader = min(reader, places.get(message.sender, reader), key=order.__getitem__)
        places[message.sender] = reader
        chosen.append((message, reader))
    chosen.reverse()
    # What earlier stages send ends the forward, before what later ones do.
    for message, reader in sorted(chosen, key=lambda each: each[0].sender > stage):
        value = message.value
        like, at = tensor(value), origin(reader if reader.op == "call_function" else value)
        phase = Phase.BACKWARD if message.sender > stage and step.gradients else Phase.FORWARD
        args = (message.sender, list(like.shape), list(like.stride()), like.dtype)
        how = {"device": like.device, **_OVER}
        with step.graph.inserting_before(reader):
            at = Origin(at.layer, phase)
            pending = insert_call(step.graph, ops.receive_value, args, at, how, name=f"receive_{value.name}", fake=like)
            set_message_number(pending, where.messages.index(message))
            arrived[value] = insert_call(step.graph, ops.wait, (pending,), at, name=f"received_{value.name}")
    return arrived


def _all_sources(where: StageMap, node: fx.Node) -> list[fx.Node]:
    """The values that a node reads, itself or through what is computed wherever it is read."""
    values, pending, seen = list[fx.Node](), list(sources(node)), set[fx.Node]()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        values.append(source)
        if where.homes[source] == EVERYWHERE:
            pending.extend(sources(source))
    return values


def _send(
    step: StepGraph, where: StageMap, stage: int, first: fx.Node, loss: fx.Node | None
) -> list[tuple[Message, fx.Node]]:
    """Start to send what other stages read, as soon as it is there; returns the waits, which stand where the step ends.

    A parameter is copied first: what is gathered for its readers here goes before it has arrived. A result goes to
    earlier stages once the ``loss`` is there, if that comes from another: in the order of what backward sends there.
    """
    started: list[tuple[Message, fx.Node, fx.Node]] = []
    copies: dict[fx.Node, fx.Node] = {}
    for number, message in enumerate(where.messages):
        if message.sender != stage:
            continue
        value = message.value
        if value not in copies:
            copies[value], place = value, first
            if value.op == "call_function":
                place = skip_getitems(value).next
            if value.op == "placeholder" or not _is_dense(value):
                where_copied = Origin(origin(value).layer, Phase.FORWARD)
                with step.graph.inserting_before(place):
                    copies[value] = insert_call(step.graph, _aten.clone.default, (value,), where_copied)
        sent = copies[value]
        place = sent.next if sent is not value else skip_getitems(value).next
        if loss is not None and message.receiver < stage and value in where.results:
            place = loss.next
        while place.target is ops.send_value:
            place = place.next
        with step.graph.inserting_before(place):
            name = f"send_{value.name}_{message.receiver}"
            args = (sent, message.receiver)
            pending = insert_call(step.graph, ops.send_value, args, origin(sent), dict(_OVER), name=name)
            set_message_number(pending, number)
        started.append((message, pending, sent))
    waits = []
    with step.graph.inserting_before(step.output):
        for message, pending, sent in started:
            wait = insert_call(step.graph, ops.wait, (pending, sent), origin(sent), name=f"sent_{pending.name}")
            waits.append((message, wait))
    return waits


def _is_dense(node: fx.Node) -> bool:
    """True if a value fills its memory, which is sent as it lies."""
    like = tensor(node)
    return storage_bytes(like) == like.numel() * like.element_size()


def _drop_others(step: StepGraph, where: StageMap, calls: list[fx.Node], stage: int) -> None:
    """Erase what is not of the stage, and what only that reads."""
    for node in reversed(calls):
        place = where.homes.get(node)
        if place not in (None, EVERYWHERE, stage) and is_random(node):
            draw_for_nothing(step, node)
        if place != stage and not node.users:
            step.graph.erase_node(node)
    for node in list(step.placeholders(Role.PARAMETER)):
        if where.homes[node] != stage:
            step.graph.erase_node(node)


def _divide_convolutions(step: StepGraph) -> None:
    """Compute a convolution's weight gradients after its input's gradient, in a call of their own: ATen computes them
    one after the other in any case, and nothing that is sent waits for weight gradients then."""
    for node in list(step.graph.find_nodes(op="call_function", target=_aten.convolution_backward.default)):
        mask, (of_input, *of_weights) = list(node.args[-1]), value(node)
        if not mask[0] or not any(mask[1:]):
            continue
        end = skip_getitems(node)
        with step.graph.inserting_after(end):
            args, fake = (*node.args[:-1], [False, *mask[1:]]), (None, *of_weights)
            weights = insert_call(step.graph, node.target, args, origin(node), name=f"{node.name}_weights", fake=fake)
        set_value(node, (of_input, None, None)).args = (*node.args[:-1], [True, False, False])
        for name in [user for user in node.users if user.args[1]]:
            name.replace_input_with(node, weights)
            weights.append(name)


def _comes_back(node: fx.Node, stage: int) -> bool:
    """True for what receives a value of a later stage."""
    sender = node.args[0] if node.target is ops.receive_value else None
    return isinstance(sender, int) and sender > stage


def _mark_stretches(
    step: StepGraph,
    pipe: PipeStage,
    loss: fx.Node | None,
    waits: list[tuple[Message, fx.Node]],
) -> None:
    """Mark where runs of nodes begin, and put the waits for what later stages have by then after the loss.

    Waits for what earlier stages are sent come as many turns later as those are further away, the nearest first.
    """
    later = [wait for message, wait in waits if message.receiver > pipe.number]
    earlier = {wait: pipe.number - message.receiver for message, wait in waits if message.receiver < pipe.number}
    if loss is not None:
        for wait in reversed(later):
            loss.append(wait)
        set_begun_stretch(next(node for node in step.calls() if _comes_back(node, pipe.number)), pipe.num_after)
    begun = set[int]()
    for wait, distance in sorted(earlier.items(), key=lambda each: each[1]):
        step.output.prepend(wait)
        if distance not in begun:
            set_begun_stretch(wait, pipe.num_after + distance)
            begun.add(distance)
    if pipe.weights_lag is not None:
        apart = weight_gradients(step)
        for node in apart:
            step.output.prepend(node)
        set_begun_stretch(apart[0], pipe.num_after + pipe.weights_lag)
