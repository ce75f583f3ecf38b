"""Rows that ranks send each other by index: tokens to the ranks of their experts, and what these make of them back.

Each of N moves takes a row of one tensor to a row of another. One of the two lies in groups of rows, of which each rank
has some (``zerofx/ir/op_kernels/own_rows.py``), the other in equal parts: tokens. A move's number is its row in groups
where ``by_group``, else its token, and ``places`` has the other. It goes from tokens to groups where ``outward``.
Where groups are dealt (``row_copies.py``), ``rows`` has the place of each row in them; moves keep their numbers.

    send, land = row_routes(places, ends, rank, 2, capacity, ...)
    packed = pack_rows(tokens, send, 2)        # for each rank, the rows that it is sent, and zeros: [2, capacity, ...]
    received = ...                             # an all-to-all
    rows = land_rows(received, land)           # each row of the result is one that was received
    sums = add_rows(received, land, 8)         # or it is the sum of those that were, in the order of their moves
    shares = row_shares(places, ends, 2, capacity, ...)   # the most that a rank has for another, in equal shares of the
                                                          # rows; again if it is more than ``capacity``, otherwise 0
    shares = unlike_shares(groups, ends, 2)    # as if no room were enough if a row's ``groups`` is not that it lies in

Every rank knows all moves, so that no counts are sent and nothing waits for the host. Of a rank's rows for another only
``capacity`` go: ``row_shares`` tells how many there are at most, and whether these are more, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zerofx.ir.op_kernels.own_operator import own_operator


def last_rows(ends: Tensor, num_ranks: int) -> Tensor:
    """The end of each rank's rows."""
    return ends.view(num_ranks, -1)[:, -1].to(torch.int64, memory_format=torch.contiguous_format)


def first_rows(ends: Tensor, num_ranks: int) -> Tensor:
    """The first of each rank's rows, and the end of all."""
    last = last_rows(ends, num_ranks)
    return torch.cat([last.new_zeros(1), last])


