"""Fold repetitions in lists, so that a hundred equal layers are shown as one, times a hundred."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_LONGEST = 64  # instructions in one repetition; a layer has about ten
_ALIKE = 3  # equal items in a row, at least, that are folded without an anchor


@dataclass(frozen=True)
class Block:
    """``count`` repetitions of ``length`` items from item ``start`` on; what does not repeat has count and length 1."""

    start: int
    length: int
    count: int

    def repetition(self, number: int) -> range:
        """The items of one repetition."""
        first = self.start + number * self.length
        return range(first, first + self.length)


def fold(shapes: Sequence[Hashable], anchors: Sequence[bool] | None = None) -> list[Block]:
    """Blocks that cover all items in order.

    Args:
        shapes: what makes two items look alike, one an item.
        anchors: items of which a repetition must hold at least one (computation in a repeated layer), so that a row of
            collectives between two layers is not taken for a layer; None: all items. Only a long run of one item needs
            none.

    Where more than one repetition fits, the one that covers most items wins, then the shortest.
    """
    numbers: dict[Hashable, int] = {}
    items = [numbers.setdefault(shape, len(numbers)) for shape in shapes]
    blocks: list[Block] = []
    start = 0
    while start < len(items):
        best = Block(start, 1, 1)
        for length in range(1, min(_LONGEST, (len(items) - start) // 2) + 1):
            count = _repetitions(items, start, length)
            anchored = anchors is None or any(anchors[start : start + length])
            if not anchored and not (length == 1 and count >= _ALIKE):
                continue
            if count > 1 and count * length > best.count * best.length:
                best = Block(start, length, count)
        blocks.append(best)
        start += best.length * best.count
    return blocks


def _repetitions(items: Sequence[int], start: int, length: int) -> int:
    period, count = items[start : start + length], 1
    while items[start + count * length : start + (count + 1) * length] == period:
        count += 1
    return count


def span(names: Sequence[str]) -> str:
    """``h.0 … h.11`` for the names of successive repetitions, in the order they come."""
    return names[0] if len(set(names)) == 1 else f"{names[0]} … {names[-1]}"
