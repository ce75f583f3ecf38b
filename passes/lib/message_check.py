"""Check that the stages of a step exchange what each of them expects, and that none of them waits for ever.

    stage 0: send_value(h, 1)                       stage 1: wait(receive_value(0))    # message 0 from both
             wait(receive_value(1)); wait(send)              send_value(gh, 0); wait(send)

Between two stages messages arrive in the order in which they are sent, whatever they are: a receiver that expects
another would compute with it. So the messages of all stages are run through, micro-batch by micro-batch: a send goes on
at once, its wait holds until the receiver has begun to receive, and the wait of a receiver until the sender has sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from torch import fx

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.facts import begun_stretch, message_number
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import stage_turns

Link = tuple[int, int]
"""Stages that send and receive: what goes from the first to the second."""
_Post = tuple[str, int, int, object]  # "send" or "receive", sender, receiver, and which message


def check_messages(stages: Sequence[StepGraph], num_micro_batches: int, *, by_turns: bool = False) -> None:
    """Check the messages of all stages of a step, each of one micro-batch before it is unrolled; ``by_turns`` as they
    are where stages take micro-batches so.

    Raises:
        InvalidGraphError: one receives other than is sent to it, or no stage goes on.
    """
    runs = [list(_events(step, number, num_micro_batches, by_turns)) for number, step in enumerate(stages)]
    posted: dict[_Post, None] = {}
    queues: dict[tuple[str, int, int], list[object]] = {}
    places = [0] * len(runs)
    while True:
        before = list(places)
        for number, run in enumerate(runs):
            while places[number] < len(run):
                post, waits = run[places[number]]
                way, sender, receiver, message = post
                if waits and ("receive" if way == "send" else "send", sender, receiver, message) not in posted:
                    break
                if not waits:
                    posted[post] = None
                    queues.setdefault((way, sender, receiver), []).append(message)
                places[number] += 1
        if places == before:
            break
    for number, run in enumerate(runs):
        if places[number] < len(run):
            way, sender, receiver, message = run[places[number]][0]
            _fail(f"stage {number} waits for ever to {way} message {message} from stage {sender} to {receiver}")
    for (way, sender, receiver), messages in queues.items():
        others = queues.get(("receive" if way == "send" else "send", sender, receiver), [])
        for message, other in itertools.zip_longest(messages, others):
            if message != other:
                _fail(f"stages {sender} and {receiver} {way} message {message}, where the other has {other}")


def order_on_links(step: StepGraph) -> dict[Link, list[int | None]]:
    """The numbers of the messages that a stage sends and receives, by link in the order of its graph; those that passes
    have put in have none."""
    order: dict[Link, list[int | None]] = {}
    for node in step.calls():
        if node.target in ops.MESSAGES:
            assert step.pipe is not None, "messages are of stages"
            order.setdefault(_link(node, step.pipe.number), []).append(message_number(node))
    return order


def check_order(step: StepGraph, checked: Mapping[Link, Sequence[int | None]]) -> None:
    """Check that passes have left the messages of a stage in the order in which all stages' were checked.

    Raises:
        InvalidGraphError: they have moved one past another.
    """
    order = order_on_links(step)
    for link, numbers in checked.items():
        if [number for number in order.get(link, ()) if number is not None] != [*numbers]:
            _fail(f"from stage {link[0]} to {link[1]} they are in another order than they were checked in")


def _link(message: fx.Node, stage: int) -> Link:
    """The link that a message which ``stage`` starts takes."""
    sends = message.target is ops.send_value
    peer = message.args[1 if sends else 0]
    assert isinstance(peer, int)
    return (stage, peer) if sends else (peer, stage)


def _events(step: StepGraph, number: int, num_micro_batches: int, by_turns: bool) -> Iterator[tuple[_Post, bool]]:
    """The messages of a stage in order, each once as it starts and once for its wait, which is marked: turn by turn, or
    run by run, and in each run micro-batch by micro-batch."""
    runs: list[list[tuple[_Post, bool]]] = [[]]
    for node in step.calls():
        if begun_stretch(node) is not None:
            runs.append([])
        started = node.args[0] if node.target is ops.wait else node
        if isinstance(started, fx.Node) and started.target in ops.MESSAGES:
            way = "send" if started.target is ops.send_value else "receive"
            runs[-1].append(((way, *_link(started, number), message_number(started)), node is not started))
    order: Iterable[tuple[int, int]] = itertools.product(range(len(runs)), range(num_micro_batches))
    if by_turns:
        order = itertools.chain.from_iterable(stage_turns(step, num_micro_batches, num_micro_batches))
    for run, batch in order:
        for (way, sender, receiver, message), waits in runs[run]:
            yield (way, sender, receiver, (message, batch)), waits


def _fail(what: str) -> NoReturn:
    raise InvalidGraphError(f"messages: {what}")
