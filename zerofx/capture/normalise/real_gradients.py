"""Give a complex parameter's gradient as real numbers; one that is to be conjugated when it is read is so first.

    g: complex64[4], conjugated when read     ->     c = clone(g); r: float32[4, 2] = view_as_real(c)

Does not handle: anything but gradients; the parameters themselves are for ``real_parameters.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import origin, value


@dataclass(frozen=True)
class RealGradients:
    """Give the gradients of complex parameters as real numbers."""

    name: str = "real_gradients"

    def run(self, joint: Joint) -> None:
        outputs = joint.outputs
        outputs.gradients = [(name, _as_real(joint.graph, node)) for name, node in outputs.gradients]


def _as_real(graph: fx.Graph, node: fx.Node) -> fx.Node:
    aten, where = torch.ops.aten, origin(node)
    if not value(node).is_complex():
        return node
    for target in (aten.clone.default, aten.view_as_real.default)[0 if value(node).is_conj() else 1 :]:
        fake = value(node).resolve_conj() if target is aten.clone.default else torch.view_as_real(value(node))
        with graph.inserting_after(node):
            node = insert_call(graph, target, (node,), where, fake=fake)
    return node
