"""The lines of a forward's record, one a node. A graph is made of them only where one is edited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from zerofx.ir.canonical import Number, canonical_line
from zerofx.ir.facts import Origin, Placeholder, set_origin, set_placeholder, set_value

NO_VALUE = type(None).__name__  # as ``canonical`` writes it


@dataclass(slots=True)
class Line:
    """A node: its arguments have others as ``Number``; ``value`` is the text of what it gives."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    what: Placeholder | Origin
    value: str = ""


def text_of(lines: Iterable[Line]) -> str:
    """What ``canonical`` gives for ``graph_of(lines)``."""
    return "\n".join(
        canonical_line(line.op, line.target, (line.args, line.kwargs), line.what, line.value) for line in lines
    )


def graph_of(lines: Sequence[Line]) -> fx.Graph:
    """The lines as a graph, whose values are texts."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    for line in lines:
        args, kwargs = map_aggregate(
            (line.args, line.kwargs), lambda leaf: nodes[leaf.place] if isinstance(leaf, Number) else leaf
        )
        if isinstance(line.what, Placeholder):
            node = set_placeholder(set_value(graph.placeholder("given"), line.value), line.what)
        elif line.op == "output":
            node = graph.output(args[0])
        else:
            node = set_value(graph.create_node(line.op, line.target, args, kwargs), line.value)
            set_origin(node, line.what)
        nodes.append(node)
    return graph
