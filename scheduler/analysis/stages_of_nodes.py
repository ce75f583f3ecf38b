"""The chunk of each node of a captured step that is cut along the axis pipe, and the values that stages hand on.

A chunk is an interval of the forward's nodes, with the parameters that are first read there, and the part of backward
that needs them. Backward goes through the chunks in the reverse order: a node there runs where the forward values that
it reads are, or the parameter whose gradient it makes; a sum of what several later chunks give runs at the last one
that it can, so that one value is sent for several. What follows from the batch alone is computed wherever it is read,
and views are made again there: what is sent is memory of a value's own. A buffer that is changed is of the chunk that
changes it; where its next value follows from the batch alone (a count, say) each stage changes its own.

A stage has a chunk, or several (``PipeStage``): what these hand to each other is not sent.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import fx

from zerofx.errors import UsageError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input, is_view, mutated_inputs
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, Role, chunk_of, is_random, origin, placeholder
from zerofx.ir.graph import StepGraph

EVERYWHERE = -1
"""In the place of a chunk's number: wherever it is read."""


@dataclass(frozen=True)
class Message:
    """A value that chunk ``sender`` hands to another stage, where its receipt starts in chunk ``receiver``."""

    value: fx.Node
    sender: int
    receiver: int

    @property
    def is_back(self) -> bool:
        """True for what is handed to an earlier chunk."""
        return self.receiver < self.sender

    @property
    def run(self) -> tuple[int, bool]:
        """The chunk in which its receipt starts, and whether that is in backward."""
        return self.receiver, self.is_back


@dataclass(frozen=True)
class StageMap:
    """The chunk that has each value of its own, and the messages between stages, in the order of their values.

    Views are in no chunk. ``backward`` is the position where backward begins, ``changed`` has by name the chunks of
    the buffers that one of them changes, ``results`` are the values that all stages have in the end.
    """

    homes: Mapping[fx.Node, int]
    messages: tuple[Message, ...]
    backward: int
    changed: Mapping[str, int]
    results: frozenset[fx.Node]

    def messages_to(self, chunks: Collection[int]) -> list[Message]:
        """The messages that the stage of some chunks receives, in order."""
        return [message for message in self.messages if message.receiver in chunks]


def stages_of_nodes(step: StepGraph, cuts: Sequence[str], num_stages: int | None = None) -> StageMap:
    """Give each node of the whole graph of a micro-batch its chunk; ``cuts`` and ``num_stages`` as ``PipeStage`` has
    them, None for a stage for each chunk.

    Raises:
        UsageError: values would have to be sent against the order of chunks.
    """
    order = step.positions()
    backward = min((order[node] for node in step.calls() if origin(node).phase is Phase.BACKWARD), default=len(order))
    homes, changed = _forward_homes(step, cuts, order, backward)
    parameters = _place_parameters(step, homes)
    pins = {own_source(node): parameters[name] for name, node in step.gradients.items()}
    _place_backward(step, homes, order, backward, pins)
    for buffer in step.placeholders(Role.BUFFER):
        name = placeholder(buffer).name
        places = {homes[node] for node in consumers(buffer) if node in homes} if name in changed else ()
        if any(place != changed[name] for place in places):
            _refuse(f"the buffer {name}, which stage {changed[name]} changes, read in another")
    for name, node in step.gradients.items():
        if homes[own_source(node)] not in (parameters[name], EVERYWHERE):
            _refuse(f"the gradient of {name}, of stage {parameters[name]}, in stage {homes[own_source(node)]}")
    last = len(cuts)
    if step.gradients and homes[own_source(step.loss)] != last:
        _refuse(f"the loss in stage {homes[own_source(step.loss)]} of {last + 1}")
    results, num_stages = frozenset(_results(step)), num_stages or last + 1
    receivers: dict[tuple[fx.Node, int], list[int]] = {}
    for chunk in range(last + 1):
        for value in _read_elsewhere(step, homes, chunk):
            is_late = order[value] >= backward
            if value not in results and is_late == (chunk > homes[value]):
                _refuse(f"{value.name} of stage {homes[value]} read in stage {chunk}")
            receivers.setdefault((value, chunk % num_stages), []).append(chunk)
    messages = list[Message]()
    for (value, stage), chunks in receivers.items():
        sender, of_stage = homes[value], range(stage, last + 1, num_stages)
        if stage == sender % num_stages:
            continue
        # The next to run after the sender, whichever of them reads it: so stages receive in the order of what is sent.
        is_back = max(chunks) < sender
        after = [chunk for chunk in of_stage if (chunk < sender) == is_back]
        messages.append(Message(value, sender, max(after) if is_back else min(after)))
    messages.sort(key=lambda message: (order[message.value], message.receiver))
    return StageMap(homes, tuple(messages), backward, changed, results)


def weight_gradients(step: StepGraph) -> list[fx.Node]:
    """The nodes of backward that no message of a stage depends on, and nothing that it gives: weight gradients and what
    leads to these alone, in order. A node of several results that one is sent of is not among them."""
    calls = [node for node in step.calls() if node.target is not ops.next_micro_batch]
    messages = [node for node in calls if _is_message(node) and origin(node).phase is not Phase.UPDATE]
    pending, needed = [step.loss, *step.extras, *messages], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return [
        node
        for node in calls
        if origin(node).phase is Phase.BACKWARD
        and node not in needed
        and not (node.target is operator.getitem and node.args[0] in needed)
    ]


def _is_message(node: fx.Node) -> bool:
    """True for what starts to send or receive, and for its wait."""
    started = node.args[0] if node.target is ops.wait else node
    return isinstance(started, fx.Node) and started.target in ops.MESSAGES


