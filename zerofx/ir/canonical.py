"""A step's graph as text: all that plans depend on, and a form without node names to compare graphs by structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import Origin, Placeholder, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.text import BareText


def graph_parts(step: StepGraph) -> tuple[str, ...]:
    """All that plans and passes read of a captured graph: graphs with equal parts lead to the same plan.

    The values of constants, and the classes of what a model returns, are not among it.
    """
    return (
        step.text(), canonical(step.graph), str(step.device), repr(step.parameters), repr(sorted(step.units)),
        repr((step.mutation_names, step.gradient_names, step.num_extras, sorted(step.returned.whole))),
        repr((step.num_micro_batches, step.by_layer, step.num_before, step.slices, step.shardings, step.overlaps)),
        repr((step.products, sorted(step.cut_pieces), step.guarded, step.pipe)),
    )  # fmt: skip


def canonical(graph: fx.Graph) -> str:
    """The graph as text without names, a line for each node: equal for graphs that are equal but for names."""
    numbers: dict[fx.Node, Number] = {}
    lines = []
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        numbers[node] = Number.from_place(len(numbers))
        facts = placeholder(node) if node.op == "placeholder" else origin(node)
        lines.append(canonical_line(node.op, node.target, arguments, facts, describe_value(node)))
    return "\n".join(lines)


def canonical_line(op: str, target: Any, arguments: Any, facts: Placeholder | Origin, value: str) -> str:
    """A node's line of ``canonical``; ``arguments`` has other nodes as ``Number``."""
    return f"{op} {facts} : {value}" if op == "placeholder" else f"{op} {target} {arguments} {facts} : {value}"


class Number(BareText):
    """A node by its place in a graph, ``%7``."""

    @staticmethod
    def from_place(place: int) -> Number:
        return Number(f"%{place}")

    @property
    def place(self) -> int:
        return int(self[1:])


def describe_value(node: fx.Node) -> str:
    """Dtypes, shapes, strides and devices of a node's result, as text."""

    def describe(fake: Any) -> str:
        if isinstance(fake, torch.Tensor):
            return f"{fake.dtype} {tuple(fake.shape)} {tuple(fake.stride())} {fake.device}"
        if isinstance(fake, list | tuple):
            return f"({', '.join(map(describe, fake))})"
        return fake if isinstance(fake, str) else type(fake).__name__

    return describe(node.meta.get("val"))
