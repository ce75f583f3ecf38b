"""Add up the gradients of what is used several times in the order in which backward makes them, as autograd does.

    gradient of embed.weight = a                              total = add(b, a)
    gradient of head.weight = b, which is made first    ->    gradient of embed.weight = total

Under each of its names a trace has summed what that name is used for: such sums are taken apart first, where nothing
else reads them.

Does not handle: sums that something else reads, too, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.edit import after, insert_call
from zerofx.ir.facts import origin, value


@dataclass(frozen=True)
class SumGradients:
    """Add up the gradients of what is used several times in the order of backward."""

    name: str = "sum_gradients"

    def run(self, joint: Joint) -> None:
        arrived: dict[str, list[fx.Node]] = {}
        for name, node in joint.outputs.gradients:
            arrived.setdefault(name, []).append(node)
        joint.outputs.gradients = [(name, _sum(joint.graph, nodes)) for name, nodes in arrived.items()]


def _sum(graph: fx.Graph, gradients: list[fx.Node]) -> fx.Node:
    order = {node: i for i, node in enumerate(graph.nodes)}
    terms = (term for gradient in gradients for term in _terms(gradient))
    total, *others = sorted(terms, key=order.__getitem__)
    for late in others:
        with graph.inserting_after(max(after(late), total)):  # nodes compare by their place in the graph
            total = insert_call(graph, torch.ops.aten.add.Tensor, (total, late), origin(late), fake=value(late))
    return total


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """What a gradient is the sum of, where nothing else reads it."""
    is_sum = gradient.target is torch.ops.aten.add.Tensor and len(gradient.users) == 1 and not gradient.kwargs
    if is_sum and len(gradient.all_input_nodes) == 2:
        for term in gradient.all_input_nodes:
            yield from _terms(term)
    else:
        yield gradient
