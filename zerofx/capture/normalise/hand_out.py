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
        sources = [_source(extra, partial(returned.shows, index)) for index, extra in enumerate(extras)]
        pairs = list(zip(extras, sources, strict=True))
        whole = {index for index, (extra, source) in enumerate(pairs) if source is None or _is_all_of(extra, source)}
        joint.step.returned = replace(returned, whole=frozenset(whole))
        joint.outputs.extras = [_copy(joint.graph, extra) if source is None else source for extra, source in pairs]


def _source(node: fx.Node, shows: Callable[[torch.Tensor, torch.Tensor], bool]) -> fx.Node | None:
    """What ``node`` is a view of, where the step has made that memory and ``shows`` says that the view can be made.

    A part of what was laid out as a kernel does (``compat/strides.py``) is not shown: another forward, which is not
    traced, says how parts lie, and knows of no such layout.
    """
    source = node
    while (further := aliased_input(source)) is not None:
        source = further
    is_shown = _is_all_of(node, source) or "memory_format" not in source.kwargs
    return source if source.op != "placeholder" and is_shown and shows(value(source), value(node)) else None


def _is_all_of(node: fx.Node, source: fx.Node) -> bool:
    """Whether the two are one tensor."""
    part: torch.Tensor = value(node)
    whole: torch.Tensor = value(source)
    return part.shape == whole.shape and part.stride() == whole.stride() and part.dtype == whole.dtype


def _copy(graph: fx.Graph, node: fx.Node) -> fx.Node:
    last = node if node.op != "placeholder" else list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        return insert_call(graph, torch.ops.aten.clone.default, (node,), origin(node), fake=value(node).clone())
