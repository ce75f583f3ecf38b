"""Rows that ranks send each other in several rounds, each within the room for one (``row_routes.py``).

    rounds = row_rounds(places, ends, 2, capacity, ..., 3, True)      # the round of each row, in order; 3: of none
    send, land = round_routes(places, ends, rounds, rank, 2, capacity, ..., True, True, 0)       # of the first round
    ends_0 = round_ends(ends, rounds, 0)                              # where groups end among the rows of that
    own = round_own_rows(x, ends, rounds, rank, 2, 0, 8, 0)           # ``own_rows``, and whole_rows, of a round
    home = land_more(home, received, land)                            # rows that have come home, in places for all
    y = add_home_rows(home, places, rank, 2, 16)                      # their sums, in the order of all moves

A rank's groups take turns in order: as many whole ones make a round as there is room for, so that what is summed over a
group's rows is so at once; only a group with more rows of one rank than that is in several. All are numbered on the
device, and on all ranks alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.op_kernels.own_operator import own_operator
from zerofx.ir.op_kernels.row_routes import (
    find_routes,
    first_rows,
    group_shares,
    in_shares,
    last_rows,
    row_shares,
    sides,
    unlike_shares,
)


def _row_rounds(
    places: Tensor,
    ends: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    num_rounds: int,
    by_group: bool,
    rows: Tensor | None = None,
) -> Tensor:
    num_groups, device = ends.shape[0], places.device
    row, _, _, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    sources = torch.zeros(num_rows, dtype=torch.int64, device=device).scatter_(0, row, token_rank)
    groups = torch.searchsorted(ends.to(torch.int64), torch.arange(num_rows, device=device), right=True)
    sets = groups * num_ranks + sources  # rows of one group from one rank
    counts = torch.zeros((num_groups + 1) * num_ranks, dtype=torch.int64, device=device)
    counts.scatter_add_(0, sets, torch.ones_like(sets))
    order = sets.argsort(stable=True)
    number = torch.empty_like(order)  # of a row in its set
    number[order] = torch.arange(num_rows, device=device) - (counts.cumsum(0) - counts).index_select(0, sets[order])
    left = counts[: num_groups * num_ranks].view(num_ranks, -1, num_ranks).clone()  # by owner, group and source
    sent = counts.new_zeros(counts.shape)
    rounds = torch.zeros_like(number)
    for _ in range(num_rounds):
        fits = (left.cumsum(1) <= capacity).all(2, keepdim=True)
        is_first = left.any(2, keepdim=True).cumsum(1).eq(1) & left.any(2, keepdim=True)
        going = left.masked_fill(~fits, 0) + left.clamp(max=capacity).masked_fill(fits | ~is_first, 0)
        left = left - going
        sent[: going.numel()] += going.view(-1)
        rounds += number >= sent.index_select(0, sets)
    return rounds


def _before(rounds: Tensor, number: int) -> Tensor:
    """The number of a round's rows before each, and before the end."""
    inside = (rounds == number).to(torch.int64)
    return torch.cat([inside.new_zeros(1), inside.cumsum(0)])


def _round_ends(ends: Tensor, rounds: Tensor, number: int) -> Tensor:
    return _before(rounds, number).index_select(0, ends.to(torch.int64)).to(ends.dtype)


