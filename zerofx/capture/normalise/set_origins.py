"""Write down layer, phase and source line of every call.

    mm(x, w)     custom: layer "layers.0"     ->    mm(x, w)     # layers.0 forward
    mm(one, w)   reads the tangent            ->    mm(one, w)   # layers.0 backward

Backward starts at the first node that depends on the tangent. A node without a layer of its own (the sum of two
gradients that flow into one tensor) belongs with its latest argument, whose arrival triggered it.

Does not handle: gradients that a forward computes (``torch.autograd.grad``), which are part of forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.layers import LAYER_KEY, LINE_KEY
from zerofx.capture.normalise.joint import Joint
from zerofx.errors import InternalError
from zerofx.ir.facts import Origin, Phase, origin, set_origin, set_source_line
from zerofx.torch_private.capture import is_tangent
from zerofx.torch_private.modules import annotations_of


@dataclass(frozen=True)
class SetOrigins:
    """Write down layer, phase and source line of every call."""

    name: str = "set_origins"

    def run(self, joint: Joint) -> None:
        set_origins(joint.graph, has_layers=bool(joint.step.units))


def set_origins(graph: fx.Graph, *, has_layers: bool) -> None:
    """Write layer, phase and source line of every call, for a model that has layers or not.

    Raises:
        InternalError: no node of the forward, or none of the backward, was told its layer.
    """
    are_told: dict[Phase, bool] = {}
    phase = Phase.FORWARD
    order: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.nodes):
        order[node] = position
        if node.op != "call_function":
            continue
        if any(map(is_tangent, node.all_input_nodes)):
            phase = Phase.BACKWARD
        annotations = annotations_of(node)
        set_source_line(node, annotations.get(LINE_KEY, ""))
        layer = annotations.get(LAYER_KEY)
        are_told[phase] = are_told.get(phase, False) or layer is not None
        if layer is None and node.all_input_nodes:
            layer = origin(max(node.all_input_nodes, key=order.__getitem__)).layer
        set_origin(node, Origin(layer or "", phase))
    if has_layers and not all(are_told.values()):
        phase = next(phase for phase, is_told in are_told.items() if not is_told)
        raise InternalError(
            f"expected torch to tell the nodes that it traces which layer made them, as torch 2.13 does, found none of "
            f"the {phase.value} that knows with torch {torch.__version__}: all layers would be taken for one. Please "
            f"report it"
        )
