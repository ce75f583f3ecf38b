"""Products of a region on a CPU are taken from ATen, where that is faster (``zerofx/ir/op_kernels/products.py``). ::

    mm(a, b)             ->   product(a, b, None)
    addmm(bias, a, b)    ->   product(a, b, bias)
    mm_into(c, a, b)     ->   product_into(c, a, b)

Not rewritten: half precision, whose products are oneDNN's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from zerofx.codegen.cpu.extras import PRODUCTS
from zerofx.codegen.inductor.region_rewrites import TracedRegion, call, require_node
from zerofx.ir import ops
from zerofx.ir.facts import value
from zerofx.ir.op_kernels.products import has_kernel

_aten = torch.ops.aten
_INTO = ops.mm_into


@dataclass(frozen=True)
class TakeProducts:
    """On a CPU, take products from ATen where that is faster."""

    name: str = "take_products"

    def run(self, region: TracedRegion) -> None:
        if PRODUCTS in region.kernels:
            take_products(region.graph)


def take_products(graph: fx.Graph) -> None:
    """Rewrite the traced graph of a region, whose nodes have fake values in ``meta["val"]``, in place."""
    for node in list(graph.nodes):
        _take(graph, node)


def _take(graph: fx.Graph, node: fx.Node) -> None:
    """Have ``node``, if it is a product, computed by other means than ATen's, where it can be."""
    if node.kwargs or node.target not in (_INTO, _aten.mm.default, _aten.addmm.default):
        return
    *rest, left, right = map(require_node, node.args)
    bias = rest[0] if node.target is _aten.addmm.default else None
    values = (value(left), value(right), None if bias is None else value(bias))
    if not has_kernel(*values, into=node.target is _INTO):
        return
    with graph.inserting_before(node):
        if node.target is _INTO:
            call(graph, ops.product_into, (*rest, left, right))
        else:
            node.replace_all_uses_with(call(graph, ops.product, (left, right, bias)))
    graph.erase_node(node)
