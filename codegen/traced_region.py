"""The operators that a region's function calls, as a graph: what is made of them is made from the region's own text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

RegionFunction = Callable[[list[Any]], Any]


def trace_region(function: RegionFunction, num_inputs: int) -> tuple[fx.Graph, object]:
    """The operators that ``function`` calls, and what it returns; a placeholder's ``meta["number"]`` is its input's."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    nodes = [graph.placeholder(f"x{number}") for number in range(num_inputs)]
    for number, node in enumerate(nodes):
        node.meta["number"] = number
    result = function([fx.Proxy(node, tracer) for node in nodes])
    return graph, result
