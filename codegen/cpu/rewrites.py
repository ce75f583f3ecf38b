"""Rewrites of a region for a CPU, where Inductor's loops would go through memory in a worse order or once more.

A sum over rows goes down the columns in Inductor's loop, a cache line of every row at a time; a matrix product with
ones reads the rows as they lie, three to four times as fast. ::

    sum(x, [0])          ->   mm(ones(1, rows), x)

ATen's ``addmm`` copies the bias into every row before it multiplies. Where all that reads the result is computed in
Inductor's loops, these add it on their way. ::

    addmm(bias, a, b)    ->   view(view(mm(a, b), [rows, 1, columns]) + bias, [rows, columns])

What are products then (``merged_products.py`` is first) are taken from ATen, where that is faster
(``zerofx/ir/op_kernels/products.py``). ::

    mm(a, b)             ->   product(a, b, None)
    addmm(bias, a, b)    ->   product(a, b, bias)
    mm_into(c, a, b)     ->   product_into(c, a, b)

Not rewritten: sums of values that are not in memory otherwise, which a product would need there; sums that share their
loop with one of those; half precision, whose products are oneDNN's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.codegen.inductor.traced import TracedRegion, as_node, call
from zerofx.codegen.kernels.table import PRODUCTS
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import consumers
from zerofx.ir.facts import value
from zerofx.ir.op_kernels.products import has_kernel
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of

_aten = torch.ops.aten
_INTO = ops.mm_into
_SUMS = frozenset({_aten.sum.dim_IntList, _aten.var_mean.correction})
_FEWEST = 64  # rows and columns that are worth a product


@dataclass(frozen=True)
class RewriteForCpu:
    """On a CPU, sum rows in products, add biases in loops, and take products from ATen where that is faster."""

    name: str = "rewrite_for_cpu"

    def run(self, region: TracedRegion) -> None:
        rewrite_for_cpu(region.graph, products=PRODUCTS in region.kernels)


def rewrite_for_cpu(graph: fx.Graph, *, products: bool) -> None:
    """Rewrite the traced graph of a region, whose nodes have fake values in ``meta["val"]``, in place.

    ``products``: whether to take from ATen what products can be.
    """
    column_sums = [node for node in graph.nodes if _is_column_sum(node)]
    for node in [node for node in column_sums if _is_stored(node) and not _shares_its_loop(node, column_sums)]:
        _as_product(graph, node)
    for node in graph.find_nodes(op="call_function", target=_aten.addmm.default):
        readers = [reader for reader in consumers(node) if reader.op != "output"]
        if _is_plain(node) and readers and all(map(_is_in_a_loop, readers)):
            _as_sum(graph, node)
    if products:
        for node in list(graph.nodes):
            _take(graph, node)


def _is_column_sum(node: fx.Node) -> bool:
    """Whether ``node`` sums a large matrix, or what is laid out like one, over all dimensions but the last."""
    if node.target is not _aten.sum.dim_IntList or node.kwargs:
        return False
    summed, dims = value(node.all_input_nodes[0]), node.args[1]
    rows = math.prod(summed.shape[:-1])
    return (
        isinstance(dims, list | tuple)
        and sorted(dim % summed.dim() for dim in dims if isinstance(dim, int)) == list(range(summed.dim() - 1))
        and summed.device.type == "cpu"
        and summed.dtype in (torch.float32, torch.float64)
        and summed.is_contiguous()
        and min(rows, summed.shape[-1]) >= _FEWEST
    )


def _is_stored(node: fx.Node) -> bool:
    """Whether what ``node`` sums is in memory for others: an input, or a product's result or operand."""
    source = _source(node)
    return source.op == "placeholder" or _is_product(source) or any(map(_is_product, consumers(source)))


def _is_product(node: fx.Node) -> bool:
    return node.target is _INTO or facts_of(node.target).kind is OperatorKind.PRODUCT


def _shares_its_loop(node: fx.Node, column_sums: list[fx.Node]) -> bool:
    """Whether another sum over rows is of values that are made, in its loop, of what ``node`` sums."""
    readers = set(consumers(_source(node)))
    return any(not _is_stored(other) and _source(other) in readers for other in column_sums)


def _source(node: fx.Node) -> fx.Node:
    """What makes the memory that ``node`` sums."""
    return storage_source(node.all_input_nodes[0])[0]


def _as_product(graph: fx.Graph, node: fx.Node) -> None:
    summed, result = value(node.all_input_nodes[0]), value(node)
    columns = summed.shape[-1]
    rows = summed.numel() // columns
    with graph.inserting_before(node):
        flat = call(graph, _aten.view.default, (node.args[0], [rows, columns]))
        ones = call(graph, _aten.full.default, ([1, rows], 1.0), {"dtype": summed.dtype, "device": summed.device})
        product = call(graph, _aten.mm.default, (ones, flat))
        shaped = call(graph, _aten.view.default, (product, list(result.shape)))
    node.replace_all_uses_with(shaped)
    graph.erase_node(node)


def _is_plain(node: fx.Node) -> bool:
    """Whether ``node`` adds one value to each column of a float32 or float64 product on a CPU."""
    bias, result = value(node.all_input_nodes[0]), value(node)
    return (
        not node.kwargs
        and bias.dim() == 1
        and result.device.type == "cpu"
        and result.dtype in (torch.float32, torch.float64)
    )


def _is_in_a_loop(reader: fx.Node) -> bool:
    return reader.target in _SUMS or facts_of(reader.target).is_pointwise


def _as_sum(graph: fx.Graph, node: fx.Node) -> None:
    bias, left, right = node.args
    rows, columns = value(node).shape
    with graph.inserting_before(node):
        product = call(graph, _aten.mm.default, (left, right))
        # Inductor makes an addmm of a sum that has a product for an operand, but not of one that has a view of it.
        apart = call(graph, _aten.view.default, (product, [rows, 1, columns]))
        total = call(graph, _aten.add.Tensor, (apart, bias))
        whole = call(graph, _aten.view.default, (total, [rows, columns]))
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


def _take(graph: fx.Graph, node: fx.Node) -> None:
    """Have ``node``, if it is a product, computed by other means than ATen's, where it can be."""
    if node.kwargs or node.target not in (_INTO, _aten.mm.default, _aten.addmm.default):
        return
    *rest, left, right = map(as_node, node.args)
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
