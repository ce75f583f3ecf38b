"""Make the graph of a deep model from that of one with four layers: check that layers repeat, and copy them.

The second layer and the third (the last but one of the whole) are compared node by node. If every argument of the third
is the second's argument one layer further, the layers between are written by the same rule::

    0 1 2 3   ->   0 1 a b c 2 3        forward: each reads the layer before it
    3 2 1 0   ->   3 2 c b a 1 0        backward: each reads the layer after it

Does not handle: layers that read a layer further away than the next, nodes outside the layers that read one of the
middle layers, layers that run more than once. These are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from zerofx.capture.by_layer.repeats import Repeat
from zerofx.ir.canonical import describe_value
from zerofx.ir.facts import Role, origin, placeholder, set_origin, set_placeholder
from zerofx.ir.graph import StepGraph


class NotRepeatedError(Exception):
    """The layers are not alike; the message says where."""


@dataclass(frozen=True)
class _Reference:
    """A node of a layer: ``ordinal`` in the layer that is ``shift`` layers further."""

    shift: int
    ordinal: int


@dataclass(frozen=True)
class Stamped:
    """The nodes that were made: ``layers[i]`` are the nodes of the layer ``keys[i + 1]`` in the order of the graph."""

    repeat: Repeat
    layers: tuple[tuple[fx.Node, ...], ...]


def stamp(graph: fx.Graph, repeat: Repeat) -> Stamped:
    """Put ``repeat.middle`` into ``graph``, which has the captured layers only. Outputs stay as they are.

    Raises:
        NotRepeatedError: the graph does not repeat; it may have been changed.
    """
    pair = _Pair.match(graph, repeat)
    layers: list[list[fx.Node | None]] = [[None] * len(pair.second) for _ in repeat.middle]
    whole: list[Sequence[fx.Node | None]] = [pair.second, *layers, pair.third]

    def resolve(template: Any, position: int) -> Any:
        def find(leaf: Any) -> Any:
            if not isinstance(leaf, _Reference):
                return leaf
            node = whole[position + leaf.shift][leaf.ordinal]
            if node is None:
                raise NotRepeatedError(f"{repeat.path} reads what comes later")
            return node

        return map_aggregate(template, find)

    for own, ascending, where in pair.stretches:
        for position in range(1, len(layers) + 1) if ascending else range(len(layers), 0, -1):
            for ordinal in own:
                args, kwargs = resolve(pair.templates[ordinal], position)
                with graph.inserting_before(where):
                    copied = _copy(graph, pair.second[ordinal], args, kwargs, repeat, repeat.keys[position + 1])
                layers[position - 1][ordinal] = copied
    for position, nodes in ((0, pair.second), (len(layers) + 1, pair.third)):
        for ordinal, node in enumerate(nodes):
            template = pair.ends[position > 0][ordinal]
            node.args, node.kwargs = resolve(template, position)
    return Stamped(repeat, tuple(tuple(node for node in layer if node is not None) for layer in whole))


def shrink(graph: fx.Graph, repeat: Repeat) -> Mapping[fx.Node, fx.Node]:
    """Take the last but one of the captured layers out of ``graph``; returns the node that replaces each of its nodes.

    Nothing is erased, and outputs stay as they are, until ``erase_layer``.
    """
    pair = _Pair.match(graph, repeat)
    for ordinal, (node, further) in enumerate(zip(pair.second, pair.third, strict=True)):
        both = (node.args, node.kwargs), (further.args, further.kwargs)
        node.args, node.kwargs = _shrink(pair.templates[ordinal], *both, pair.second)
    others = dict(zip(pair.third, pair.second, strict=True))
    for node in graph.nodes:
        if node.op != "output" and node not in others:
            node.args, node.kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda node_read: others.get(node_read, node_read)
            )
    return others


def add_outputs(step: StepGraph, stamped: Stamped) -> None:
    """Give ``step`` the buffer updates and gradients of the layers that were put in.

    Raises:
        NotRepeatedError: one of the layers has other outputs than another.
    """
    step.set_outputs(step.loss, _extend_outputs(step.mutations, stamped), _extend_outputs(step.gradients, stamped))


def erase_layer(step: StepGraph, repeat: Repeat, nodes: Mapping[fx.Node, fx.Node]) -> None:
    """Erase what ``shrink`` has replaced, and the outputs of that layer: buffer updates and gradients."""
    gone = repeat.unit(repeat.sample[2]) + "."
    step.set_outputs(
        step.loss,
        {name: node for name, node in step.mutations.items() if not name.startswith(gone)},
        {name: node for name, node in step.gradients.items() if not name.startswith(gone)},
    )
    for node in reversed(list(step.graph.nodes)):
        if node in nodes:
            step.graph.erase_node(node)


@dataclass(frozen=True)
class _Pair:
    """Two neighbouring layers that are alike: ``templates`` are the arguments of both, ``ends`` the arguments of either
    where its neighbour on the far side stays as it is.

    ``stretches`` are runs of nodes of both layers: the ordinals of one layer's share, whether the second layer comes
    first, and the node before which the middle layers are inserted.
    """

    second: list[fx.Node]
    third: list[fx.Node]
    templates: list[Any]
    ends: tuple[list[Any], list[Any]]
    stretches: list[tuple[list[int], bool, fx.Node]]

    @staticmethod
    def match(graph: fx.Graph, repeat: Repeat) -> _Pair:
        first, second, third, fourth = ([*_nodes_of(graph, repeat.unit(key))] for key in repeat.sample)
        units = [repeat.unit(key) for key in repeat.sample]
        if len(second) != len(third) or not second:
            raise NotRepeatedError(f"{units[1]} has {len(second)} nodes, {units[2]} {len(third)}")
        ordinals = [{node: i for i, node in enumerate(nodes)} for nodes in (first, second, third, fourth)]
        templates: list[Any] = []
        ends: tuple[list[Any], list[Any]] = ([], [])
        for ordinal, (of_second, other) in enumerate(zip(second, third, strict=True)):
            here, there = (
                (node.op, node.op == "placeholder" or node.target, describe_value(node), _label(node)[len(unit) :])
                for node, unit in ((of_second, units[1]), (other, units[2]))
            )
            if here != there:
                raise NotRepeatedError(
                    f"{of_second.name} of {units[1]} is {here}, {other.name} of {units[2]} is {there}"
                )
            unify = _unifier(
                ordinals, f"{of_second.name} and {other.name} (node {ordinal} of {units[1]} and {units[2]})"
            )
            arguments = (of_second.args, of_second.kwargs), (other.args, other.kwargs)
            templates.append(_zip(*arguments, unify))
            ends[0].append(_zip(*arguments, partial(_end, unify, -1)))
            ends[1].append(_zip(*arguments, partial(_end, unify, 1)))
        _check_users(ordinals, units)
        return _Pair(second, third, templates, ends, list(_stretches(graph, ordinals[1], ordinals[2])))


_Unify = Callable[[fx.Node, fx.Node], Any]


def _end(unify: _Unify, shift: int, left: fx.Node, other: fx.Node) -> Any:
    """The argument of the second layer's node, where the layer before it stays (``shift`` is -1), or of the third's,
    where the one after it does (1)."""
    end = unify(left, other)
    stays = left if shift < 0 else other
    return stays if isinstance(end, _Reference) and end.shift == shift else end


def _unifier(ordinals: Sequence[Mapping[fx.Node, int]], where: str) -> _Unify:
    first, second, third, fourth = ordinals

    def unify(left: fx.Node, other: fx.Node) -> Any:
        if left in second and other in third and second[left] == third[other]:
            return _Reference(0, second[left])
        if left in first and other in second:
            return _Reference(-1, second[other])
        if left in third and other in fourth:
            return _Reference(1, third[left])
        if left is other and left not in second and left not in third:
            return left
        raise NotRepeatedError(f"{where} read {left} and {other}")

    return unify


def _zip(left: Any, other: Any, unify: _Unify) -> Any:
    """Merge two structures of arguments into one; ``unify`` is called for each pair of nodes."""
    if isinstance(left, fx.Node) and isinstance(other, fx.Node):
        return unify(left, other)
    if isinstance(left, tuple | list) and type(left) is type(other) and len(left) == len(other):
        zipped = [_zip(a, b, unify) for a, b in zip(left, other, strict=True)]
        return zipped if isinstance(left, list) else tuple(zipped)
    if isinstance(left, dict) and isinstance(other, dict) and list(left) == list(other):
        return {key: _zip(left[key], other[key], unify) for key in left}
    if type(left) is not type(other) or repr(left) != repr(other):
        raise NotRepeatedError(f"layers with different arguments: {left!r} and {other!r}")
    return left


def _shrink(template: Any, own: Any, further: Any, second: Sequence[fx.Node]) -> Any:
    """The arguments of a node of the second layer when the fourth follows it; ``further``: those of the third's."""
    if isinstance(template, _Reference):
        return second[template.ordinal] if template.shift == 0 else own if template.shift < 0 else further
    if isinstance(template, tuple | list):
        items = [_shrink(*three, second) for three in zip(template, own, further, strict=True)]
        return items if isinstance(template, list) else tuple(items)
    if isinstance(template, dict):
        return {key: _shrink(template[key], own[key], further[key], second) for key in template}
    return template


