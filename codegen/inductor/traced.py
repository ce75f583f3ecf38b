"""Nodes of a region's traced graph, which Inductor is given."""

from __future__ import annotations

from torch import fx

from zerofx.torch_private.operators import OpOverload


def call(
    graph: fx.Graph, target: OpOverload, args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> fx.Node:
    """A node with its fake value; called in the fake mode of the others'."""
    node = graph.call_function(target, args, kwargs or {})  # type: ignore[arg-type]  # fx's own argument types
    given = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    node.meta["val"] = target(*given, **node.kwargs)
    return node


def as_node(argument: object) -> fx.Node:
    """An argument that is a node."""
    assert isinstance(argument, fx.Node)
    return argument
