"""Let matrix products write into the buffers that their results would be copied to.

    grads_0 = empty_gradients(0, ...)                 grads_0 = empty_gradients(0, ...)
    gw = mm(gy, x)                                    slot = as_strided(grads_0, ...)
    slot = as_strided(grads_0, ...)                   gw = mm(gy, x, out=slot)
    copy_(slot, gw)

A weight's gradient is most of a backward's output: written once rather than three times, and never held twice. The
product is the same call of the same kernel, so its bits are the same.

Does not handle: products that something else reads too, that are laid out unlike the slot, that are added to what the
buffer has (the micro-batches after the first), or that come well before a buffer that is made late.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import value
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten


@dataclass(frozen=True)
class Direct:
    """Give ``mm`` the slots of gradient buffers as outputs."""

    name: str = "direct"

    def run(self, step: StepGraph, plan: Plan) -> None:
        order = step.positions()
        for copy in list(step.graph.find_nodes(op="call_function", target=_aten.copy_.default)):
            slot, product = copy.args[0], copy.args[1]
            assert isinstance(slot, fx.Node) and isinstance(product, fx.Node)
            if (
                product.target is not _aten.mm.default
                or len(product.users) > 1
                or copy.users
                or not _fits(slot, product)
            ):
                continue
            buffer = slot.args[0]
            assert isinstance(buffer, fx.Node)
            if order[buffer] > order[product]:
                if product.next is not buffer:
                    continue
                product.prepend(buffer)
            product.prepend(slot)
            step.graph.erase_node(copy)
            product.target = _aten.mm.out
            product.kwargs = {"out": slot}


def _fits(slot: fx.Node, product: fx.Node) -> bool:
    """True if ``slot`` is a place in a gradient buffer with the layout of ``product``, which nothing else writes to."""
    buffer = slot.args[0]
    result, place = value(product), value(slot)
    return (
        slot.target is _aten.as_strided.default
        and isinstance(buffer, fx.Node)
        and buffer.target is ops.empty_gradients
        and len(slot.users) == 1
        and (result.dtype, result.shape, result.stride()) == (place.dtype, place.shape, place.stride())
    )