def _check_users(ordinals: Sequence[Mapping[fx.Node, int]], units: Sequence[str]) -> None:
    for number, neighbours in ((1, (0, 1, 2)), (2, (1, 2, 3))):
        for node in ordinals[number]:
            for user in node.users:
                if user.op != "output" and not any(user in ordinals[neighbour] for neighbour in neighbours):
                    raise NotRepeatedError(
                        f"{user.name}, which is in no neighbour of {units[number]}, reads {node.name}"
                    )


def _stretches(
    graph: fx.Graph, second: Mapping[fx.Node, int], third: Mapping[fx.Node, int]
) -> Iterator[tuple[list[int], bool, fx.Node]]:
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node in second or node in third:
            run.append(node)
            continue
        if run:
            yield _halves(run, second, third)
        run = []
    assert not run, "the last node is the output"


def _halves(
    run: Sequence[fx.Node], second: Mapping[fx.Node, int], third: Mapping[fx.Node, int]
) -> tuple[list[int], bool, fx.Node]:
    ascending, length = run[0] in second, len(run) // 2
    earlier, later = (second, third) if ascending else (third, second)
    places = [earlier.get(node) for node in run[:length]]
    other = [later.get(node) for node in run[length:]]
    if places != other or None in places:
        raise NotRepeatedError(f"layers that take turns around {run[0].name}")
    return [ordinal for ordinal in places if ordinal is not None], ascending, run[length]


