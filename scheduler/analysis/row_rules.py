"""Which operators can be run on some rows at a time.

A rule for each operator says where the rows (``scheduler/analysis/rows.py``) lie in its result, given where they lie in
what it reads. Every rule is a plain truth about its operator: on the same rows of its inputs it gives those rows of its
result (``Rows``), or a part of it that has to be summed up over the rows (``SUM``). So whatever rules lead to may be
carried out tile by tile.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import fx

from zerofx.ir.aliasing import mutated_inputs
from zerofx.ir.facts import is_random, tensor, value
from zerofx.scheduler.analysis.rows import OWN, SUM, Found, Rows, grouped
from zerofx.torch_private.operators import OpOverload

_aten = torch.ops.aten

Given = Mapping[fx.Node, Rows | None]
Rule = Callable[[fx.Node, Given], Found]


def rows_of_result(node: fx.Node, given: Given, num_rows: int) -> Found:
    """Where the rows lie in what ``node`` gives (in each output, if it gives several); None: it needs them all at once.

    ``given`` has the rows of what it reads; None is for what every tile reads whole.
    """
    if node.target is operator.getitem:
        return None
    if not isinstance(node.target, OpOverload) or is_random(node) or mutated_inputs(node):
        return None
    if not any(given.values()):
        return None
    if node.target in _VIEWS:
        return _view(node, given, num_rows)
    rule = _RULES.get(node.target)
    if rule is not None:
        return rule(node, given)
    pointwise = torch.Tag.pointwise in node.target.tags or node.target in _ALSO_POINTWISE
    return _pointwise(node, given) if pointwise else None


def takes_sizes(node: fx.Node) -> bool:
    """Whether the second argument of an operator is the shape of its result."""
    return node.target in _VIEWS or node.target in _SIZED


def _read(node: fx.Node, index: int) -> fx.Node:
    found = node.args[index]
    assert isinstance(found, fx.Node)
    return found


def _dim(node: fx.Node, index: int, rank: int, default: int = 0) -> int:
    found = node.args[index] if len(node.args) > index else default
    assert isinstance(found, int)
    return found % rank


def _pointwise(node: fx.Node, given: Given) -> Found:
    shape = tuple(tensor(node).shape)
    found: Rows | None = None
    for source, rows in given.items():
        if rows is None:
            continue
        read = tuple(tensor(source).shape)
        moved = rows.moved(len(shape) - len(read))
        if found not in (None, moved) or [shape[d] for d in moved.dims] != [read[d] for d in rows.dims]:
            return None
        found = moved
    assert found is not None
    for source, rows in given.items():
        if rows is None:
            read = tuple(tensor(source).shape)
            behind = len(shape) - len(read)
            if any(d >= behind and read[d - behind] != 1 for d in found.dims):
                return None
    return found


def _view(node: fx.Node, given: Given, num_rows: int) -> Found:
    rows, old, new = given[_read(node, 0)], tuple(tensor(_read(node, 0)).shape), tuple(tensor(node).shape)
    if rows is None:
        return None
    before = prod(old[: rows.first])
    first = next((d for d in range(len(new)) if prod(new[:d]) == before), None)
    return None if first is None else grouped(new, first, num_rows)


def _expand(node: fx.Node, given: Given) -> Found:
    source = _read(node, 0)
    rows, old, new = given[source], tensor(source).shape, tensor(node).shape
    if rows is None:
        return None
    moved = rows.moved(len(new) - len(old))
    return moved if [old[d] for d in rows.dims] == [new[d] for d in moved.dims] else None


def _permuted(rows: Rows, order: Sequence[int]) -> Found:
    """``order`` has, for each dimension of the result, that of the source."""
    first = order.index(rows.first)
    return Rows(first, rows.span, rows.each) if list(order[first : first + rows.span]) == list(rows.dims) else None


def _t(node: fx.Node, given: Given) -> Found:
    rows = given[_read(node, 0)]
    return _permuted(rows, [1, 0]) if rows is not None and tensor(node).dim() == 2 else rows


def _transpose(node: fx.Node, given: Given) -> Found:
    rows, rank = given[_read(node, 0)], tensor(node).dim()
    order = list(range(rank))
    one, other = _dim(node, 1, rank), _dim(node, 2, rank)
    order[one], order[other] = order[other], order[one]
    return _permuted(rows, order) if rows is not None else None


def _permute(node: fx.Node, given: Given) -> Found:
    rows, order = given[_read(node, 0)], node.args[1]
    assert isinstance(order, list | tuple)
    return _permuted(rows, [int(str(d)) % len(order) for d in order]) if rows is not None else None


def _with_dim(index: int) -> Rule:
    """Of operators that put one dimension in, given as an argument."""

    def rule(node: fx.Node, given: Given) -> Found:
        rows, dim = given[_read(node, 0)], _dim(node, index, tensor(node).dim())
        if rows is None or rows.first < dim < rows.first + rows.span:
            return None
        return rows.moved(1) if dim <= rows.first else rows

    return rule


def _without_dim(node: fx.Node, given: Given) -> Found:
    """Of operators that take one dimension out."""
    rows, dim = given[_read(node, 0)], _dim(node, 1, tensor(_read(node, 0)).dim())
    if rows is None or dim in rows.dims:
        return None
    found = rows.moved(-1) if dim < rows.first else rows
    return tuple(found for _ in value(node)) if isinstance(value(node), list | tuple) else found


def _squeeze(node: fx.Node, given: Given) -> Found:
    source, dims = _read(node, 0), node.args[1]
    rows, shape = given[source], tuple(tensor(source).shape)
    listed = [int(str(d)) % len(shape) for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if rows is None or any(d in rows.dims for d in listed):
        return None
    return rows.moved(-sum(1 for d in listed if d < rows.first and shape[d] == 1))


def _along(index: int, default: int = 0) -> Rule:
    """Of operators that work along the dimension given as an argument, and leave the others where they are."""

    def rule(node: fx.Node, given: Given) -> Found:
        rows, dim = given[_read(node, 0)], _dim(node, index, tensor(_read(node, 0)).dim(), default)
        if rows is None or dim in rows.dims or any(other not in (rows, None) for other in given.values()):
            return None
        if not all(given.values()):
            return None
        return tuple(rows for _ in value(node)) if isinstance(value(node), list | tuple) else rows

    return rule


def _joined(by: int) -> Rule:
    """Of ``cat`` (``by`` 0) and ``stack`` (1)."""

    def rule(node: fx.Node, given: Given) -> Found:
        kinds = set(given.values())
        rows = kinds.pop()
        if kinds or rows is None:
            return None
        dim = _dim(node, 1, tensor(node).dim())
        inside = rows.first < dim < rows.first + rows.span if by else dim in rows.dims
        return None if inside else rows.moved(by if dim <= rows.first else 0)

    return rule


def _mm(node: fx.Node, given: Given) -> Found:
    return _product(given[_read(node, 0)], given[_read(node, 1)], 0)


def _bmm(node: fx.Node, given: Given) -> Found:
    left, right = given[_read(node, 0)], given[_read(node, 1)]
    if left is not None and left == right and left.first == 0 and left.span == 1:
        return left
    return _product(left, right, 1)


def _product(left: Rows | None, right: Rows | None, at: int) -> Found:
    """Of matrices that lie in dimensions ``at`` and the one behind."""
    match left, right:
        case Rows(first, 1, _), None if first == at:
            return left
        case None, Rows(first, 1, _) if first == at + 1:
            return right
        case Rows(first, 1, each), Rows(second, 1, same) if (first, second) == (at + 1, at) and each == same:
            return SUM
    return None


def _addmm(node: fx.Node, given: Given) -> Found:
    if given[_read(node, 0)] is not None or tensor(_read(node, 0)).dim() != 1:
        return None
    left, right = given[_read(node, 1)], given[_read(node, 2)]
    found = _product(left, right, 0)
    return found if found == left else None


def _sum(node: fx.Node, given: Given) -> Found:
    source, dims = _read(node, 0), node.args[1]
    rows, rank = given[source], tensor(source).dim()
    if rows is None or not isinstance(dims, list | tuple):
        return None
    listed = {int(str(d)) % rank for d in dims}
    if set(rows.dims) <= listed:
        return SUM
    if set(rows.dims) & listed:
        return None
    keeps = len(node.args) > 2 and bool(node.args[2])
    return rows if keeps else rows.moved(-sum(d < rows.first for d in listed))


def _mean(node: fx.Node, given: Given) -> Found:
    found = _sum(node, given)
    return None if found is SUM else found


def _norm(num_outputs: int) -> Rule:
    """Of normalisations over the last dimensions: their weights are whole."""

    def rule(node: fx.Node, given: Given) -> Found:
        source, normalised = _read(node, 0), node.args[1]
        rows, others = given[source], [kind for other, kind in given.items() if other is not source]
        assert isinstance(normalised, list | tuple)
        if rows is None or any(others) or rows.first + rows.span > tensor(source).dim() - len(normalised):
            return None
        return (rows,) * num_outputs

    return rule


def _norm_backward(num_rowed: int, num_summed: int) -> Rule:
    """Of their gradients: the first arguments, but for the shape, have rows, and so has the first result."""

    def rule(node: fx.Node, given: Given) -> Found:
        read = [a for a in node.args[: num_rowed + 1] if isinstance(a, fx.Node)]
        kinds = {given[source] for source in read}
        rows, normalised = given[read[0]], node.args[2]
        assert isinstance(normalised, list | tuple)
        if rows is None or len(kinds) != 1 or any(kind for other, kind in given.items() if other not in read):
            return None
        if rows.first != 0 or rows.span > tensor(read[0]).dim() - len(normalised):
            return None
        return (rows, *(SUM for _ in range(num_summed)))

    return rule


def _attention(read_at: Sequence[int], num_outputs: int, num_own: int = 0, own_at: Sequence[int] = ()) -> Rule:
    """Of attention kernels: samples are independent. A mask is whole where it is the same for each sample.

    ``read_at`` are the arguments with rows, and ``num_outputs`` the first results, which have them. CUDA's kernels also
    give ``num_own`` values about their generator, sizes and debugging, some of which gradients read, as ``own_at``.
    """

    def rule(node: fx.Node, given: Given) -> Found:
        read = [_read(node, index) for index in read_at]
        kinds = {given[source] for source in read}
        rows = given[read[0]]
        if rows is None or len(kinds) != 1 or (rows.first, rows.span) != (0, 1):
            return None
        own = {node.args[index] for index in own_at}
        for mask in (source for source in given if source not in read and source not in own):
            shared = tensor(mask).dim() < tensor(read[0]).dim() or tensor(mask).shape[0] == 1
            if given[mask] != (None if shared else rows):
                return None
        return (*(rows for _ in range(num_outputs)), *(OWN for _ in range(num_own)))

    return rule


def _embedding(node: fx.Node, given: Given) -> Found:
    return given[_read(node, 1)] if given[_read(node, 0)] is None else None


def _embedding_backward(node: fx.Node, given: Given) -> Found:
    rows = given[_read(node, 0)]
    return SUM if rows is not None and rows == given[_read(node, 1)] else None


_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default})

_SIZED = frozenset({_aten.expand.default, _aten.slice_backward.default, _aten.select_backward.default})

# Torch does not tag these as pointwise, which they are.
_ALSO_POINTWISE = frozenset({
    _aten._to_copy.default, _aten.masked_fill.Tensor, _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default, _aten.elu_backward.default, _aten.softplus_backward.default,
    _aten.log_sigmoid_backward.default, _aten.hardswish_backward.default, _aten.full_like.default,
    _aten.zeros_like.default, _aten.ones_like.default, _aten.native_dropout_backward.default,
})  # fmt: skip

_RULES: dict[object, Rule] = {
    _aten.t.default: _t,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _permute,
    _aten.expand.default: _expand,
    _aten.unsqueeze.default: _with_dim(1),
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.select.int: _without_dim,
    _aten.unbind.int: _without_dim,
    _aten.slice.Tensor: _along(1),
    _aten.slice_backward.default: _along(2),
    _aten.select_backward.default: _with_dim(2),
    _aten.split.Tensor: _along(2),
    _aten.split_with_sizes.default: _along(2),
    _aten.cat.default: _joined(0),
    _aten.stack.default: _joined(1),
    _aten.mm.default: _mm,
    _aten.bmm.default: _bmm,
    _aten.addmm.default: _addmm,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.amax.default: _mean,
    _aten._softmax.default: _along(1),
    _aten._log_softmax.default: _along(1),
    _aten._softmax_backward_data.default: _along(2),
    _aten._log_softmax_backward_data.default: _along(2),
    _aten.native_layer_norm.default: _norm(3),
    _aten.native_layer_norm_backward.default: _norm_backward(4, 2),
    _aten._fused_rms_norm.default: _norm(2),
    _aten._fused_rms_norm_backward.default: _norm_backward(3, 1),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(range(3), 2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(range(6), 3),
    _aten._scaled_dot_product_flash_attention.default: _attention(range(3), 2, 7),
    _aten._scaled_dot_product_flash_attention_backward.default: _attention(range(6), 3, own_at=(12, 13)),
    _aten._scaled_dot_product_efficient_attention.default: _attention(range(3), 2, 2),
    _aten._scaled_dot_product_efficient_attention_backward.default: _attention((0, 1, 2, 3, 5, 6), 3, 1, (7, 8)),
    _aten._scaled_dot_product_cudnn_attention.default: _attention(range(3), 2, 7),
    _aten._scaled_dot_product_cudnn_attention_backward.default: _attention(range(6), 3, own_at=(6, 7)),
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
}
