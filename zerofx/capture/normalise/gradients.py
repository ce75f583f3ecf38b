"""Gradients in a traced joint graph: where backward begins, as real numbers, summed in autograd's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir import ops
from zerofx.ir.edit import insert_call, skip_getitems
from zerofx.ir.facts import Origin, Phase, origin, value
from zerofx.torch_private.capture import TangentAOTInput


@dataclass(frozen=True)
class SumGradients:
    """Sum the gradients of a tensor that is used several times in the order of backward.

        gradient of embed.weight = a                              total = add(b, a)
        gradient of head.weight = b, which is made first    ->    gradient of embed.weight = total

    A trace has summed the gradients of each name's uses: such sums are taken apart first, where nothing else reads
    them.

    Does not handle: sums that something else reads, too, which stay as they are.
    """

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
        with graph.inserting_after(max(skip_getitems(late), total)):  # nodes compare by their place in the graph
            total = insert_call(graph, torch.ops.aten.add.Tensor, (total, late), origin(late), fake=value(late))
    return total


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """The terms that a gradient is the sum of, where nothing else reads the sum."""
    is_sum = gradient.target is torch.ops.aten.add.Tensor and len(gradient.users) == 1 and not gradient.kwargs
    if is_sum and len(gradient.all_input_nodes) == 2:
        for term in gradient.all_input_nodes:
            yield from _terms(term)
    else:
        yield gradient


@dataclass(frozen=True)
class BeginBackward:
    """Make the loss's own gradient, 1, where backward begins, after the forward's checks of values.

        holds = all(condition)                           holds = all(condition)
        ...                                      ->      one = asserted(full([], 1.0), holds, "...")
        gradient = mul(tangent, x)                       gradient = mul(one, x)

    The forward keeps no memory for it. If a check fails, the step ends before its updates.

    Does not handle: other tangents than the loss's, of which there are none: extras have no gradients.
    """

    name: str = "begin_backward"

    def run(self, joint: Joint) -> None:
        graph = joint.graph
        for node in list(graph.find_nodes(op="placeholder")):
            if isinstance(node.meta.get("desc"), TangentAOTInput):
                seed = _replace_tangent(graph, node)
                if seed is not None:
                    _assert_values(graph, seed, joint.checks())


def _replace_tangent(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Replace the tangent by a 1; None where nothing reads it."""
    if not node.users:
        graph.erase_node(node)
        return None
    first = min(node.users, key={n: i for i, n in enumerate(graph.nodes)}.__getitem__)
    fake = node.meta["val"]
    with graph.inserting_before(first):
        options = {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
        where = Origin(origin(first).layer, Phase.BACKWARD)
        seed = insert_call(graph, torch.ops.aten.full.default, ([], 1.0), where, options, fake=fake)
    node.replace_all_uses_with(seed)
    graph.erase_node(node)
    return seed


def _assert_values(graph: fx.Graph, tangent: fx.Node, checks: Iterable[tuple[fx.Node, str]]) -> None:
    """Make backward begin after the checks."""
    readers = set(tangent.users)
    for holds, text in checks:
        with graph.inserting_after(tangent):
            args, where = (tangent, holds, text), origin(tangent)
            asserted = insert_call(graph, ops.asserted, args, where, fake=value(tangent))
        tangent.replace_all_uses_with(asserted, readers.__contains__)
        tangent = asserted


@dataclass(frozen=True)
class RealGradients:
    """Give the gradients of complex parameters as real numbers.

        g: complex64[4], conjugated when read     ->     c = clone(g); r: float32[4, 2] = view_as_real(c)

    Does not handle: anything but gradients; the parameters themselves are for ``RealParameters``.
    """

    name: str = "real_gradients"

    def run(self, joint: Joint) -> None:
        outputs = joint.outputs
        outputs.gradients = [(name, _view_as_real(joint.graph, node)) for name, node in outputs.gradients]


def _view_as_real(graph: fx.Graph, node: fx.Node) -> fx.Node:
    aten, where = torch.ops.aten, origin(node)
    if not value(node).is_complex():
        return node
    for target in (aten.clone.default, aten.view_as_real.default)[0 if value(node).is_conj() else 1 :]:
        fake = value(node).resolve_conj() if target is aten.clone.default else torch.view_as_real(value(node))
        with graph.inserting_after(node):
            node = insert_call(graph, target, (node,), where, fake=fake)
    return node
