"""Capture a model with four of its repeated layers and copy the rest, so that the cost does not grow with depth.

Nothing is taken on trust. The whole model's forward is run and recorded operator by operator, and has to equal the
shortened model's record once that is stamped; and the shortened model's joint graph, with one layer taken out, has to
be the joint graph of a model with one layer less. Where anything differs, or the model cannot be shortened, the whole
model is captured, and the reason is written where ``ZEROFX_DEBUG`` asks for passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zerofx.capture.by_layer.forward_record import ForwardRecord, record_forward
from zerofx.capture.by_layer.repeats import Repeat, find_repeats, shorten_lists
from zerofx.capture.by_layer.replicate import NotRepeatedError, Stamped, add_outputs, erase_layer, shrink, stamp
from zerofx.capture.by_size import KnownSizes
from zerofx.capture.cache import KeptCapture
from zerofx.capture.normalise.inputs import placeholder_name
from zerofx.capture.trace import capture_forward, check_calls
from zerofx.capture.traceable import Forward
from zerofx.disk.cache import NOT_KEPT, DiskCache
from zerofx.errors import summarise_error, warn
from zerofx.ir.canonical import canonical
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph


def capture_by_layer(
    whole: Forward,
    *,
    allowed: bool = True,
    check: bool = False,
    say: Callable[[str], object] = lambda _: None,
    cache: DiskCache = NOT_KEPT,
    recorded: RecordedForward | None = None,
    sizes: KnownSizes | None = None,
) -> StepGraph:
    """The result of ``capture_forward``, names included, at a fraction of its cost where layers repeat.

    ``allowed``: whether layers may be stamped. ``check``: whether a stamped graph, or one read from ``cache``, is
    compared with a whole capture. ``say`` is told which layers were stamped, or why none were although the model has
    enough, and that a graph was read from the cache, or why it is not kept there. ``recorded``: the result of
    ``record_and_look_up``. ``sizes``: captures at other sizes, from which the graph may follow; this capture is added
    to it.

    Raises:
        CaptureError: as ``capture``.
    """
    # What a layer has of numbers that are inputs is not as other layers have it.
    repeats = find_repeats(whole.model) if allowed and not whole.objective.free_tensors.tape.is_open else ()
    if not repeats and cache.folder is None and sizes is None:
        return capture_forward(whole)
    try:
        recorded = recorded or record_and_look_up(whole, cache)
    except Exception as error:  # noqa: BLE001 - what the model's own code raises is explained where it is captured
        if repeats:
            say(f"captured layer by layer: {summarise_error(error)}")
        if cache.folder is not None:
            say(f"not kept for the next run: {summarise_error(error)}")
        return capture_forward(whole)
    record, place = recorded.record, recorded.place
    captured = place.graph(recorded.text) if recorded.text is not None else None
    setting = f"{whole.batch.names} {whole.compute_dtype} {whole.gpu}"
    if captured is not None:
        say("captured by an earlier run, whose forward was the same")
    elif sizes is not None and (captured := sizes.graph(record, place, setting)) is not None:
        say("made of what was captured at other sizes")
        captured = place.keep(captured, say)
    elif repeats and (captured := _try_to_stamp(whole, repeats, record, say)) is not None:
        captured = place.keep(captured, say)
    else:
        captured = capture_forward(whole, record.returned)
        # A forward that does not do the same twice may have done something else while it was captured.
        if place.key is not None and (again := record_forward(whole)).text() != record.text():
            warn(
                f"expected a forward that does the same in each call, found {record.first_difference(again)}: a step "
                f"is the call that was captured, again and again; give what changes as a tensor of the batch"
            )
            say("not kept for the next run: its forward does not do the same each time")
        else:
            captured = place.keep(captured, say)
    assert captured is not None
    if sizes is not None:
        sizes.add(record, captured, setting)
    # Of all layers; but for what is shown as it is given, in no file.
    captured.returned = replace(record.returned, whole=captured.returned.whole)
    assert not check or captured.text() == capture_forward(whole, record.returned).text(), (
        "layers were stamped out, or kept, as they are not"
    )
    return captured


@dataclass(frozen=True)
class RecordedForward:
    """The record of a model's forward, its place in the cache, and the text of its graph if an earlier run kept it."""

    record: ForwardRecord
    place: KeptCapture
    text: str | None


def record_and_look_up(forward: Forward, cache: DiskCache) -> RecordedForward:
    """Run and record a model's forward, and look for its graph in ``cache``.

    Raises:
        CaptureError: there is a cached graph, but later calls of the forward differ from the first.
        Exception: what the model's own code raises, and ``NotRepeatedError`` as ``record_forward``.
    """

    def run() -> RecordedForward:
        record = record_forward(forward)
        place = KeptCapture.locate(cache, record, forward)
        return RecordedForward(record, place, place.read())

    recorded = run()
    objective = forward.objective
    if (recorded.text is None and recorded.place.key is not None) or (
        recorded.text is not None and not objective.num_watched and objective.executed.may_write()
    ):
        # What a first forward works out and the model remembers, no other does again.
        recorded = run()
    if recorded.text is not None and recorded.record.leaves_something:
        check_calls(forward)
    return recorded


def _try_to_stamp(
    whole: Forward, repeats: Sequence[Repeat], record: ForwardRecord, say: Callable[[str], object]
) -> StepGraph | None:
    try:
        stamped = _stamp_layers(whole, repeats, record.canonical())
    except Exception as error:  # noqa: BLE001 - what a shortened model raises says nothing of the whole one
        say(f"captured layer by layer: {summarise_error(error)}")
        return None
    say(", ".join(f"captured {len(repeat.sample)} of {len(repeat.keys)} layers of {repeat.path}" for repeat in repeats))
    return stamped


