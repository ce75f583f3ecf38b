"""The one fixed order in which memory is bought with time.

What can be decided is a list of *items*: the activations of a repeated layer, whether a bucket is kept gathered, how
far ahead gathers are issued, where a bucket's optimizer states live. Each item has a menu of levels, from the fastest
to the one with the least memory. A *move* takes one item one level down. Moves are ordered by bytes freed per second
that they cost, so that a prefix of the order is a plan, and a longer prefix one with less memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zerofx.scheduler.decide.ledger import Level


@dataclass(frozen=True)
class Move:
    """Item ``item`` goes to level ``level`` of its menu from the one before."""

    item: int
    level: int
    freed_bytes: int
    extra_seconds: float


def moves_of(item: int, levels: Sequence[Level]) -> list[Move]:
    """The moves along the menu of one item."""
    return [
        Move(item, level, before.num_bytes - after.num_bytes, after.seconds - before.seconds)
        for level, (before, after) in enumerate(itertools.pairwise(levels), start=1)
    ]


def order_moves(menus: Sequence[Sequence[Level]]) -> list[Move]:
    """All moves, best first; the moves of one item stay in the order of its menu, earlier items come first.

    Where a menu is not convex, a move that is worth little opens the way to better ones: they are worth, together, what
    they free for what they cost together (the slope of the menu's convex hull), and one item goes all that way before
    the next begins.
    """
    moves = []
    for item, levels in enumerate(menus):
        steps = moves_of(item, levels)
        moves += [(rate, move) for rate, move in zip(_hull_rates(steps), steps, strict=True)]
    moves.sort(key=lambda pair: (-pair[0], pair[1].item, pair[1].level))
    return [move for _, move in moves]


def _hull_rates(steps: Sequence[Move]) -> list[float]:
    """The rate at which each of an item's moves counts, none better than the one before (pool adjacent violators)."""
    pools: list[tuple[int, float, int]] = []  # bytes, seconds, number of moves
    for move in steps:
        pool = (move.freed_bytes, move.extra_seconds, 1)
        while pools and _rate(pools[-1][0], pools[-1][1]) < _rate(pool[0], pool[1]):
            freed, spent, number = pools.pop()
            pool = (freed + pool[0], spent + pool[1], number + pool[2])
        pools.append(pool)
    return [_rate(freed, spent) for freed, spent, number in pools for _ in range(number)]


def _rate(freed_bytes: int, seconds: float) -> float:
    return freed_bytes / seconds if seconds > 0 else float("inf")


def last_moves(moves: Sequence[Move]) -> dict[int, Move]:
    """The last move of each item that has one, by item."""
    last: dict[int, Move] = {}
    for move in moves:
        last[move.item] = move
    return dict(sorted(last.items()))
