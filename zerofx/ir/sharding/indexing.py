"""Lookups by index: a table that is sharded by rows gives partial sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.sharding.pattern import Pattern
from zerofx.ir.sharding.rule import Local, argument, read_tensors, results_of, shape_of
from zerofx.ir.sharding.shapes import PatternsOf, whole_along

_aten = torch.ops.aten


def own_indices(rank: Local, indices: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    """Indices into this rank's ``size`` rows, 0 in place of those of other ranks, and a mask of its own indices."""
    first = rank.call(_aten.mul.Scalar, rank.rank(), size)
    shifted = rank.call(_aten.sub.Tensor, indices, first)
    inside = rank.call(
        _aten.bitwise_and.Tensor, rank.call(_aten.ge.Scalar, shifted, 0), rank.call(_aten.lt.Scalar, shifted, size)
    )
    return rank.call(_aten.masked_fill.Scalar, shifted, rank.call(_aten.logical_not.default, inside), 0), inside


def zero_elsewhere(rank: Local, values: fx.Node, inside: fx.Node) -> fx.Node:
    """``values`` where ``inside``, a mask of what is this rank's, is true; else zero."""
    return rank.call(_aten.masked_fill.Scalar, values, rank.call(_aten.logical_not.default, inside), 0)


def _embedding(node: fx.Node) -> list[Pattern]:
    """The patterns of a lookup in a table, the first argument."""
    rank = len(shape_of(node))
    by_index = [Pattern((d,), (None, d)) for d in range(rank - 1)]
    return [*by_index, Pattern((rank - 1,), (1, None)), Pattern(("sum",), (0, None), _rows_here, in_groups=False)]


def _rows_here(rank: Local) -> Any:
    table, indices = rank.args[0], rank.args[1]
    size = results_of(table)[0]
    assert size is not None
    own, inside = own_indices(rank, indices, size.shape[0])
    rows = rank.call(rank.node.target, table, own)
    return zero_elsewhere(rank, rows, rank.call(_aten.unsqueeze.default, inside, -1))


def _embedding_backward(node: fx.Node) -> list[Pattern]:
    rank = len(shape_of(read_tensors(node)[0]))
    by_index = [Pattern(("sum",), (d, d)) for d in range(rank - 1)]
    if argument(node, 4, "scale_grad_by_freq", False):
        by_index = []  # how often an index occurs is known to all ranks together
    rows = [Pattern((0,), (None, None), _gradient_of_rows_here, in_groups=False)]
    return [*by_index, Pattern((1,), (rank - 1, None)), Pattern(("sum",), ("sum", None)), *rows]


def _gradient_of_rows_here(rank: Local) -> Any:
    gradient, indices, num_rows, padding, by_frequency = (*rank.args, *rank.kwargs.values())[:5]
    size = num_rows // rank.num_ranks
    own, inside = own_indices(rank, indices, size)
    if padding >= 0:
        inside = rank.call(_aten.bitwise_and.Tensor, inside, rank.call(_aten.ne.Scalar, indices, padding))
    masked = zero_elsewhere(rank, gradient, rank.call(_aten.unsqueeze.default, inside, -1))
    return rank.call(rank.node.target, masked, own, size, -1, by_frequency)


def has_mask(node: fx.Node) -> bool:
    """True if one of the indices of an indexing call is a mask."""
    indices = (index for index in argument(node, 1, "indices") if index is not None)
    return any(tensor(index).dtype in (torch.bool, torch.uint8) for index in indices)


def mask_patterns(node: fx.Node) -> list[Pattern]:
    """Patterns of a call that writes one value where a mask is true; the mask may index several dimensions."""
    indices, read = argument(node, 1, "indices"), read_tensors(node)
    if len(read) != 3 or math.prod(shape_of(read[-1])) != 1:  # else how many are true says which value goes where
        return []
    first, num_masked = [index is not None for index in indices].index(True), len(shape_of(read[1]))
    return [
        Pattern((d,), (d, d - first if first <= d < first + num_masked else None, None))
        for d in range(len(shape_of(read[0])))
    ]


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "embedding": _embedding,
        "embedding_dense_backward": _embedding_backward,
        "gather": whole_along(1),
        "scatter.src": whole_along(1),
        "scatter.value": whole_along(1),
        "scatter_add": whole_along(1),
    }
)