def sides(
    places: Tensor, ends: Tensor, num_ranks: int, num_tokens: int, *, by_group: bool, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each move its row in groups, the rank that has it, its token, and that token's rank."""
    numbers = torch.arange(places.shape[0], device=places.device)
    row, token = (numbers, places) if by_group else (places, numbers)
    row = row if rows is None else rows.index_select(0, row)
    owner = torch.searchsorted(last_rows(ends, num_ranks), row, right=True)
    return row, owner, token, token.div(num_tokens // num_ranks, rounding_mode="floor")


def moves_by_rank(other: Tensor, num_ranks: int, capacity: int) -> tuple[Tensor, Tensor]:
    """The moves with each ``other`` rank, in order, ``capacity`` places for each, and which places are taken."""
    order = other.argsort(stable=True)
    ranks = torch.arange(num_ranks, device=other.device)
    in_order = other.index_select(0, order)
    first = torch.searchsorted(in_order, ranks)
    end = torch.searchsorted(in_order, ranks, right=True)
    at = first.unsqueeze(1) + torch.arange(capacity, device=other.device)
    moves = order.index_select(0, at.clamp(max=other.shape[0] - 1).view(-1))
    return moves, (at < end.unsqueeze(1)).view(-1)


def find_routes(
    begin: Tensor, source: Tensor, target: Tensor, rank: Tensor, num_ranks: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that a rank sends, each where its move begins, or -1; and its moves from others, as ``moves_by_rank``
    gives them. Moves go from ``source`` to ``target`` ranks; those of rank ``num_ranks`` are none."""
    sent, is_sent = moves_by_rank(target.where(source == rank, num_ranks), num_ranks, capacity)
    send = begin.index_select(0, sent).masked_fill_(~is_sent, -1)
    return send, *moves_by_rank(source.where(target == rank, num_ranks), num_ranks, capacity)


def _row_routes(
    places: Tensor,
    ends: Tensor,
    rank: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    by_group: bool,
    outward: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    row, owner, token, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    first_row = first_rows(ends, num_ranks).index_select(0, rank)
    own_row, own_token = row - first_row, token - rank * (num_tokens // num_ranks)
    source, target = (token_rank, owner) if outward else (owner, token_rank)
    begin, end = (own_token, own_row) if outward else (own_row, own_token)
    send, received, is_received = find_routes(begin, source, target, rank, num_ranks, capacity)
    if by_group != outward:  # moves are numbered by where they begin: results are sums of them
        return send, end.index_select(0, received).masked_fill_(~is_received, -1)
    slots = torch.zeros(num_rows + 1, dtype=torch.int64, device=places.device)
    ends_at = end.index_select(0, received).clamp(max=num_rows)
    slots[ends_at.where(is_received, num_rows)] = torch.arange(num_ranks * capacity, device=places.device)
    return send, slots[:num_rows]


def _empty_routes(
    places: Tensor,
    ends: Tensor,
    rank: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    by_group: bool,
    outward: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    sums = by_group != outward
    return tuple(
        places.new_empty(num, dtype=torch.int64)
        for num in (num_ranks * capacity, num_ranks * capacity if sums else num_rows)
    )  # type: ignore[return-value]  # two


def _sum_order(
    places: Tensor,
    ends: Tensor,
    rank: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    by_group: bool,
    outward: bool,
    rows: Tensor,
) -> Tensor:
    row, source, _, target = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    if outward:
        source, target = target, source
    _, received, is_received = find_routes(row, source, target, rank, num_ranks, capacity)
    return received.masked_fill_(~is_received, places.shape[0]).argsort(stable=True)


def _row_shares(
    places: Tensor,
    ends: Tensor,
    num_ranks: int,
    capacity: int,
    num_tokens: int,
    num_rows: int,
    by_group: bool,
    rows: Tensor | None = None,
) -> Tensor:
    _, owner, _, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=rows)
    counts = torch.zeros(num_ranks * (num_ranks + 1), dtype=torch.int64, device=places.device)
    counts.scatter_add_(0, owner * num_ranks + token_rank, torch.ones_like(owner))
    most = counts[: num_ranks * num_ranks].max()
    return in_shares(most, most <= capacity, num_rows / num_ranks**2)


def _group_shares(ends: Tensor, num_ranks: int, capacity: int, num_rows: int) -> Tensor:
    most = first_rows(ends, num_ranks).diff().max()
    return in_shares(most, most <= capacity, num_rows / num_ranks)


def _unlike_shares(places: Tensor, ends: Tensor, num_ranks: int) -> Tensor:
    rows = torch.arange(places.shape[0], dtype=ends.dtype, device=ends.device)
    is_unlike = (torch.searchsorted(ends, rows, right=True) != places).any()
    return is_unlike.to(torch.float32).mul_(num_ranks**2).repeat(2)


def in_shares(most: Tensor, fits: Tensor, share: float) -> Tensor:
    """A number of rows in equal shares of ``share`` rows, and again, or 0 if all find room."""
    shares = most.to(torch.float32).div_(share)
    return torch.stack([shares, shares.masked_fill(fits, 0)])


def _pack_rows(rows: Tensor, send: Tensor, num_ranks: int) -> Tensor:
    packed = rows.index_select(0, send.clamp(0, rows.shape[0] - 1))
    packed.masked_fill_((send < 0).view(-1, *(1,) * (rows.dim() - 1)), 0)
    return packed.view(num_ranks, -1, *rows.shape[1:])


def _land_rows(received: Tensor, land: Tensor) -> Tensor:
    return received.flatten(0, 1).index_select(0, land)


def _add_rows(received: Tensor, land: Tensor, num_rows: int) -> Tensor:
    # What was not sent is zeros, which the first row is none the worse for.
    sums = received.new_zeros(num_rows, *received.shape[2:])
    inside = land.where(land < num_rows, -1)
    return sums.index_put_((inside.clamp(min=0),), received.flatten(0, 1), accumulate=True)


def _two_numbers(first: Tensor, *_args: object, **_kwargs: object) -> Tensor:
    return first.new_empty(2, dtype=torch.float32)


row_routes = own_operator(
    "row_routes(Tensor places, Tensor ends, Tensor rank, int num_ranks, int capacity, int num_tokens, int num_rows, "
    "bool by_group, bool outward, *, Tensor? rows=None) -> (Tensor, Tensor)",
    _empty_routes,
    kernel=_row_routes,
)
sum_order = own_operator(
    "sum_order(Tensor places, Tensor ends, Tensor rank, int num_ranks, int capacity, int num_tokens, bool by_group, "
    "bool outward, *, Tensor rows) -> Tensor",
    lambda places, ends, rank, num_ranks, capacity, *_args, rows: places.new_empty(
        num_ranks * capacity, dtype=torch.int64
    ),
    kernel=_sum_order,
)
pack_rows = own_operator(
    "pack_rows(Tensor rows, Tensor send, int num_ranks) -> Tensor",
    lambda rows, send, num_ranks: rows.new_empty(num_ranks, send.shape[0] // num_ranks, *rows.shape[1:]),
    kernel=_pack_rows,
)
land_rows = own_operator(
    "land_rows(Tensor received, Tensor land) -> Tensor",
    lambda received, land: received.new_empty(land.shape[0], *received.shape[2:]),
    kernel=_land_rows,
)
add_rows = own_operator(
    "add_rows(Tensor received, Tensor land, int num_rows) -> Tensor",
    lambda received, land, num_rows: received.new_empty(num_rows, *received.shape[2:]),
    kernel=_add_rows,
)
row_shares = own_operator(
    "row_shares(Tensor places, Tensor ends, int num_ranks, int capacity, int num_tokens, int num_rows, bool by_group, "
    "*, Tensor? rows=None) -> Tensor",
    _two_numbers,
    kernel=_row_shares,
)
group_shares = own_operator(
    "group_shares(Tensor ends, int num_ranks, int capacity, int num_rows) -> Tensor", _two_numbers, kernel=_group_shares
)
unlike_shares = own_operator(
    "unlike_shares(Tensor places, Tensor ends, int num_ranks) -> Tensor", _two_numbers, kernel=_unlike_shares
)


def most_shares(shares: Iterable[Tensor]) -> float:
    """The largest of several counts of rows, in equal shares. The host waits for them."""
    return max(each[0].item() for each in shares)


def most_undealt(shares: Iterable[Tensor]) -> float:
    """The same of rows that are dealt, if they were not; 0 of others. The host waits for them."""
    return max((each[2].item() for each in shares if len(each) > 2), default=0.0)
