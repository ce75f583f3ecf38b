"""Take operators apart as regions are compiled, with every value in the strides that are recorded for it.

    y = cat([x, empty])                 y = clone(x)                      # y has the strides of x: wrong
    z = view(y, [8])              ->    y = clone(permute(x, ...)); z = view(permute(y, ...), [8])

A decomposition may lay its result out unlike the operator does (``cat`` of one tensor that is not empty keeps that
tensor's strides): the views that follow, and the regions that read the result, were made for the operator's.

Does not handle: values that do not fill their memory, which stay as the decomposition lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.codegen.inductor.traced import TracedRegion


@dataclass(frozen=True)
class PlannedStrides:
    """Take operators apart as regions are compiled, with every value in the strides that are recorded for it."""

    name: str = "planned_strides"

    def run(self, region: TracedRegion) -> None:
        region.module = region.retraced(_InPlannedStrides(region.module).run)


class _InPlannedStrides(fx.Interpreter):
    """Runs a graph so that every value has the strides recorded for it."""

    def run_node(self, n: fx.Node) -> Any:
        computed = super().run_node(n)
        planned = n.meta.get("val")
        if isinstance(computed, list | tuple) and isinstance(planned, list | tuple):
            return tuple(map(_with_strides, computed, planned))
        return _with_strides(computed, planned)


def _with_strides(computed: Any, planned: Any) -> Any:
    """``computed`` laid out like ``planned``, where both are tensors that fill their memory."""
    if not isinstance(computed, torch.Tensor) or not isinstance(planned, torch.Tensor):
        return computed
    differ = any(
        entry != other
        for size, entry, other in zip(computed.shape, computed.stride(), planned.stride(), strict=True)
        if size > 1
    )
    if not differ:
        return computed
    order = sorted(range(planned.dim()), key=lambda dim: (-planned.stride()[dim], -planned.shape[dim], dim))
    return computed.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
