"""Rules that map the rows of an operator's inputs to those of its result.

Every rule holds for its operator in general: the same rows of its inputs give those rows of its result (``Rows``), or a
part of it that has to be summed over the rows (``SUM``). So any chain of rules can be computed tile by tile. ``None``:
the operator needs all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import fx

from zerofx.ir.facts import tensor, value
from zerofx.ir.operators.operator import Given, RowRule
from zerofx.ir.operators.rows import OWN, SUM, RowKinds, Rows, group_rows


def _read(node: fx.Node, index: int) -> fx.Node:
    source = node.args[index]
    assert isinstance(source, fx.Node)
    return source


def _dim(node: fx.Node, index: int, rank: int) -> int:
    dim = node.args[index] if len(node.args) > index else 0
    assert isinstance(dim, int)
    return dim % rank


def elementwise(node: fx.Node, given: Given) -> RowKinds:
    """The rule of operators that work element by element, with broadcasting."""
    shape = tuple(tensor(node).shape)
    common: Rows | None = None
    for source, rows in given.items():
        if rows is None:
            continue
        read = tuple(tensor(source).shape)
        moved = rows.shift(len(shape) - len(read))
        if common not in (None, moved) or [shape[d] for d in moved.dims] != [read[d] for d in rows.dims]:
            return None
        common = moved
    assert common is not None
    for source, rows in given.items():
        if rows is None:
            read = tuple(tensor(source).shape)
            skipped = len(shape) - len(read)
            if any(d >= skipped and read[d - skipped] != 1 for d in common.dims):
                return None
    return common


def reshape(node: fx.Node, given: Given) -> RowKinds:
    """The rule of a reshape: the same elements in the same order."""
    rows, old, new = given[_read(node, 0)], tuple(tensor(_read(node, 0)).shape), tuple(tensor(node).shape)
    if rows is None:
        return None
    before, num_rows = prod(old[: rows.first]), prod(old[d] for d in rows.dims) // rows.each
    first = next((d for d in range(len(new)) if prod(new[:d]) == before), None)
    return None if first is None else group_rows(new, first, num_rows)


def expand(node: fx.Node, given: Given) -> RowKinds:
    """The rule of values repeated along dimensions of size 1, and along others in front."""
    source = _read(node, 0)
    rows, old, new = given[source], tensor(source).shape, tensor(node).shape
    if rows is None:
        return None
    moved = rows.shift(len(new) - len(old))
    return moved if [old[d] for d in rows.dims] == [new[d] for d in moved.dims] else None


def _reorder(rows: Rows, order: Sequence[int]) -> RowKinds:
    """Rows after a permutation; ``order`` has, for each dimension of the result, that of the source."""
    first = order.index(rows.first)
    return Rows(first, rows.span, rows.each) if list(order[first : first + rows.span]) == list(rows.dims) else None


def matrix_transpose(node: fx.Node, given: Given) -> RowKinds:
    """The rule of ``t``, which leaves vectors as they are."""
    rows = given[_read(node, 0)]
    return _reorder(rows, [1, 0]) if rows is not None and tensor(node).dim() == 2 else rows


def transpose(node: fx.Node, given: Given) -> RowKinds:
    """The rule of an operator that swaps two dimensions, its arguments."""
    rows, rank = given[_read(node, 0)], tensor(node).dim()
    order = list(range(rank))
    first, second = _dim(node, 1, rank), _dim(node, 2, rank)
    order[first], order[second] = order[second], order[first]
    return _reorder(rows, order) if rows is not None else None


def permute(node: fx.Node, given: Given) -> RowKinds:
    """The rule of dimensions in the order of the second argument."""
    rows, order = given[_read(node, 0)], node.args[1]
    assert isinstance(order, list | tuple)
    return _reorder(rows, [int(str(d)) % len(order) for d in order]) if rows is not None else None


def insert_dim(index: int) -> RowRule:
    """The rule of operators that insert one dimension, an argument."""

    def rule(node: fx.Node, given: Given) -> RowKinds:
        rows, dim = given[_read(node, 0)], _dim(node, index, tensor(node).dim())
        if rows is None or rows.first < dim < rows.first + rows.span:
            return None
        return rows.shift(1) if dim <= rows.first else rows

    return rule


def remove_dim(node: fx.Node, given: Given) -> RowKinds:
    """The rule of operators that remove one dimension."""
    rows, dim = given[_read(node, 0)], _dim(node, 1, tensor(_read(node, 0)).dim())
    if rows is None or dim in rows.dims:
        return None
    left = rows.shift(-1) if dim < rows.first else rows
    return tuple(left for _ in value(node)) if isinstance(value(node), list | tuple) else left


def squeeze(node: fx.Node, given: Given) -> RowKinds:
    """The rule of dimensions, an argument, that are removed where they have size 1."""
    source, dims = _read(node, 0), node.args[1]
    rows, shape = given[source], tuple(tensor(source).shape)
    listed = [int(str(d)) % len(shape) for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if rows is None or any(d in rows.dims for d in listed):
        return None
    return rows.shift(-sum(1 for d in listed if d < rows.first and shape[d] == 1))


def work_along(index: int) -> RowRule:
    """The rule of operators that work along a dimension, an argument, and leave the others unchanged."""

    def rule(node: fx.Node, given: Given) -> RowKinds:
        rows, dim = given[_read(node, 0)], _dim(node, index, tensor(_read(node, 0)).dim())
        if rows is None or dim in rows.dims or any(other not in (rows, None) for other in given.values()):
            return None
        if not all(given.values()):
            return None
        return tuple(rows for _ in value(node)) if isinstance(value(node), list | tuple) else rows

    return rule


def concatenation(by: int) -> RowRule:
    """The rule of ``cat`` (``by`` 0) and ``stack`` (1)."""

    def rule(node: fx.Node, given: Given) -> RowKinds:
        kinds = set(given.values())
        rows = kinds.pop()
        if kinds or rows is None:
            return None
        dim = _dim(node, 1, tensor(node).dim())
        inside = rows.first < dim < rows.first + rows.span if by else dim in rows.dims
        return None if inside else rows.shift(by if dim <= rows.first else 0)

    return rule


def product(node: fx.Node, given: Given) -> RowKinds:
    """The rule of a product of two matrices."""
    return _product(given[_read(node, 0)], given[_read(node, 1)], 0)


def batch_product(node: fx.Node, given: Given) -> RowKinds:
    """The rule of a batched product."""
    left, right = given[_read(node, 0)], given[_read(node, 1)]
    if left is not None and left == right and left.first == 0 and left.span == 1:
        return left
    return _product(left, right, 1)


def _product(left: Rows | None, right: Rows | None, at: int) -> RowKinds:
    """Rows of a product of matrices in dimensions ``at`` and the one after."""
    match left, right:
        case Rows(first, 1, _), None if first == at:
            return left
        case None, Rows(first, 1, _) if first == at + 1:
            return right
        case Rows(first, 1, each), Rows(second, 1, same) if (first, second) == (at + 1, at) and each == same:
            return SUM
    return None


def addmm(node: fx.Node, given: Given) -> RowKinds:
    """The rule of a product of two matrices, with a bias for each column."""
    if given[_read(node, 0)] is not None or tensor(_read(node, 0)).dim() != 1:
        return None
    left, right = given[_read(node, 1)], given[_read(node, 2)]
    rows = _product(left, right, 0)
    return rows if rows == left else None


def sum_over(node: fx.Node, given: Given) -> RowKinds:
    """The rule of sums over the dimensions that the second argument lists."""
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
    return rows if keeps else rows.shift(-sum(d < rows.first for d in listed))


def reduce_over(node: fx.Node, given: Given) -> RowKinds:
    """The rule of other reductions, whose partial results cannot be summed."""
    rows = sum_over(node, given)
    return None if rows is SUM else rows


def normalisation(num_outputs: int) -> RowRule:
    """The rule of normalisations over the last dimensions: their weights are whole."""

    def rule(node: fx.Node, given: Given) -> RowKinds:
        source, normalised = _read(node, 0), node.args[1]
        rows, others = given[source], [kind for other, kind in given.items() if other is not source]
        assert isinstance(normalised, list | tuple)
        if rows is None or any(others) or rows.first + rows.span > tensor(source).dim() - len(normalised):
            return None
        return (rows,) * num_outputs

    return rule


def normalisation_backward(num_rowed: int, num_summed: int) -> RowRule:
    """The rule of their gradients: the first arguments, but for the shape, have rows, and so has the first result."""

    def rule(node: fx.Node, given: Given) -> RowKinds:
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


def sample_attention(read_at: Sequence[int], num_outputs: int, num_own: int = 0, own_at: Sequence[int] = ()) -> RowRule:
    """The rule of attention kernels: samples are independent. A mask is whole if it is broadcast over the samples.

    ``read_at`` are the arguments with rows, and ``num_outputs`` the first results, which have them. CUDA's kernels also
    give ``num_own`` values about their generator, sizes and debugging, some of which gradients read, as ``own_at``.
    """

    def rule(node: fx.Node, given: Given) -> RowKinds:
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


def lookup(node: fx.Node, given: Given) -> RowKinds:
    """The rule of rows of a table, by indices."""
    return given[_read(node, 1)] if given[_read(node, 0)] is None else None


def lookup_backward(node: fx.Node, given: Given) -> RowKinds:
    """The rule of the gradient of that table."""
    rows = given[_read(node, 0)]
    return SUM if rows is not None and rows == given[_read(node, 1)] else None
