"""A simulated step as a list of events, which can be changed and run again in microseconds.

Who decides about collectives asks how long the step takes with a few of them otherwise, hundreds of times. So all
computation between two events is one number of seconds here, and the graph is not looked at any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.facts import delayed_bucket, host_bucket
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import HOST, runs_on_host, stream_of
from zerofx.scheduler.cost.simulate import Simulation


@dataclass(frozen=True)
class Start:
    """Something starts, once what it comes ``after`` is done: the seconds that it takes on each stream, one leg after
    the other. Until then its streams are left to others. ``runs_on``: the step may end before it is done."""

    name: str
    legs: tuple[tuple[str, float], ...]
    after: tuple[str, ...] = ()
    runs_on: bool = False


@dataclass(frozen=True)
class Wait:
    """Computation waits for what was started under this name, and then takes ``seconds`` for it."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Until:
    """Computation waits for an update of the last step, which ends so many seconds after this step's begin."""

    seconds: float


# A number is seconds of computation.
TimedEvent = float | Start | Wait | Until


def events_of(step: StepGraph, simulation: Simulation) -> list[TimedEvent]:
    """The step as ``simulation`` has run it; what is started has the name of its node."""
    events: list[TimedEvent] = []
    runs_on = [node for node in step.calls() if node.target is ops.run_on]
    buckets = {node.args[0] for node in runs_on}
    left = {copy for node in runs_on for copy in node.all_input_nodes}
    copied, updated = dict[fx.Node, str](), dict[fx.Node, str]()  # what has written each storage last
    computing = 0.0
    for node in step.calls():
        timing = simulation.timings[node]
        if node.target in ops.COLLECTIVES:
            event: TimedEvent = Start(node.name, ((stream_of(node), timing.seconds),))
        elif node.target in ops.TRANSFERS:
            ends = [storage_source(end)[0] for end in node.all_input_nodes]
            after = tuple(updated[end] for end in ends if end in updated)
            event = Start(node.name, tuple((leg.stream, leg.seconds) for leg in timing.legs), after, node in left)
            copied |= dict.fromkeys(ends, node.name)
        elif node.target is ops.wait:
            pending = node.args[0]
            assert isinstance(pending, fx.Node)
            event = Wait(pending.name, timing.seconds)
        elif node.target is ops.settle:
            event = Until(timing.start_seconds if timing.exposed_seconds else 0.0)
        elif delayed_bucket(node) is not None:
            continue  # during the next step
        elif runs_on_host(node):
            sources = [storage_source(source)[0] for source in node.all_input_nodes]
            after = tuple(copied[source] for source in sources if source in copied)
            event = Start(node.name, ((HOST, timing.seconds),), after, host_bucket(node) in buckets)
            updated |= dict.fromkeys(sources, node.name)
        else:
            computing += timing.seconds
            continue
        events += [computing, event]
        computing = 0.0
        if node.target is ops.broadcast:
            events.append(Wait(node.name, 0.0))
    return [*events, computing]


def end_seconds(events: Iterable[TimedEvent]) -> float:
    """When a step of these events ends, in seconds from its begin."""
    now = 0.0
    free: dict[str, float] = {}  # by stream
    done: dict[str, float] = {}  # by name
    ends = 0.0  # when all is done that the step waits for
    held_back: list[tuple[float, Start]] = []  # what may start then, the earliest first

    def run(start: Start, ready: float) -> None:
        nonlocal ends
        for stream, seconds in start.legs:
            ready = free[stream] = max(ready, free.get(stream, 0.0)) + seconds
        done[start.name] = ready
        if not start.runs_on:
            ends = max(ends, ready)

    def run_all(until: float) -> None:
        while held_back and held_back[0][0] <= until:
            ready, start = held_back.pop(0)
            run(start, ready)

    for event in events:
        if isinstance(event, float):
            now += event
        elif isinstance(event, Until):
            now = max(now, event.seconds)
        elif isinstance(event, Wait):
            if event.name not in done:
                run_all(next(ready for ready, start in held_back if start.name == event.name))
            now = max(now, done[event.name]) + event.seconds
        else:
            ready = max([now, *(done.get(name, 0.0) for name in event.after)])
            if event.legs[0][0] == HOST:
                run(event, ready)
                continue
            held_back.append((ready, event))
            held_back.sort(key=lambda entry: entry[0])
            if ready <= now:
                run_all(now)
    run_all(float("inf"))
    return max(now, ends)