def _round_routes(
    places: Tensor,
    ends: Tensor,
    rounds: Tensor,
    rank: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    by_group: bool,
    outward: bool,
    number: int,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    row, owner, token, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    before = _before(rounds, number)
    first_row = before.index_select(0, first_rows(ends, num_ranks).index_select(0, rank))
    is_there = rounds.index_select(0, row) == number
    own_row = before.index_select(0, row) - first_row
    own_token = token - rank * (num_tokens // num_ranks)
    source, target = (token_rank, owner) if outward else (owner, token_rank)
    home_place = (token_rank == rank).to(torch.int64).cumsum(0) - 1  # of each of this rank's moves among these
    begin, end = (own_token, own_row) if outward else (own_row, home_place)
    source, target = (ranks.where(is_there, num_ranks) for ranks in (source, target))
    send, received, is_received = find_routes(begin, source, target, rank, num_ranks, capacity)
    # A row is where one move ends; on its way out, one that is none is anything.
    slots = torch.full((num_rows + 1,), 0 if outward else -1, dtype=torch.int64, device=places.device)
    ends_at = end.index_select(0, received).clamp(max=num_rows)
    slots[ends_at.where(is_received, num_rows)] = torch.arange(num_ranks * capacity, device=places.device)
    return send, slots[:num_rows]


def _empty_routes(places: Tensor, *args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
    num_ranks, capacity, _, num_rows = args[3:7]
    return places.new_empty(num_ranks * capacity, dtype=torch.int64), places.new_empty(num_rows, dtype=torch.int64)


def _round_shares(
    places: Tensor,
    ends: Tensor,
    rounds: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    num_rounds: int,
    by_group: bool,
    rows: Tensor | None = None,
) -> Tensor:
    row, owner, _, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    pairs = owner.clamp(max=num_ranks - 1) * num_ranks + token_rank
    counts = torch.zeros((num_rounds + 1) * num_ranks**2, dtype=torch.int64, device=places.device)
    is_owned = (owner < num_ranks).to(torch.int64)
    counts.scatter_add_(0, rounds.index_select(0, row) * num_ranks**2 + pairs, is_owned)
    of_rounds = counts.view(num_rounds + 1, num_ranks, num_ranks)
    of_pairs = of_rounds.sum(0)
    # Homes have as many places as there are moves on average, and a row is where one ends.
    at_home, at_row = of_pairs.sum(0).max(), torch.zeros_like(rounds).scatter_add_(0, row, is_owned).max()
    is_over = (of_rounds[:-1].max() > capacity) | of_rounds[-1].any() | (at_row > 1)
    return in_shares(of_pairs.max(), ~(is_over | (at_home > places.shape[0] // num_ranks)), num_rows / num_ranks**2)


def _own_in_round(ends: Tensor, rounds: Tensor, rank: Tensor, num_ranks: int, number: int) -> Tensor:
    """True for this rank's rows of a round."""
    owner = torch.searchsorted(
        last_rows(ends, num_ranks), torch.arange(rounds.shape[0], device=rounds.device), right=True
    )
    return (owner == rank) & (rounds == number)


def _round_own_rows(
    rows: Tensor, ends: Tensor, rounds: Tensor, rank: Tensor, num_ranks: int, dim: int, num_rows: int, number: int
) -> Tensor:
    order = (~_own_in_round(ends, rounds, rank, num_ranks, number)).to(torch.int8).argsort(stable=True)
    return rows.index_select(dim, order[:num_rows])


def _round_whole_rows(
    rows: Tensor, ends: Tensor, rounds: Tensor, rank: Tensor, num_ranks: int, dim: int, num_rows: int, number: int
) -> Tensor:
    is_own = _own_in_round(ends, rounds, rank, num_ranks, number)
    places = (is_own.to(torch.int64).cumsum(0) - 1).clamp_(0, rows.shape[dim] - 1)
    elsewhere = (~is_own).view(-1, *(1,) * (rows.dim() - dim - 1))
    return rows.index_select(dim, places).masked_fill_(elsewhere, 0)


def _as_many_rows(rows: Tensor, *args: Any) -> Tensor:
    dim, num_rows = args[4:6]
    return rows.new_empty(*rows.shape[:dim], num_rows, *rows.shape[dim + 1 :])


def _land_more(at_home: Tensor, received: Tensor, land: Tensor) -> Tensor:
    is_there = (land >= 0).view(-1, *(1,) * (at_home.dim() - 1))
    return torch.where(is_there, received.flatten(0, 1).index_select(0, land.clamp(min=0)), at_home)


def _add_home_rows(at_home: Tensor, places: Tensor, rank: Tensor, num_ranks: int, num_tokens: int) -> Tensor:
    num_own = num_tokens // num_ranks
    own = (places.div(num_own, rounding_mode="floor") != rank).to(torch.int64).argsort(stable=True)
    tokens = places.index_select(0, own[: at_home.shape[0]]) - rank * num_own
    inside = (tokens >= 0) & (tokens < num_own)
    rows = at_home.masked_fill(~inside.view(-1, *(1,) * (at_home.dim() - 1)), 0)
    sums = at_home.new_zeros(num_own, *at_home.shape[1:])
    return sums.index_put_((tokens.where(inside, 0),), rows, accumulate=True)


row_rounds = own_operator(
    "row_rounds(Tensor places, Tensor ends, int num_ranks, int capacity, int num_tokens, int num_rows, int num_rounds, "
    "bool by_group, *, Tensor? rows=None) -> Tensor",
    lambda places, ends, num_ranks, capacity, num_tokens, num_rows, num_rounds, by_group, **_kwargs: places.new_empty(
        num_rows, dtype=torch.int64
    ),
    kernel=_row_rounds,
)
round_ends = own_operator(
    "round_ends(Tensor ends, Tensor rounds, int number) -> Tensor",
    lambda ends, rounds, number: ends.new_empty(ends.shape),
    kernel=_round_ends,
)
round_routes = own_operator(
    "round_routes(Tensor places, Tensor ends, Tensor rounds, Tensor rank, int num_ranks, int capacity, int num_tokens, "
    "int num_rows, bool by_group, bool outward, int number, *, Tensor? rows=None) -> (Tensor, Tensor)",
    _empty_routes,
    kernel=_round_routes,
)
_OF_ROUND = (
    "(Tensor rows, Tensor ends, Tensor rounds, Tensor rank, int num_ranks, int dim, int num_rows, int number) -> Tensor"
)
round_own_rows = own_operator(f"round_own_rows{_OF_ROUND}", _as_many_rows, kernel=_round_own_rows)
round_whole_rows = own_operator(f"round_whole_rows{_OF_ROUND}", _as_many_rows, kernel=_round_whole_rows)
round_shares = own_operator(
    "round_shares(Tensor places, Tensor ends, Tensor rounds, int num_ranks, int capacity, int num_tokens, "
    "int num_rows, int num_rounds, bool by_group, *, Tensor? rows=None) -> Tensor",
    lambda places, *_args, **_kwargs: places.new_empty(2, dtype=torch.float32),
    kernel=_round_shares,
)
land_more = own_operator(
    "land_more(Tensor home, Tensor received, Tensor land) -> Tensor",
    lambda at_home, received, land: at_home.new_empty(at_home.shape),
    kernel=_land_more,
)
add_home_rows = own_operator(
    "add_home_rows(Tensor home, Tensor places, Tensor rank, int num_ranks, int num_tokens) -> Tensor",
    lambda at_home, places, rank, num_ranks, num_tokens: at_home.new_empty(num_tokens // num_ranks, *at_home.shape[1:]),
    kernel=_add_home_rows,
)


def may_miss_rows(node: fx.Node) -> bool:
    """True for a count of rows of which some may find no room."""
    if node.target is row_shares:
        _, _, _, capacity, _, num_rows, _ = node.args
    elif node.target is group_shares:
        _, _, capacity, num_rows = node.args
    else:
        return node.target in (round_shares, unlike_shares)
    assert isinstance(capacity, int) and isinstance(num_rows, int)
    return capacity < num_rows
