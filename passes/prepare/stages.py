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

A stage may have several chunks of the model, each as far from the next as there are stages (2104.04473): a run of
forward for each, then one of backward for each, the last chunk's first. Where all micro-batches go through a chunk
before the next (``PipeStage.by_chunk``), what a chunk sends has arrived once a later run of its stage has what follows
from it, and is waited for there.

What a step or an evaluation gives, each value of it, goes to all stages, when its forward is over.

Random operators of other stages draw here, too, for nothing: the generators go on as those of one process would. So do
those of a later chunk, which draws again when its turn comes, from the states that were kept; chunk by chunk a run
draws all that comes before the stage's next one.

Does not handle: steps that change buffers in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
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
    chunk_of,
    is_random,
    origin,
    placeholder,
    set_begun_stretch,
    set_chunk,
    set_message_number,
    set_origin,
    set_value,
    tensor,
    value,
)
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.ir.micro_batches import backward_lag, forward_lag
from zerofx.ir.streams import axes_argument
from zerofx.passes.lib.draws_ahead import draw_for_nothing, mark_draws
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
    where, own = stages_of_nodes(step, pipe.cuts, pipe.num_stages), pipe.chunks
    changed = {name: chunk % pipe.num_stages for name, chunk in where.changed.items()}
    step.pipe = replace(pipe, buffers=tuple(changed.items()))
    calls, order = list(step.calls()), step.positions()
    for node in calls:
        set_chunk(node, chunk if (chunk := where.homes.get(node)) in own else None)
    loss, gradients = own_source(step.loss), dict(step.gradients)
    first_backward = next((node for node in calls if order[node] >= where.backward), step.output)
    arrived = _receive(step, where, own, first_backward, order)
    waits = _send(step, where, own, calls[0], arrived.get(loss) if gradients else None)
    remade = dict(arrived)
    for reader in [*(node for node in calls if chunk_of(node) is not None), step.output]:
        for source in list(reader.all_input_nodes):
            if own_source(source) in arrived:
                with step.graph.inserting_before(reader):
                    reader.replace_input_with(source, view_again(step.graph, source, remade))
    names = {placeholder(node).name for node in step.placeholders(Role.PARAMETER) if where.homes[node] in own}
    mutations = {name: node for name, node in step.mutations.items() if where.changed.get(name, own[0]) in own}
    step.set_outputs(step.loss, mutations, {name: node for name, node in gradients.items() if name in names})
    if gradients:
        first_of = {chunk: next(node for node in calls if chunk_of(node) == chunk) for chunk in own[1:]}
        places = {name: where.changed.get(name, own[0]) for name in mutations}
        _copy_for_backward(step, places, {own[0]: calls[0], **first_of}, first_backward, order)
    _drop_others(step, where, calls, pipe)
    if gradients:
        _divide_convolutions(step)
        for chunk in own[1:] if not pipe.by_chunk else ():
            _draw_in_order(step, chunk)
        apart = weight_gradients(step) if pipe.weights_lag is not None else []
        runs = _sort_runs(step, own, len(pipe.cuts), {*apart, *(wait for _, wait in waits)}) if len(own) > 1 else {}
        _mark_stretches(step, pipe, runs, own_source(step.loss), waits)
    step.parameters = tuple(info for info in step.parameters if info.name in names)


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
    places: Mapping[str, int],
    first_of: Mapping[int, fx.Node],
    first_backward: fx.Node,
    order: Mapping[fx.Node, int],
) -> None:
    """Have backward read copies of buffers that the forwards of later micro-batches change: each in its chunk of
    ``places``, where that begins (``first_of``)."""
    for buffer in step.placeholders(Role.BUFFER):
        late = [node for node in consumers(buffer) if order.get(node, -1) >= order[first_backward]]
        chunk = places.get(placeholder(buffer).name)
        if chunk is None or not late:
            continue
        with step.graph.inserting_before(first_of[chunk]):
            copy = insert_call(step.graph, _aten.clone.default, (buffer,), Origin("", Phase.FORWARD))
        set_chunk(copy, chunk)
        for reader in late:
            for source in list(reader.all_input_nodes):
                if own_source(source) is buffer:
                    with step.graph.inserting_before(reader):
                        reader.replace_input_with(source, view_again(step.graph, source, {buffer: copy}))


