"""Check that the stages of a step exchange what each of them expects, and that none of them waits for ever.

    stage 0: send_value(h, 1)                       stage 1: wait(receive_value(0))    # message 0 from both
             wait(receive_value(1)); wait(send)              send_value(gh, 0); wait(send)

Between two stages messages arrive in the order in which they are sent, whatever they are: a receiver that expects
another would compute with it. So the messages of all stages are run through, micro-batch by micro-batch: a send goes on
at once, its wait holds until the receiver has begun to receive, and the wait of a receiver until the sender has sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from torch import fx

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.facts import begun_stretch, message_number
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import stage_turns

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


def _events(step: StepGraph, number: int, num_micro_batches: int, by_turns: bool) -> Iterator[tuple[_Post, bool]]:
    """The messages of a stage in order, each once as it starts and once for its wait, which is marked: turn by turn, or
    run by run, and in each run micro-batch by micro-batch."""
    runs: list[list[tuple[_Post, bool]]] = [[]]
    for node in step.calls():
        if begun_stretch(node) is not None:
            runs.append([])
        started = node.args[0] if node.target is ops.wait else node
        if isinstance(started, fx.Node) and started.target in ops.MESSAGES:
            sends = started.target is ops.send_value
            peer = started.args[1 if sends else 0]
            assert isinstance(peer, int)
            ends = (number, peer) if sends else (peer, number)
            runs[-1].append((("send" if sends else "receive", *ends, message_number(started)), node is not started))
    order: Iterable[tuple[int, int]] = itertools.product(range(len(runs)), range(num_micro_batches))
    if by_turns:
        order = itertools.chain.from_iterable(stage_turns(step, num_micro_batches, num_micro_batches))
    for run, batch in order:
        for (way, sender, receiver, message), waits in runs[run]:
            yield (way, sender, receiver, (message, batch)), waits


def _fail(what: str) -> NoReturn:
    raise InvalidGraphError(f"messages: {what}")