def is_remade(node: fx.Node) -> bool:
    """True for a view, which is made again of a value's memory wherever it is read; what is awaited is a value."""
    return is_view(node) and aliased_input(node) is not None and node.target is not ops.wait


def own_source(node: fx.Node) -> fx.Node:
    """The value whose memory a node's is; itself where that is its own."""
    while is_remade(node):
        source = aliased_input(node)
        assert source is not None
        node = source
    return node


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The values whose memory a node reads, itself or through views."""
    for read in node.all_input_nodes:
        yield own_source(read)


def _results(step: StepGraph) -> list[fx.Node]:
    """The values that all stages have in the end: the loss, and what else an evaluation gives."""
    return [own_source(node) for node in (step.loss, *step.extras)]


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"expected a step that runs through stages in order, forward and then back, found {what}: leave the axis "
        f"'pipe' out of the mesh"
    )


def _forward_homes(
    step: StepGraph, cuts: Sequence[str], order: Mapping[fx.Node, int], backward: int
) -> tuple[dict[fx.Node, int], dict[str, int]]:
    """Homes of the forward, and of all that follows from the batch alone, and those of the buffers that a stage
    changes, by name."""
    buffers = {placeholder(node).name: node for node in step.placeholders(Role.BUFFER)}
    changed: dict[str, int] = {}
    while True:
        homes = _homes_with(step, cuts, order, backward, {buffers[name]: place for name, place in changed.items()})
        coming = dict[str, int]()
        for name, node in step.mutations.items():
            place = homes.get(own_source(node))
            if place is None:
                _refuse(f"the buffer {name} changed outside of the forward")
            if place != EVERYWHERE:
                coming[name] = place
        if coming == changed:
            return homes, changed
        changed = coming


def _homes_with(
    step: StepGraph,
    cuts: Sequence[str],
    order: Mapping[fx.Node, int],
    backward: int,
    changed: Mapping[fx.Node, int],
) -> dict[fx.Node, int]:
    begins = {name: number for number, name in enumerate(cuts, start=1)}
    given = (node for node in step.placeholders() if placeholder(node).role is not Role.PARAMETER)
    homes, stage = {**dict.fromkeys(given, EVERYWHERE), **changed}, 0
    for node in step.calls():
        stage = max(stage, begins.get(node.name, 0))
        if is_remade(node):
            continue
        follows = all(homes.get(source) == EVERYWHERE for source in sources(node))
        if follows and not is_random(node) and not mutated_inputs(node):
            homes[node] = EVERYWHERE
        elif node.args and is_view(node):  # one of several results
            homes[node] = homes.get(node.all_input_nodes[0], stage)
        elif order[node] < backward:
            homes[node] = stage
    for node in step.calls():  # backward's results go where what makes them does
        if order[node] >= backward and is_view(node) and not is_remade(node) and homes.get(node) != EVERYWHERE:
            homes.pop(node, None)
    if stage != len(cuts):
        _refuse(f"cuts at {', '.join(cuts)}, of which the graph has not all")
    return homes


def _place_parameters(step: StepGraph, homes: dict[fx.Node, int]) -> dict[str, int]:
    """The stage of each parameter: the first that reads it."""
    stages: dict[str, int] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in step.calls():
        if not is_remade(node):
            for source in sources(node):
                readers.setdefault(source, []).append(node)
    for node in step.placeholders(Role.PARAMETER):
        known = [homes[reader] for reader in readers.get(node, ()) if homes.get(reader, EVERYWHERE) != EVERYWHERE]
        stages[placeholder(node).name] = homes[node] = min(known, default=0)
    return stages


def _place_backward(
    step: StepGraph,
    homes: dict[fx.Node, int],
    order: Mapping[fx.Node, int],
    backward: int,
    pins: Mapping[fx.Node, int],
) -> None:
    nodes = [node for node in step.calls() if order[node] >= backward and not is_remade(node) and node not in homes]
    open_ones = set(nodes)
    asked: dict[fx.Node, int] = dict(pins)
    needs: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        read = [homes[source] for source in sources(node) if source not in open_ones]
        needs[node] = max([*read, asked.get(node, 0), 0])
        for source in sources(node):
            if source in open_ones:
                asked[source] = max(asked.get(source, 0), needs[node])
    for node in nodes:
        given = {source: homes[source] for source in sources(node) if source in open_ones}
        is_sum = len(given) > 1 and all(homes[source] == EVERYWHERE for source in sources(node) if source not in given)
        homes[node] = min(given.values()) if is_sum else needs[node]
        if is_view(node) and given:  # one of several results
            homes[node] = min(given.values())


def _read_elsewhere(step: StepGraph, homes: Mapping[fx.Node, int], stage: int) -> dict[fx.Node, None]:
    """The values of other stages that a stage reads, and those of what the step gives."""
    values: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    own = (node for node in step.calls() if homes.get(node) == stage)
    pending = [*_results(step), *(source for node in own for source in sources(node))]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        place = homes[node]
        if place == EVERYWHERE:
            pending.extend(sources(node))
        elif place != stage:
            values[node] = None
    return values


def chunks_of_buckets(graph: StepGraph, layout: BucketLayout) -> list[int]:
    """The chunk of each trained bucket of a stage: that of the first node that reads a parameter of it. ``graph``: of
    one micro-batch, with whole parameters."""
    first = dict[str, int]()
    for node in graph.calls():
        chunk = chunk_of(node)
        for source in node.all_input_nodes if chunk is not None else ():
            owner = own_source(source)
            if owner.op == "placeholder" and chunk is not None:
                first.setdefault(placeholder(owner).name, chunk)
    pipe = graph.pipe
    assert pipe is not None, "a step in stages"
    return [
        min((first[name] for slot in bucket.slots if (name := slot.whole or slot.name) in first), default=pipe.number)
        for bucket in layout.buckets
        if bucket.trainable
    ]