def _nodes_of(graph: fx.Graph, unit: str) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.op != "output" and (_label(node) == unit or _label(node).startswith(unit + ".")):
            yield node


def _label(node: fx.Node) -> str:
    if node.op != "placeholder":
        return origin(node).layer
    facts = placeholder(node)
    return facts.name if facts.role in (Role.PARAMETER, Role.BUFFER) else ""


def _copy(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any, repeat: Repeat, key: str) -> fx.Node:
    copied = graph.create_node(node.op, node.target, args, kwargs)
    copied.meta = dict(node.meta)
    length = len(repeat.unit(repeat.sample[1]))
    if node.op == "placeholder":
        set_placeholder(copied, replace(placeholder(node), name=repeat.unit(key) + placeholder(node).name[length:]))
    else:
        set_origin(copied, replace(origin(node), layer=repeat.unit(key) + origin(node).layer[length:]))
    return copied


def _extend_outputs(outputs: Mapping[str, fx.Node], stamped: Stamped) -> dict[str, fx.Node]:
    repeat, layers = stamped.repeat, stamped.layers
    second, third = (repeat.unit(repeat.sample[i]) + "." for i in (1, 2))
    inside = {name.removeprefix(second): node for name, node in outputs.items() if name.startswith(second)}
    of_third = {name.removeprefix(third): node for name, node in outputs.items() if name.startswith(third)}
    places = {name: layers[0].index(node) if node in layers[0] else None for name, node in inside.items()}
    there = {name: layers[-1].index(node) if node in layers[-1] else None for name, node in of_third.items()}
    if list(places.items()) != list(there.items()) or None in places.values():
        raise NotRepeatedError(f"{second[:-1]} and {third[:-1]} have different gradients or buffer updates")
    widened: dict[str, fx.Node] = {}
    pending = bool(inside)
    for name, node in outputs.items():
        if pending and name.startswith(third):
            pending = False
            for number, key in enumerate(repeat.middle, 1):
                for inner, ordinal in places.items():
                    assert ordinal is not None
                    widened[f"{repeat.unit(key)}.{inner}"] = layers[number][ordinal]
        widened[name] = node
    return widened
