"""Hand out, next to the loss, what a view is of where that is the step's own memory, and a copy of what is not.

    y = view(x, [2, 4]); return loss, y             y = view(x, [2, 4]); return loss, x
    return loss, batch_0                     ->     copied = clone(batch_0); return loss, copied

A view is made again of what was handed out (``zerofx/ir/returned.py``), where that can be.

Does not handle: the loss itself (``own_loss.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx

from zerofx.capture.normalise.joint import Joint
from zerofx.ir.aliasing import aliased_input
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import origin, value


@dataclass(frozen=True)
class HandOut:
    """Hand out what is in the step's own memory, or copies."""

    name: str = "hand_out"

    def run(self, joint: Joint) -> None:
        returned, extras = joint.lossy.returned, joint.outputs.extras
        wholes = [_whole(extra, partial(returned.shows, index)) for index, extra in enumerate(extras)]
        copied = frozenset(index for index, whole in enumerate(wholes) if whole is None)
        joint.step.returned = replace(returned, copied=copied)
        joint.outputs.extras = [
            _copy(joint.graph, extra) if whole is None else whole for extra, whole in zip(extras, wholes, strict=True)
        ]


def _whole(node: fx.Node, shows: Callable[[torch.Tensor, torch.Tensor], bool]) -> fx.Node | None:
    """What ``node`` is a view of, where the step has made that memory and ``shows`` says that the view can be made."""
    source = node
    while (further := aliased_input(source)) is not None:
        source = further
    if source.op != "placeholder" and shows(value(source), value(node)):
        return source
    return None


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    last = node if node.op != "placeholder" else list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        return insert_call(graph, torch.ops.aten.clone.default, (node,), origin(node), fake=value(node).clone())
