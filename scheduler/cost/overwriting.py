"""Which loops of a kernel are written over what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

Loop = TypeVar("Loop")
Value = TypeVar("Value")


def overwriting_order(
    loops: Sequence[Loop], ends: Mapping[Loop, AbstractSet[Value]], needs: Mapping[Loop, AbstractSet[Loop]]
) -> list[Loop]:
    """An order of the loops of one kernel in which many are the last to read a value, which they can be written over.

    From the last on, the loop comes that reads the fewest values which no later one reads, but one at least. Where that
    is no better than the order as it is, that stays.

    Args:
        ends: the values of the size of its result that a loop reads, and that nothing reads after the kernel.
        needs: the loops whose results a loop needs, directly or not; others than the kernel's may be among them.
    """
    rest, order, claimed = list(loops), list[Loop](), set[Value]()
    while rest:
        free = [entry for entry in rest if not any(entry in needs[other] for other in rest)]
        numbers = {element: len(ends[element] - claimed) for element in free}
        taken = min(reversed(free), key=lambda loop: (not numbers[loop], numbers[loop]))
        rest.remove(taken)
        order.insert(0, taken)
        claimed |= ends[taken]
    return order if len(overwritten(order, ends)) > len(overwritten(loops, ends)) else list(loops)


def overwritten(order: Sequence[Loop], ends: Mapping[Loop, AbstractSet[Value]]) -> dict[Loop, set[Value]]:
    """The values that each loop, in this order, is the last to read, for the loops that have some."""
    values, later = dict[Loop, set[Value]](), set[Value]()
    for loop in reversed(order):
        if last := ends[loop] - later:
            values[loop] = set(last)
        later |= ends[loop]
    return values
