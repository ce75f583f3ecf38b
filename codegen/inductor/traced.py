"""A region as it was traced, on its way to Inductor: what the rewrites of regions edit, and nodes that they put in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx

from zerofx.ir.edit import Rewrite
from zerofx.torch_private.operators import OpOverload


@dataclass
class TracedRegion:
    """A traced region, whose nodes have fake values in ``meta["val"]``.

    ``module`` has the graph, ``mode`` makes its fake values. ``retraced`` traces a function of the region's inputs with
    the decompositions that regions are compiled with. ``kernels``: those of zerofx's own that it uses
    (``codegen/kernels/table.py``). ``views``: what the graph takes, in order, once views of the region's inputs are
    hoisted (``hoist_views.py``): pairs of an input's index and ``as_strided`` arguments, none for all of it.
    """

    module: fx.GraphModule
    mode: Any
    retraced: Callable[[Callable[..., Any]], fx.GraphModule]
    kernels: frozenset[str]
    views: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


RegionRewrite: TypeAlias = Rewrite[[TracedRegion]]


def call(graph: fx.Graph, target: OpOverload, args: tuple[object, ...]) -> fx.Node:
    """A node with its fake value; called in the fake mode of the others'."""
    node = graph.call_function(target, args)  # type: ignore[arg-type]  # fx's own argument types
    given = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    node.meta["val"] = target(*given)
    return node


def as_node(argument: object) -> fx.Node:
    """An argument that is a node."""
    assert isinstance(argument, fx.Node)
    return argument