def _receive(
    step: StepGraph, where: StageMap, own: range, first_backward: fx.Node, order: Mapping[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """Receive other stages' values, each before its first reader, and before what the same chunk sends after it is;
    returns what is in their places. What another chunk of the stage reads first is awaited there."""
    readers: dict[fx.Node, fx.Node] = {}
    begins: dict[tuple[int | None, bool], fx.Node] = {}
    for node in step.calls():
        if chunk_of(node) is not None:
            begins.setdefault((chunk_of(node), order[node] >= order[first_backward]), node)
            for source in _all_sources(where, node):
                readers.setdefault(source, node)
    arrived: dict[fx.Node, fx.Node] = {}
    places: dict[tuple[int, int], fx.Node] = {}
    is_loss = own_source(step.loss)
    chosen: list[tuple[Message, fx.Node, fx.Node | None]] = []
    for message in reversed(where.messages_to(own)):
        reader, later = readers.get(message.value, first_backward), None
        if message.value is is_loss:
            reader = min(reader, first_backward, key=order.__getitem__)
        if len(own) > 1 and (chunk_of(reader), order[reader] >= order[first_backward]) != message.run:
            later = readers.get(message.value)
            reader = begins.get(message.run, first_backward)
        elif message.is_back:
            reader = max(reader, first_backward, key=order.__getitem__)
        else:
            reader = min(reader, first_backward, key=order.__getitem__)
        between = message.sender, message.receiver
        reader = min(reader, places.get(between, reader), key=order.__getitem__)
        places[between] = reader
        chosen.append((message, reader, later))
    chosen.reverse()
    # What earlier stages send ends the forward, before what later ones do.
    for message, reader, later in sorted(chosen, key=lambda each: each[0].is_back):
        value = message.value
        like, at = tensor(value), origin(reader if reader.op == "call_function" else value)
        phase = Phase.BACKWARD if message.is_back and step.gradients else Phase.FORWARD
        args = (message.sender % own.step, list(like.shape), list(like.stride()), like.dtype)
        how = {"device": like.device, **_OVER}
        with step.graph.inserting_before(reader):
            at = Origin(at.layer, phase)
            pending = insert_call(step.graph, ops.receive_value, args, at, how, name=f"receive_{value.name}", fake=like)
            set_message_number(pending, where.messages.index(message))
        with step.graph.inserting_before(later or reader):
            at = at if later is None else origin(later)
            arrived[value] = insert_call(step.graph, ops.wait, (pending,), at, name=f"received_{value.name}")
        set_chunk(pending, message.receiver)
        set_chunk(arrived[value], message.receiver if later is None else chunk_of(later))
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
    step: StepGraph, where: StageMap, own: range, first: fx.Node, loss: fx.Node | None
) -> list[tuple[Message, fx.Node]]:
    """Start to send what other stages read, as soon as it is there; returns the waits, which stand where the step ends.

    A parameter is copied first: what is gathered for its readers here goes before it has arrived. A result goes to
    earlier stages once the ``loss`` is there, if that comes from another: in the order of what backward sends there.
    """
    started: list[tuple[Message, fx.Node, fx.Node]] = []
    copies: dict[fx.Node, fx.Node] = {}
    for number, message in enumerate(where.messages):
        if message.sender not in own:
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
        if loss is not None and message.is_back and value in where.results:
            place = loss.next
        while place.target is ops.send_value:
            place = place.next
        with step.graph.inserting_before(place):
            receiver = message.receiver % own.step
            name = f"send_{value.name}_{receiver}"
            pending = insert_call(step.graph, ops.send_value, (sent, receiver), origin(sent), dict(_OVER), name=name)
            set_message_number(pending, number)
        for node in (sent, pending):
            set_chunk(node, message.sender)
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


def _drop_others(step: StepGraph, where: StageMap, calls: list[fx.Node], pipe: PipeStage) -> None:
    """Erase what is not of the stage, and what only that reads."""
    own = pipe.chunks
    for node in reversed(calls):
        place = where.homes.get(node)
        if place is not None and place not in (EVERYWHERE, *own) and is_random(node):
            for drawn in draw_for_nothing(step, node):
                set_chunk(drawn, _last_before(own, place, origin(node).phase) if pipe.by_chunk else None)
        if place not in own and not node.users:
            step.graph.erase_node(node)
    for node in list(step.placeholders(Role.PARAMETER)):
        if where.homes[node] not in own:
            step.graph.erase_node(node)


def _last_before(own: range, chunk: int, phase: Phase) -> int:
    """The last chunk of a stage that a micro-batch has come to before it comes to another stage's ``chunk``."""
    if phase is Phase.BACKWARD:
        return min((each for each in own if each > chunk), default=own[-1])
    return max((each for each in own if each < chunk), default=own[0])


def _draw_in_order(step: StepGraph, chunk: int) -> None:
    """Have a later chunk of the stage draw what it would in its place: the first chunk's run draws that for nothing,
    for the generators to go on, and keeps the states from which the later run draws."""
    draws = [node for node in step.calls() if chunk_of(node) == chunk and is_random(node)]
    if not draws:
        return
    mark_draws(step, draws[0], ops.keep_draws, True)
    for node in draws:
        draw_for_nothing(step, node)
    set_chunk(mark_draws(step, draws[0], ops.swap_draws), chunk)
    set_chunk(mark_draws(step, skip_getitems(draws[-1]).next, ops.take_draws), chunk)


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
        set_chunk(weights, chunk_of(node))
        set_value(node, (of_input, None, None)).args = (*node.args[:-1], [True, False, False])
        for name in [user for user in node.users if user.args[1]]:
            name.replace_input_with(node, weights)
            weights.append(name)


def _sort_runs(step: StepGraph, own: range, last: int, others: Collection[fx.Node]) -> dict[int, fx.Node]:
    """Put the nodes of each run together, but for ``others``: forward of each chunk, then backward of each, the last
    first. Returns the first nodes of all runs but the first, by their lags.

    What no chunk has, as it is computed wherever it is read, is of the first run that reads it.
    """
    runs: dict[fx.Node, tuple[int, int]] = {}
    calls = [node for node in step.calls() if node not in others]
    for node in calls:
        chunk, is_late = chunk_of(node), origin(node).phase is Phase.BACKWARD
        runs[node] = max((runs[source] for source in node.all_input_nodes if source in runs), default=(0, own[0]))
        if chunk is not None:
            runs[node] = (1, -chunk) if is_late and chunk != last else (0, chunk)
    for node in reversed(calls):
        if chunk_of(node) is None:
            runs[node] = min((runs[user] for user in node.users if user in runs), default=runs[node])
    begins: dict[int, fx.Node] = {}
    for node in sorted(calls, key=runs.__getitem__):
        step.output.prepend(node)
        is_back, chunk = runs[node]
        lag = backward_lag(-chunk, last + 1, own.step) if is_back else forward_lag(chunk, own.step)
        begins.setdefault(lag, node)
    begins.pop(0)
    return begins


def _comes_back(node: fx.Node) -> bool:
    """True for what receives a value of a later stage."""
    return node.target is ops.receive_value and origin(node).phase is Phase.BACKWARD


def _mark_stretches(
    step: StepGraph,
    pipe: PipeStage,
    runs: Mapping[int, fx.Node],
    loss: fx.Node,
    waits: list[tuple[Message, fx.Node]],
) -> None:
    """Mark where runs of nodes begin, and put the waits for what later chunks have by then after the loss.

    ``runs`` are the first nodes of those of several chunks, by their lags. Waits for what earlier chunks are sent come
    when the stages of these have come to their backward, the nearest first.
    """
    num_chunks = len(pipe.cuts) + 1

    def lag_of(chunk: int) -> int:
        return backward_lag(chunk, num_chunks, pipe.num_stages)

    if pipe.by_chunk:
        waits = _wait_in_runs(pipe, runs, waits)
    for message, wait in reversed(waits):
        if not message.is_back:
            skip_getitems(loss).append(wait)
    if len(pipe.chunks) == 1 and pipe.num_after:
        runs = {pipe.num_after: next(filter(_comes_back, step.calls()))}
    for lag, node in runs.items():
        set_begun_stretch(node, lag)
    earlier = {
        wait: max(lag_of(message.sender) + 1, lag_of(message.receiver)) for message, wait in waits if message.is_back
    }
    begun = set[int]()
    for wait, lag in sorted(earlier.items(), key=operator.itemgetter(1)):
        step.output.prepend(wait)
        if lag not in begun:
            set_begun_stretch(wait, lag)
            begun.add(lag)
    if pipe.weights_lag is not None:
        apart = weight_gradients(step)
        for node in apart:
            step.output.prepend(node)
        set_begun_stretch(apart[0], lag_of(pipe.number) + pipe.weights_lag)


def _wait_in_runs(
    pipe: PipeStage, runs: Mapping[int, fx.Node], waits: Sequence[tuple[Message, fx.Node]]
) -> list[tuple[Message, fx.Node]]:
    """Put each wait in the stage's next run after the one that receives, where what follows from the message comes in;
    returns the waits that have no such run."""
    ends, left = {*runs.values()}, list[tuple[Message, fx.Node]]()
    for message, wait in waits:
        if message.is_back:
            later = [chunk for chunk in reversed(pipe.chunks) if chunk < message.receiver]
            lags = [backward_lag(chunk, len(pipe.cuts) + 1, pipe.num_stages) for chunk in later]
        else:
            lags = [forward_lag(chunk, pipe.num_stages) for chunk in pipe.chunks if chunk > message.receiver]
        if not lags:
            left.append((message, wait))
            continue
        begin = place = runs[lags[0]]
        while not _arrives(place) and place.next not in ends and place.next.op == "call_function":
            place = place.next
        (place if _arrives(place) else begin).append(wait)
    return left


def _arrives(node: fx.Node) -> bool:
    """True for the wait of what another stage sends."""
    started = node.args[0] if node.target is ops.wait else None
    return isinstance(started, fx.Node) and started.target is ops.receive_value
