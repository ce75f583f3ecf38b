"""The user's layout of modules and parameters on the model axis: the ways that it leaves, or the conflict.

Our own words are about what a product gives, wherever the module keeps which dimension of its weight: ``"column"``
gives parts of features, ``"row"`` parts that add up, ``"sequence"`` parts of the last dimension but one, which is
tokens, of parameters that every rank has, ``"replicated"`` has every rank do the whole: parameters and what is given.
``"exchange"`` is about experts: each rank has some of them, and is sent their rows by those that have the tokens.
Styles of a ``tp_plan`` are about dimensions of the parameter, as ``transformers`` has them; those that say how a
module's forward is rewritten say nothing here, where the graph is.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from zerofx.choices import TP_STYLES
from zerofx.errors import UsageError
from zerofx.ir.facts import Phase, Role, origin, placeholder, source_line, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.sharding.rule import Rule, read_tensors, results_of
from zerofx.ir.text import target_name
from zerofx.scheduler.analysis.expert_rows import kinds_that_send, send_rows
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, slot_of
from zerofx.scheduler.plan.facts import is_within
from zerofx.scheduler.plan.placements import REPLICATED, Partial, Placement, Replicated, Sharded

EXCHANGE = "exchange"
_NEAREST = 3  # names in a message


@dataclass(frozen=True)
class Pin:
    """An entry of ``shardings=``, ``pattern`` and ``word``, that is about a node; ``module`` is the one in which a
    parameter has the name that matched."""

    pattern: str
    word: str
    module: str

    def __str__(self) -> str:
        return f"shardings={{{self.pattern!r}: {self.word!r}}}"


@dataclass(frozen=True)
class Pins:
    """Pins of parameters' placeholders, several where a tied one is named by several names, and of what modules give.

    ``ignored`` are entries that say nothing of this step, each with why.
    """

    parameters: Mapping[fx.Node, tuple[Pin, ...]] = field(default_factory=dict)
    results: Mapping[fx.Node, Pin] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def marks(self) -> dict[fx.Node, str]:
        """Marks that distinguish otherwise equal layers with different pins."""
        return {
            **{node: ", ".join(pin.word for pin in pins) for node, pins in self.parameters.items()},
            **{node: pin.word for node, pin in self.results.items()},
        }


def pins_of(step: StepGraph, asked: Mapping[str, str]) -> Pins:
    """Resolve ``asked``, words by names or patterns of modules and parameters, against a captured graph.

    Of several entries that name the same, the last counts. Parameters of other steps lie as those have them.

    Raises:
        UsageError: an entry names no parameter, and no module that has one or gives something.
    """
    nodes = {placeholder(node).name: node for node in step.placeholders(Role.PARAMETER)}
    own = [info for info in step.parameters if info.name in nodes and not info.lent]
    named = {alias: nodes[info.name] for info in own for alias in info.aliases}
    given = _module_outputs(step)
    modules = dict.fromkeys([*(alias.rpartition(".")[0] for alias in named), *given])
    by_name, results, ignored = dict[str, Pin](), dict[fx.Node, Pin](), list[str]()
    for pattern, word in asked.items():
        is_style = word in TP_STYLES
        means = TP_STYLES[word] if is_style else word
        says_what_is_given = means == "sequence" or word == "replicated"  # other styles leave it to the plan
        matched = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        parameters = [
            alias for alias in named if fnmatch.fnmatchcase(alias, pattern) or alias.rpartition(".")[0] in matched
        ]
        gives = [node for module in matched for node in given.get(module, ())]
        if means is None:
            ignored.append(f"{pattern!r}: {word!r} (it says how a module's forward is written)")
        elif not parameters and not (gives and says_what_is_given):
            if not is_style:
                raise UsageError(_names_nothing(pattern, word, [*named, *modules]))
            ignored.append(f"{pattern!r}: {word!r} (it names nothing in this model)")
        else:
            by_name |= {alias: Pin(pattern, word, alias.rpartition(".")[0]) for alias in parameters}
            results = {node: pin for node, pin in results.items() if node not in gives}
            if says_what_is_given:
                results |= {node: Pin(pattern, word, origin(node).layer) for node in gives}
    pins: dict[fx.Node, tuple[Pin, ...]] = {}
    for alias, pin in by_name.items():
        pins[named[alias]] = (*pins.get(named[alias], ()), pin)
    return Pins(pins, results, tuple(ignored))


def apply_pins(ways: ShardingWays, pins: Pins, unasked: Collection[str] = ()) -> ShardingWays:
    """The ways of ``ways``, whose classes are told apart by ``pins.marks``, that do as the pins say.

    Rows of experts are sent where the pins ask for it, and those of kinds that are ``unasked``.

    Raises:
        UsageError: a pin cannot be met; names the operator that is in the way.
    """
    asking = dict.fromkeys(pin for pins_of in pins.parameters.values() for pin in pins_of if pin.word == EXCHANGE)
    sent = {pin: kinds_that_send(ways, set(_calls_of_rows(ways, pin))) for pin in asking}
    unsent = {pin for pin, kinds in sent.items() if not kinds}
    placeholders = dict(ways.placeholders)
    rules = dict(send_rows(ways, {*unasked, *(kind for kinds in sent.values() for kind in kinds)}).rules)
    patterns = {pin.pattern for pin in sent.keys() - unsent}
    for node, of_node in pins.parameters.items():
        for pin in of_node:
            if pin in unsent and (tensor(node).ndim > 2 or pin.pattern not in patterns):
                raise UsageError(_refusal_to_send(ways, pin))
    for node, of_node in pins.parameters.items():
        first = ways.classes.first[node]
        for pin in of_node:
            if pin in unsent:
                continue  # shared experts, which all tokens go through
            allowed = _placements_for(ways, node, pin)
            left = [placement for placement in placeholders[first] if placement in allowed]
            if not allowed:
                raise UsageError(_conflict(ways, node, pin))
            if not left:
                raise UsageError(
                    f"expected one way for {placeholder(node).name} to lie in, found "
                    f"{' and '.join(map(str, of_node))}, which do not go together: it is one tensor of several names"
                )
            placeholders[first] = left
            if pin.word != EXCHANGE and REPLICATED not in left:
                _keep_readers(ways, rules, node, pin.module, left)
    for node, pin in pins.results.items():
        source, index = slot_of(node)
        first, dim, is_whole = ways.classes.first[source], tensor(node).ndim - 2, pin.word == "replicated"
        left_rules = [
            rule for rule in rules[first]
            if (rule.outputs[index] == REPLICATED if is_whole else _is_along(rule.outputs[index], dim))
        ]  # fmt: skip
        if not left_rules:
            lies = "whole" if is_whole else f"in parts along dimension {dim}"
            raise UsageError(
                f"expected what {pin.module} gives, {list(tensor(node).shape)}, {lies} on "
                f"{ways.num_ranks} ranks of the model axis, as {pin} asks, found {_operator(source)} in the way, which "
                f"can give it {', '.join(dict.fromkeys(str(rule.outputs[index]) for rule in rules[first]))}"
            )
        rules[first] = left_rules
    return replace(ways, placeholders=placeholders, rules=rules)


def _calls_of_rows(ways: ShardingWays, pin: Pin) -> Iterator[fx.Node]:
    """The first of each class of calls of the module of ``pin`` that give rows, or matrices."""
    for call in ways.step.calls():
        first, result = ways.classes.first[call], next(iter(results_of(call)), None)
        if first in ways.rules and result is not None and result.ndim > 1 and is_within(origin(call).layer, pin.module):
            yield first


def _refusal_to_send(ways: ShardingWays, pin: Pin) -> str:
    tokens = " and ".join(str(list(tensor(n).shape)) for n in ways.step.placeholders(Role.INPUT))
    return (
        f"expected rows of {pin.module} that {ways.num_ranks} ranks of the model axis can send each other, as "
        f"{pin} asks: tokens that the ranks divide, taken by one index of rows, grouped products of them by "
        f"experts that the ranks divide, and no buffer that backward changes; found none, of a batch of {tokens}"
    )


def _keep_readers(
    ways: ShardingWays, rules: dict[fx.Node, list[Rule]], node: fx.Node, module: str, lies: Collection[Placement]
) -> None:
    """Leave the forward of ``module`` the rules that read a value as it lies, where it can: a pin is about products."""
    for reader, place in _forward_readers(node, module):
        first = ways.classes.first[reader]
        left = [rule for rule in rules[first] if rule.inputs[place] in lies]
        if not left:
            continue
        rules[first] = left
        given = [rule.outputs[0] for rule in left]
        if len(read_tensors(reader)) == 1 and len(results_of(reader)) == 1:
            _keep_readers(ways, rules, reader, module, [placement for placement in given if placement is not None])


def _module_outputs(step: StepGraph) -> dict[str, list[fx.Node]]:
    """For each module, what it gives in forward to what is outside it, of tokens and features in floating point."""
    given: dict[str, list[fx.Node]] = {}
    for node in step.calls():
        layer = origin(node).layer
        if not layer or origin(node).phase is not Phase.FORWARD or not _has_tokens(node):
            continue
        readers = [origin(user).layer for user in node.users if user.op == "call_function"]
        if not all(is_within(reader, layer) for reader in readers):
            given.setdefault(layer, []).append(node)
    return given


def _has_tokens(node: fx.Node) -> bool:
    tensors = results_of(node)
    return len(tensors) == 1 and tensors[0] is not None and tensors[0].ndim >= 2 and tensors[0].is_floating_point()


def _placements_for(ways: ShardingWays, node: fx.Node, pin: Pin) -> Collection[Placement]:
    """The placements of a parameter that do as ``pin`` says, of those it may have."""
    possible = ways.placeholders[ways.classes.first[node]]
    shards = [placement for placement in possible if isinstance(placement, Sharded)]
    ndim = tensor(node).ndim
    meaning = TP_STYLES.get(pin.word, pin.word)
    if meaning in ("replicated", "sequence"):
        return [REPLICATED]
    if meaning is None:
        return possible
    if meaning == EXCHANGE:  # a bias of experts is taken by its rows
        return [p for p in shards if p.dim == 0] if ndim > 2 else [REPLICATED]
    if ndim < 2:  # a bias goes with what the product gives: parts, or a sum that it is added to once
        is_row = meaning in ("row", -1)
        return [REPLICATED] if is_row or not shards else shards
    if isinstance(meaning, int):  # a dimension, from the front or the back
        return [p for p in shards if p.dim == meaning % ndim]
    return [p for p in shards if meaning in _effects(ways, node, p, pin.module)]


def _effects(ways: ShardingWays, node: fx.Node, lies: Placement, module: str) -> Iterator[str]:
    """Results of the forward of ``module`` for a weight with this placement."""
    for reader, place in _forward_readers(node, module):
        read = read_tensors(reader)
        for rule in ways.rules[ways.classes.first[reader]]:
            if rule.inputs[place] != lies:
                continue
            given = rule.outputs[0]
            if len(read) == 1 and given is not None:
                yield from _effects(ways, reader, given, module)
            others = [p for s, p in zip(read, rule.inputs, strict=True) if s is not read[place] and tensor(s).ndim > 1]
            if isinstance(given, Partial):
                yield "row"
            elif isinstance(given, Sharded) and len(read) > 1 and all(isinstance(p, Replicated) for p in others):
                yield "column"


def _forward_readers(node: fx.Node, module: str) -> list[tuple[fx.Node, int]]:
    """The forward calls of ``module``, or of all where it has none, that read a node, and as which tensor."""
    users = [user for user in node.users if user.op == "call_function" and origin(user).phase is Phase.FORWARD]
    own = [user for user in users if origin(user).layer == module]
    return [(user, place) for user in own or users for place, s in enumerate(read_tensors(user)) if s is node]


def _is_along(placement: Placement | None, dim: int) -> bool:
    return isinstance(placement, Sharded) and placement.dim == dim


def _conflict(ways: ShardingWays, node: fx.Node, pin: Pin) -> str:
    """The error for a parameter that cannot be placed as ``pin`` says: the first product that reads it has no such
    rule."""
    reader, module = node, pin.module
    while following := _forward_readers(reader, module):
        reader = following[0][0]
        if len(read_tensors(reader)) > 1:
            break
    possible = ", ".join(map(str, ways.placeholders[ways.classes.first[node]]))
    return (
        f"expected {placeholder(node).name}, {list(tensor(node).shape)}, to lie on {ways.num_ranks} ranks of the model "
        f"axis as {pin} asks, found {_operator(reader)} in the way, with which it can lie {possible}: pin it "
        f"otherwise, or give the axis another number of ranks"
    )


def _operator(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "no operator that reads it in forward"
    shapes = " and ".join(str(list(tensor(source).shape)) for source in read_tensors(node))
    return f"{node.name} ({target_name(node)} of {shapes}) {source_line(node)}".rstrip()


def _names_nothing(pattern: str, word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern, known, _NEAREST, cutoff=0.4) or known[:_NEAREST]
    return (
        f"expected shardings to name modules with parameters, or parameters, or patterns of names such as "
        f"'layers.*.up', found {pattern!r}: {word!r}, which names none; near it are {', '.join(near)}"
    )