def _stamp_layers(whole: Forward, repeats: Sequence[Repeat], expected: str) -> StepGraph:
    """Capture the shortened model and stamp its layers. ``expected``: the record of the whole model's forward."""
    model = whole.model
    shortening = [(repeat, repeat.sample) for repeat in repeats]
    with shorten_lists(model, shortening):
        own = record_forward(whole)
        record = own.graph()
        for repeat in repeats:
            stamp(record, repeat)
        if canonical(record) != expected:
            raise NotRepeatedError("the forward does not run all layers alike")
        short = capture_forward(whole, own.returned)
    if short.constants:
        raise NotRepeatedError("the model has tensors that are neither parameters nor buffers")
    names = _Names(short)
    for entry in repeats:
        with shorten_lists(model, [(other, other.fewer if other is entry else other.sample) for other in repeats]):
            names.learn(entry, short, capture_forward(whole))
    for element in repeats:
        Stamp(element, names).run(short)
    names.give(short)
    captured = replace(short, parameters=whole.parameters(), units=whole.units())
    captured.graph.lint()
    return captured.clone()


@dataclass(frozen=True)
class Stamp:
    """Put the layers that were not traced into the graph of a model that has four of them. ``names`` is told of them.

    0 1 2 3   ->   0 1 a b c 2 3        ``replicate.py`` says how, and what it does not handle
    """

    repeat: Repeat
    names: _Names
    name: str = "stamp"

    def run(self, step: StepGraph) -> None:
        stamped = stamp(step.graph, self.repeat)
        add_outputs(step, stamped)
        self.names.extend(stamped)


class _Names:
    """The names that nodes would have in the whole model's graph.

    Tracing numbers the calls of an operator in order, so a number grows linearly with the number of layers, and with
    the number of layers before the node. The growth is read from two graphs; the resulting names are checked to be
    unique, since nothing but texts depends on them.
    """

    def __init__(self, short: StepGraph) -> None:
        self._stems: dict[fx.Node, str] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._grown: dict[fx.Node, int] = {}
        for node in short.calls():
            self._stems[node], self._numbers[node] = _split_number(node.name)

    def learn(self, repeat: Repeat, short: StepGraph, fewer: StepGraph) -> None:
        """Compare ``short`` with the graph of a model that has one layer of ``repeat`` less.

        Raises:
            NotRepeatedError: ``short`` without a layer is another graph.
        """
        own = {node.name: node for node in short.graph.nodes}
        shrunk = short.clone()
        others = shrink(shrunk.graph, repeat)
        replaced = [(own[gone.name], own[stays.name]) for gone, stays in others.items()]
        erase_layer(shrunk, repeat, others)
        if _text(shrunk) != _text(fewer):
            raise NotRepeatedError(f"{repeat.path} with a layer less is another graph")
        more = len(repeat.middle)
        growth: dict[fx.Node, int] = {}
        for node_of_shrunk, other in zip(shrunk.calls(), fewer.calls(), strict=True):
            stem, number = _split_number(other.name)
            node = own[node_of_shrunk.name]
            if stem != self._stems[node]:
                raise NotRepeatedError(f"{node_of_shrunk.name} is called {other.name} in a model with a layer less")
            growth[node] = (self._numbers[node] - number) * more
        growth |= {gone: growth[stays] for gone, stays in replaced if gone in self._numbers}
        for node, grown in growth.items():
            self._grown[node] = self._grown.get(node, 0) + grown

    def extend(self, stamped: Stamped) -> None:
        """Number the nodes of the layers that were put in, and the nodes of the layer after them."""
        for ordinal, (node, last) in enumerate(zip(stamped.layers[0], stamped.layers[-1], strict=True)):
            if node not in self._numbers:
                continue
            each = self._numbers[last] - self._numbers[node]
            for number, layer in enumerate(stamped.layers[1:-1], 1):
                copied = layer[ordinal]
                self._stems[copied], self._numbers[copied] = self._stems[node], self._numbers[node] + each * number
                self._grown[copied] = self._grown[node]
            self._grown[last] += each * len(stamped.layers[1:-1])

    def give(self, step: StepGraph) -> None:
        """Rename the nodes.

        Raises:
            NotRepeatedError: two nodes would have one name.
        """
        names: dict[fx.Node, str] = {}
        for node in step.graph.nodes:
            if node in self._numbers:
                number = self._numbers[node] + self._grown[node]
                names[node] = f"{self._stems[node]}_{number}" if number else self._stems[node]
            elif node.op == "placeholder" and placeholder(node).role in (Role.PARAMETER, Role.BUFFER):
                names[node] = placeholder_name(placeholder(node).role, placeholder(node).name)
            else:
                names[node] = node.name
        if len(set(names.values())) != len(names):
            raise NotRepeatedError("names of operators do not grow with depth")
        for node, name in names.items():
            node.name = name
            if node.op == "placeholder":
                node.target = name


def _split_number(name: str) -> tuple[str, int]:
    """Split ``mm_3`` into ``("mm", 3)``; ``mm`` is the zeroth."""
    match = re.fullmatch(r"(.+?)(?:_([1-9]\d*))?", name)
    assert match is not None
    return match[1], int(match[2] or 0)


def _text(step: StepGraph) -> str:
    return f"{canonical(step.graph)}\n{step.mutation_names}\n{step.gradient_names}"
