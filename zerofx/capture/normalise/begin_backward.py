"""Make d(loss)/d(loss) = 1 where backward begins, after what the forward checks of values.

    holds = all(condition)                           holds = all(condition)
    ...                                      ->      one = asserted(full([], 1.0), holds, "...")
    gradient = mul(tangent, x)                       gradient = mul(one, x)

Forward holds nothing for it. Where a check fails, a step ends before its updates.

Does not handle: other tangents than the loss's, of which there are none: extras have no gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir import ops
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase, origin, value
from zerofx.torch_private.capture import TangentAOTInput


@dataclass(frozen=True)
class BeginBackward:
    """Make the loss's own gradient, 1, where backward begins, after the forward's checks of values."""

    name: str = "begin_backward"

    def run(self, joint: Joint) -> None:
        graph = joint.graph
        for node in list(graph.find_nodes(op="placeholder")):
            if isinstance(node.meta.get("desc"), TangentAOTInput):
                seed = _replace_tangent(graph, node)
                if seed is not None:
                    _assert_values(graph, seed, joint.checks())


def _replace_tangent(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Put a 1 in the place of the tangent; None where nothing reads it."""
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
    """Let backward begin after the checks."""
    readers = set(tangent.users)
    for holds, text in checks:
        with graph.inserting_after(tangent):
            args, where = (tangent, holds, text), origin(tangent)
            asserted = insert_call(graph, ops.asserted, args, where, fake=value(tangent))
        tangent.replace_all_uses_with(asserted, readers.__contains__)
        tangent = asserted
