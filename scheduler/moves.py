"""The one fixed order in which memory is bought with time.

What can be decided is a list of *items*: the activations of a repeated layer, whether a bucket is kept gathered, how
far ahead gathers are issued, where a bucket's optimizer states live. Each item has a menu of levels, from the fastest
to the one with the least memory. A *move* takes one item one level down. Moves are ordered by bytes freed per second
that they cost, so that a prefix of the order is a plan, and a longer prefix one with less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Priced(Protocol):
    """A level of a menu: bytes on the device at the peak, and seconds, both compared with the other levels'."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


@dataclass(frozen=True)
class Move:
    """Item ``item`` goes to level ``level`` of its menu from the one before."""

    item: int
    level: int
    freed_bytes: int
    extra_seconds: float

    @property
    def rate(self) -> float:
        """Bytes freed per second."""
        return self.freed_bytes / self.extra_seconds if self.extra_seconds > 0 else float("inf")


def order_moves(menus: Sequence[Sequence[Priced]]) -> list[Move]:
    """All moves, best first; the moves of one item stay in the order of its menu, earlier items come first."""
    moves = []
    for item, levels in enumerate(menus):
        worst = float("inf")
        for position in range(1, len(levels)):
            before, after = levels[position - 1], levels[position]
            move = Move(item, position, before.num_bytes - after.num_bytes, after.seconds - before.seconds)
            worst = min(worst, move.rate)
            moves.append((worst, move))
    moves.sort(key=lambda pair: (-pair[0], pair[1].level, pair[1].item))
    return [move for _, move in moves]


def reached(moves: Sequence[Move]) -> dict[int, Move]:
    """The last move of each item that has one, by item."""
    last: dict[int, Move] = {}
    for move in moves:
        last[move.item] = move
    return dict(sorted(last.items()))
