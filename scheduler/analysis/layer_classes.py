"""Classes of nodes that do the same work in equal layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, fx

from zerofx.ir.facts import Role, origin, placeholder, value
from zerofx.ir.graph import StepGraph


@dataclass(frozen=True)
class NodeClasses:
    """The nodes of a step, each with the first that does the same: at the same place of a layer that is alike.

    ``first`` has a node of the graph for every node, itself where no other layer has its like. ``members`` has, for
    each first node, all nodes that it stands for in the graph's order.
    """

    first: Mapping[fx.Node, fx.Node]
    members: Mapping[fx.Node, tuple[fx.Node, ...]]


def node_classes(step: StepGraph, marks: Mapping[fx.Node, str] = MappingProxyType({})) -> NodeClasses:
    """The classes of a captured graph's nodes; ``marks`` tell nodes apart that are alike.

    Layers are alike whose nodes, in order, call the same with the same arguments and shapes, as far as these lie in the
    layer; parameters that are read in one layer alone belong to it.
    """
    alike: dict[tuple[object, ...], list[list[fx.Node]]] = {}
    for layer in layers_of(step, marks).values():
        alike.setdefault(layer.signature, []).append(layer.nodes)
    first = {node: node for node in step.graph.nodes}
    for same in alike.values():
        for places in zip(*same, strict=True):
            first.update(dict.fromkeys(places, places[0]))
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, like in first.items():
        members.setdefault(like, []).append(node)
    return NodeClasses(first, {node: tuple(same) for node, same in members.items()})


@dataclass(frozen=True)
class Layer:
    """A layer's nodes in the graph's order, and what it has in common with those that are alike."""

    nodes: list[fx.Node]
    signature: tuple[object, ...]


def layers_of(step: StepGraph, marks: Mapping[fx.Node, str] = MappingProxyType({})) -> dict[str, Layer]:
    """The repeated layers by name, in the order in which they, or their parameters, come; ``marks`` as above."""
    layers: dict[str, list[fx.Node]] = {}
    unit_of = _units(step)
    for node in step.graph.nodes:
        if unit := unit_of.get(node):
            layers.setdefault(unit, []).append(node)
    return {unit: Layer(nodes, _signature(nodes, marks)) for unit, nodes in layers.items()}


def _units(step: StepGraph) -> dict[fx.Node, str]:
    """The layer of each node in one: calls by their origin, placeholders of parameters by who reads them."""
    units = {node: unit for node in step.calls() if (unit := step.unit_of(node))}
    for node in step.placeholders(Role.PARAMETER):
        readers = {units.get(user, "") for user in node.users}
        if len(readers) == 1 and (unit := next(iter(readers))):
            units[node] = unit
    return units


def _signature(nodes: list[fx.Node], marks: Mapping[fx.Node, str]) -> tuple[object, ...]:
    place = {node: number for number, node in enumerate(nodes)}

    def argument(source: fx.Node) -> str:
        return f"node {place[source]}" if source in place else f"outside {_shape(source)}"

    return tuple(
        (
            str(node.target) if node.op == "call_function" else placeholder(node).role,
            origin(node).phase,
            str(fx.map_arg((node.args, node.kwargs), argument)),
            _shape(node),
            marks.get(node, ""),
        )
        for node in nodes
    )


def _shape(node: fx.Node) -> str:
    given = node.meta.get("val")
    tensors = given if isinstance(given, list | tuple) else [value(node)] if given is not None else []
    return str([(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in tensors])
