"""Copy a loss that is a view: the step hands it out, and would hold or change what it shows.

    loss = view(x, [])                   view_1 = view(x, [])
    return loss, ...             ->      loss = clone(view_1); return loss, ...

``detach`` and ``alias`` of a loss with memory of its own are left as they are.

Does not handle: what is handed out next to the loss, as all that an evaluation gives is (``hand_out.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.aliasing import aliased_input
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import origin, value
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of


@dataclass(frozen=True)
class OwnLoss:
    """Copy a loss that is a view."""

    name: str = "own_loss"

    def run(self, joint: Joint) -> None:
        if joint.lossy.trains:
            joint.outputs.loss = _own_storage(joint.graph, joint.outputs.loss)


def _own_storage(graph: fx.Graph, loss: fx.Node) -> fx.Node:
    """The loss, or a copy of it where it is a view."""
    source: fx.Node | None = loss
    while source is not None and facts_of(source.target).kind is OperatorKind.IDENTITY:
        source = aliased_input(source)
    if source is not None and source.op != "placeholder" and aliased_input(source) is None:
        return loss
    with graph.inserting_after(loss):
        return insert_call(graph, torch.ops.aten.clone.default, (loss,), origin(loss), fake=value(loss))
