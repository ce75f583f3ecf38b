"""Rows in groups of lengths that only the step knows, tokens of experts, of which each rank has some groups.

    own = own_rows(x, ends, rank, 2, 0, 8)         # this rank's rows first, in order; the others after them
    y = grouped_mm(own, w, own_ends(ends, rank, 2, 8))   # w: the matrices of this rank's groups; makes its rows alone
    term = whole_rows(y, ends, rank, 2, 0, 8)      # this rank's rows in their places, zeros elsewhere: terms of a sum
    b = group_rows(bias, own_ends(...), 8)         # for each row what its group has, of which a rank has its own
    gb = add_group_rows(gy, own_ends(...))         # sums over rows of groups

``ends`` has where each group ends, ``[groups]``; rank i of n has the i-th n-th of the groups. Shapes do not depend on
how long groups are, and nothing waits for the host. A rank may have room for some rows alone: what is over is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.ir.op_kernels.own_operator import own_operator


def _bounds(ends: Tensor, rank: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Start and end of a rank's rows, of shape [1]; ``rank``: int64, shape [1]."""
    starts = torch.cat([ends.new_zeros(1), ends])
    size = ends.shape[0] // num_ranks
    return starts.index_select(0, rank * size), starts.index_select(0, (rank + 1) * size)


def _own_ends(ends: Tensor, rank: Tensor, num_ranks: int, num_rows: int) -> Tensor:
    first, _ = _bounds(ends, rank, num_ranks)
    return ends.view(num_ranks, -1).index_select(0, rank).view(-1).sub_(first).clamp_(max=num_rows)


def _own_rows(rows: Tensor, ends: Tensor, rank: Tensor, num_ranks: int, dim: int, num_rows: int) -> Tensor:
    first, _ = _bounds(ends, rank, num_ranks)
    places = torch.arange(num_rows, device=rows.device).add_(first).remainder_(rows.shape[dim])
    return rows.index_select(dim, places)


def _whole_rows(rows: Tensor, ends: Tensor, rank: Tensor, num_ranks: int, dim: int, num_rows: int) -> Tensor:
    first, last = _bounds(ends, rank, num_ranks)
    places = torch.arange(num_rows, device=rows.device).sub_(first).remainder_(num_rows)
    whole = rows.index_select(dim, places.clamp(max=rows.shape[dim] - 1))
    elsewhere = (places >= last - first).view(-1, *(1,) * (rows.dim() - dim - 1))
    return whole.masked_fill_(elsewhere, 0)


def _groups_of(ends: Tensor, num_rows: int) -> Tensor:
    """The group of each row; of those after all groups the last."""
    numbers = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, numbers, right=True).clamp_(max=ends.shape[0] - 1)


def _group_rows(groups: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    return groups.index_select(0, _groups_of(ends, num_rows))


def _add_group_rows(rows: Tensor, ends: Tensor) -> Tensor:
    elsewhere = torch.arange(rows.shape[0], device=rows.device) >= ends[-1:]
    inside = rows.masked_fill(elsewhere.view(-1, *(1,) * (rows.dim() - 1)), 0)
    sums = rows.new_zeros(ends.shape[0], *rows.shape[1:])
    return sums.index_put_((_groups_of(ends, rows.shape[0]),), inside, accumulate=True)


def _part_of_ends(ends: Tensor, rank: Tensor, num_ranks: int, num_rows: int) -> Tensor:
    return ends.new_empty(ends.shape[0] // num_ranks)


def _as_many_rows(rows: Tensor, ends: Tensor, rank: Tensor, num_ranks: int, dim: int, num_rows: int) -> Tensor:
    return rows.new_empty(*rows.shape[:dim], num_rows, *rows.shape[dim + 1 :])


own_ends = own_operator(
    "own_ends(Tensor ends, Tensor rank, int num_ranks, int num_rows) -> Tensor", _part_of_ends, kernel=_own_ends
)
own_rows = own_operator(
    "own_rows(Tensor rows, Tensor ends, Tensor rank, int num_ranks, int dim, int num_rows) -> Tensor",
    _as_many_rows,
    kernel=_own_rows,
)
whole_rows = own_operator(
    "whole_rows(Tensor rows, Tensor ends, Tensor rank, int num_ranks, int dim, int num_rows) -> Tensor",
    _as_many_rows,
    kernel=_whole_rows,
)
group_rows = own_operator(
    "group_rows(Tensor groups, Tensor ends, int num_rows) -> Tensor",
    lambda groups, ends, num_rows: groups.new_empty(num_rows, *groups.shape[1:]),
    kernel=_group_rows,
)
add_group_rows = own_operator(
    "add_group_rows(Tensor rows, Tensor ends) -> Tensor",
    lambda rows, ends: rows.new_empty(ends.shape[0], *rows.shape[1:]),
    kernel=_add_group_rows,
)
