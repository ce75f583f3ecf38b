"""Rows of the groups that have the most, dealt to all ranks, each of which has a copy of these groups' matrices.

    rows, order, ends, copied = deal_rows(places, ends, 2, 16, 32, 1, True)   # 1 group is copied
    places, outside = own_slots(copied, rank, 4)   # where this rank's 4 groups have those that are copied, if they do
    shares = undealt_shares(places, ends, 2, 16, 32, True)    # the most rows for one rank if none were dealt

A rank then has its own groups, of which copied ones have no rows, and after them one for each that is copied: ``ends``
are those of all ranks, one rank's after another's, ``rows`` has the place of each row among these, and ``order`` the
row of each place. So all that is done with rows in groups is done with these (``row_routes.py``, ``own_rows.py``).

Of the rank that has the most rows for one other the group with the most is copied first, then the next. Copied rows of
a rank's tokens go to the ranks to which it sends the fewest besides, so that it has as many for each, where these are
enough. They stay in order: a rank's products of them are those of any other. All is counted on the device, in the step
itself, and on all ranks alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.ir.op_kernels.own_operator import own_operator
from zerofx.ir.op_kernels.row_routes import row_shares, sides


def _deal_rows(
    places: Tensor, ends: Tensor, num_ranks: int, num_tokens: int, num_rows: int, num_copies: int, by_group: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_groups, device = ends.shape[0], places.device
    size = num_groups // num_ranks
    row, _, _, token_rank = sides(places, ends, num_ranks, num_tokens, by_group=by_group, rows=None)
    numbers = torch.arange(num_rows, device=device)
    sources = torch.zeros_like(numbers).scatter_(0, row, token_rank)
    groups = torch.searchsorted(ends.to(torch.int64), numbers, right=True)
    counts = torch.zeros((num_groups + 1) * num_ranks, dtype=torch.int64, device=device)
    counts = counts.scatter_add_(0, groups * num_ranks + sources, torch.ones_like(groups)).view(-1, num_ranks)[:-1]
    copied = _busiest(counts, num_ranks, num_copies)
    slots = torch.full((num_groups + 1,), -1, dtype=torch.int64, device=device)
    slots[copied] = torch.arange(num_copies, device=device)
    stays = counts.masked_fill(slots[:-1].unsqueeze(1) >= 0, 0).view(num_ranks, size, num_ranks).sum(1)
    left = counts.index_select(0, copied).sum(0)  # of each source
    dealt = _deal(stays, left)
    slot = slots.index_select(0, groups)
    is_dealt = slot >= 0
    # Those of one source after another, of one group after another.
    turns = (sources * num_copies + slot).where(is_dealt, num_ranks * num_copies).argsort(stable=True)
    turn = torch.empty_like(turns)
    turn[turns] = numbers
    last = (left.cumsum(0) - left + dealt.cumsum(0)).t().flatten()  # of each source, for each owner
    owners = torch.searchsorted(last, turn, right=True) - sources * num_ranks
    place = groups.div(size, rounding_mode="floor") * (size + num_copies) + groups.remainder(size)
    place = (owners * (size + num_copies) + size + slot).where(is_dealt, place)
    order = place.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = numbers
    sizes = torch.zeros(num_ranks * (size + num_copies) + 1, dtype=torch.int64, device=device)
    sizes.scatter_add_(0, place, torch.ones_like(place))
    return rows, order, sizes[:-1].cumsum(0).to(ends.dtype), copied


def _busiest(counts: Tensor, num_ranks: int, num_copies: int) -> Tensor:
    """The groups that are copied, of those whose rows ``counts`` has by group and source."""
    left = counts.view(num_ranks, -1, num_ranks).clone()
    totals, size, copied = left.sum(2), left.shape[1], []
    for _ in range(num_copies):
        loads = left.sum(1).amax(1).masked_fill(totals.amax(1) < 0, -1)  # all of its groups are copied
        rank = loads.argmax(0, keepdim=True)
        group = rank * size + totals.index_select(0, rank).argmax(1)
        totals.view(-1).index_fill_(0, group, -1)
        left.view(-1, num_ranks).index_fill_(0, group, 0)
        copied.append(group)
    return torch.cat(copied)


def _deal(stays: Tensor, left: Tensor) -> Tensor:
    """The numbers of rows, by owner and source, that make those of each source as even as can be: ``left`` rows of a
    source are added to those in ``stays``."""
    low, order = stays.sort(dim=0, stable=True)
    before = low.cumsum(0)
    num = torch.arange(1, len(low) + 1, device=low.device).unsqueeze(1)
    up_to_next = num[:-1] * low[1:] - before[:-1]  # rows that the first few take before the next one does
    given = (up_to_next < left).sum(0, keepdim=True) + 1
    total = before.gather(0, given - 1) + left
    level = total.div(given, rounding_mode="floor")
    more = (level + (num <= total - level * given).to(torch.int64) - low).masked_fill(num > given, 0)
    return torch.zeros_like(stays).scatter_(0, order, more)


def _undealt_shares(
    places: Tensor, ends: Tensor, num_ranks: int, num_tokens: int, num_rows: int, by_group: bool
) -> Tensor:
    shares: Tensor = row_shares(places, ends, num_ranks, num_rows, num_tokens, num_rows, by_group)
    return shares[:1].clone()


def _empty_deal(
    places: Tensor, ends: Tensor, num_ranks: int, num_tokens: int, num_rows: int, num_copies: int, by_group: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = places.new_empty(num_rows, dtype=torch.int64)
    all_ends = ends.new_empty(ends.shape[0] + num_ranks * num_copies)
    return order, torch.empty_like(order), all_ends, order.new_empty(num_copies)


def _own_slots(copied: Tensor, rank: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    places = copied - rank * num_groups
    outside = (places < 0) | (places >= num_groups)
    return places.masked_fill_(outside, 0), outside


deal_rows = own_operator(
    "deal_rows(Tensor places, Tensor ends, int num_ranks, int num_tokens, int num_rows, int num_copies, bool by_group) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _empty_deal,
    kernel=_deal_rows,
)
undealt_shares = own_operator(
    "undealt_shares(Tensor places, Tensor ends, int num_ranks, int num_tokens, int num_rows, bool by_group) -> Tensor",
    lambda places, *_args: places.new_empty(1, dtype=torch.float32),
    kernel=_undealt_shares,
)
own_slots = own_operator(
    "own_slots(Tensor copied, Tensor rank, int num_groups) -> (Tensor, Tensor)",
    lambda copied, rank, num_groups: (torch.empty_like(copied), torch.empty_like(copied, dtype=torch.bool)),
    kernel=_own_slots,
)
