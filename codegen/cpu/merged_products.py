"""Products with weights that lie side by side, made as one where a region runs on a CPU.

Linear layers that read one input (query, key and value; gate and up) have their weights, and so their gradients, one
after the other in a bucket. Backward multiplies the gradient of each one's result by its weight and by the input, and
adds up what the weights give. A wide product packs each operand once, and sums in its registers::

    mm_into(grads_q, q.T, x)                               both = cat([q, k], 1)
    mm_into(grads_k, k.T, x)                         ->    mm_into(grads_qk, both.T, x)
    view(mm(q, weight_q)) + view(mm(k, weight_k))          view(mm(both, weight_qk))

Inductor's loops write what they compute into its place in ``both``; what another operator made is copied there.

Not merged: forward's products, whose results other regions read one by one; gradients that anything else reads (a
bias's, say); sums with terms of another kind in between; weights of a bucket each; products that are too small to gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from zerofx.codegen.inductor.traced import TracedRegion, as_node, call
from zerofx.ir import ops
from zerofx.ir.aliasing import mutated_inputs, storage_bytes, storage_source
from zerofx.ir.facts import value
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of

_aten = torch.ops.aten
_INTO = ops.mm_into
_FEWEST = 64  # rows and columns that are worth it


@dataclass(frozen=True)
class _Slot:
    """A matrix that lies in a buffer without gaps."""

    buffer: fx.Node
    rows: int
    columns: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns


@dataclass(frozen=True)
class _Pair:
    """The two products of a gradient: with its weight, ``product``, and with its layer's input, ``into``."""

    gradient: fx.Node
    input: fx.Node
    into: fx.Node
    product: fx.Node
    weight: _Slot
    target: _Slot


@dataclass(frozen=True)
class MergeProducts:
    """On a CPU, make one product of those with weights that lie side by side."""

    name: str = "merge_products"

    def run(self, region: TracedRegion) -> None:
        merge_products(region.graph)


def merge_products(graph: fx.Graph) -> None:
    """Merge products in the traced graph of a region, whose nodes have fake values in ``meta["val"]``, in place."""
    pairs = {pair.product: pair for node in graph.nodes if (pair := _pair_of(node)) is not None}
    sums = [(node, _terms(node, pairs)) for node in reversed(graph.nodes)]
    for total, terms in sums:
        if len(terms) < 2 or not pairs.keys() >= set(terms):
            continue
        found = sorted((pairs[term] for term in terms), key=lambda pair: pair.weight.offset)
        if _lie_side_by_side(found) and not _is_changed(graph, found):
            _merge(graph, total, found)
            for term in terms:
                del pairs[term]


def _pair_of(into: fx.Node) -> _Pair | None:
    """The pair whose second product is ``into``, where it is one that could be merged with others."""
    if into.target is not _INTO:
        return None
    written, transposed, given = map(as_node, into.args)
    if transposed.target is not _aten.permute.default or transposed.args[1] != [1, 0] or len(transposed.users) != 1:
        return None
    gradient = as_node(transposed.args[0])
    products = [user for user in gradient.users if user is not transposed]
    if len(products) != 1 or products[0].target is not _aten.mm.default or products[0].args[0] is not gradient:
        return None
    weight, target = _slot(as_node(products[0].args[1])), _slot(written)
    if weight is None or target is None or min(*value(gradient).shape, value(given).shape[1]) < _FEWEST:
        return None
    return _Pair(gradient, given, into, products[0], weight, target)


def _slot(view: fx.Node) -> _Slot | None:
    """Where ``view`` lies, if it is a view of a region's input, of float32 or float64 on a CPU, for one reader."""
    if view.target is not _aten.as_strided.default or len(view.users) != 1:
        return None
    buffer, found = view.all_input_nodes[0], value(view)
    is_taken = found.device.type == "cpu" and found.dtype in (torch.float32, torch.float64)
    if buffer.op != "placeholder" or not is_taken or found.dim() != 2 or not found.is_contiguous():
        return None
    rows, columns = found.shape
    return _Slot(buffer, rows, columns, _offset(view))


