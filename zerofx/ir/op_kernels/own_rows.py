"""Rows in groups of lengths that only the step knows, tokens of experts, of which each rank has some groups.

    own = own_rows(x, ends, rank, 2, 0)            # this rank's rows first, in order; the others after them
    y = grouped_mm(own, w, own_ends(ends, rank, 2))   # w: the matrices of this rank's groups; makes its rows alone
    term = whole_rows(y, ends, rank, 2, 0)         # this rank's rows in their places, zeros elsewhere: terms of a sum

``ends`` has where each group ends, ``[groups]``; rank i of n has the i-th n-th of the groups. Shapes do not depend on
how long groups are, and nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.ir.op_kernels.fakes import dense
from zerofx.ir.op_kernels.own_operator import own_operator


def _bounds(ends: Tensor, rank: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Start and end of a rank's rows, of shape [1]; ``rank``: int64, shape [1]."""
    starts = torch.cat([ends.new_zeros(1), ends])
    size = ends.shape[0] // num_ranks
    return starts.index_select(0, rank * size), starts.index_select(0, (rank + 1) * size)


def _own_ends(ends: Tensor, rank: Tensor, num_ranks: int) -> Tensor:
    first, _ = _bounds(ends, rank, num_ranks)
    return ends.view(num_ranks, -1).index_select(0, rank).view(-1).sub_(first)


def _own_rows(rows: Tensor, ends: Tensor, rank: Tensor, num_ranks: int, dim: int) -> Tensor:
    first, _ = _bounds(ends, rank, num_ranks)
    size = rows.shape[dim]
    return rows.index_select(dim, torch.arange(size, device=rows.device).add_(first).remainder_(size))


def _whole_rows(rows: Tensor, ends: Tensor, rank: Tensor, num_ranks: int, dim: int) -> Tensor:
    first, last = _bounds(ends, rank, num_ranks)
    size = rows.shape[dim]
    places = torch.arange(size, device=rows.device).sub_(first).remainder_(size)
    whole = rows.index_select(dim, places)
    elsewhere = (places >= last - first).view(-1, *(1,) * (rows.dim() - dim - 1))
    return whole.masked_fill_(elsewhere, 0)


def _part_of_ends(ends: Tensor, rank: Tensor, num_ranks: int) -> Tensor:
    return ends.new_empty(ends.shape[0] // num_ranks)


own_ends = own_operator("own_ends(Tensor ends, Tensor rank, int num_ranks) -> Tensor", _part_of_ends, kernel=_own_ends)
own_rows = own_operator(
    "own_rows(Tensor rows, Tensor ends, Tensor rank, int num_ranks, int dim) -> Tensor", dense, kernel=_own_rows
)
whole_rows = own_operator(
    "whole_rows(Tensor rows, Tensor ends, Tensor rank, int num_ranks, int dim) -> Tensor", dense, kernel=_whole_rows
)