def _offset(view: fx.Node) -> int:
    """Where an ``as_strided`` begins in what it views, in elements."""
    offset = view.args[3] if len(view.args) > 3 else 0
    assert isinstance(offset, int)
    return offset


def _terms(total: fx.Node, pairs: dict[fx.Node, _Pair]) -> list[fx.Node]:
    """The products that ``total`` is the sum of, each read by it alone; empty where it is more than that."""
    if total.target is _aten.mm.default:
        return [total] if total in pairs else []
    if facts_of(total.target).kind is OperatorKind.RESHAPE:
        source = total.all_input_nodes[0]
        return _terms(source, pairs) if source.target is _aten.mm.default and len(source.users) == 1 else []
    if total.target is not _aten.add.Tensor or total.kwargs or len(total.all_input_nodes) != 2:
        return []
    found = [_terms(term, pairs) if _fits(term, total) else [] for term in total.all_input_nodes]
    return [product for products in found for product in products] if all(found) else []


def _fits(term: fx.Node, total: fx.Node) -> bool:
    return len(term.users) == 1 and value(term).shape == value(total).shape


def _lie_side_by_side(pairs: Sequence[_Pair]) -> bool:
    """Whether weights and gradients lie one after the other, and nothing else goes to them there."""
    adjacent = all(
        entry.weight.buffer is other.weight.buffer
        and entry.weight.end == other.weight.offset
        and entry.weight.columns == other.weight.columns
        and entry.target.buffer is other.target.buffer
        and entry.target.end == other.target.offset
        and entry.target.columns == other.target.columns
        and _is_same(entry.input, other.input)
        for entry, other in pairwise(pairs)
    )
    written = {pair.into.args[0] for pair in pairs}
    buffer, begin, end = pairs[0].target.buffer, pairs[0].target.offset, pairs[-1].target.end
    return adjacent and all(_is_apart(view, begin, end) for view in buffer.users if view not in written)


def _is_changed(graph: fx.Graph, pairs: Sequence[_Pair]) -> bool:
    """Whether anything that the products read is written in this region: they are made later than they were."""
    read = {storage_source(node) for pair in pairs for node in (pair.gradient, pair.input, pair.weight.buffer)}
    return any(storage_source(written) in read for node in graph.nodes for written in mutated_inputs(node))


def _is_same(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are one value: the same node, or the same view of the same."""
    if one is other:
        return True
    return (
        facts_of(one.target).kind is OperatorKind.RESHAPE
        and facts_of(other.target).kind is OperatorKind.RESHAPE
        and value(one).shape == value(other).shape
        and _is_same(one.all_input_nodes[0], other.all_input_nodes[0])
    )


def _is_apart(view: fx.Node, begin: int, end: int) -> bool:
    """Whether a reader of a buffer is a view of it outside the elements from ``begin`` to ``end``."""
    if view.target is not _aten.as_strided.default:
        return False
    num_elements = storage_bytes(value(view)) // value(view).element_size()
    return _offset(view) + num_elements <= begin or end <= _offset(view)


def _merge(graph: fx.Graph, total: fx.Node, pairs: Sequence[_Pair]) -> None:
    first = pairs[0]
    rows = sum(pair.weight.rows for pair in pairs)
    with graph.inserting_before(total):
        both = call(graph, _aten.cat.default, ([pair.gradient for pair in pairs], 1))
        target = _whole(graph, first.target, rows)
        call(graph, _INTO, (target, call(graph, _aten.permute.default, (both, [1, 0])), first.input))
        product = call(graph, _aten.mm.default, (both, _whole(graph, first.weight, rows)))
        shaped = call(graph, _aten.view.default, (product, list(value(total).shape)))
    total.replace_all_uses_with(shaped)
    for node in [total, *(pair.into for pair in pairs)]:
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _whole(graph: fx.Graph, slot: _Slot, rows: int) -> fx.Node:
    return call(graph, _aten.as_strided.default, (slot.buffer, [rows, slot.columns], [slot.columns, 1], slot.offset))
