"""Plans along one order of moves, each carried out, and its memory counted whole.

Ways to have less memory are put in one fixed order, best first (``search/order.py``): activations computed again or
offloaded, buckets gathered again rather than kept, gathers issued later, reductions awaited earlier. A plan is a length
of that order. Every plan that is tried is carried out and its memory counted at every position, so the peak that is
compared with the budget is that of the step which will run.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.choice import Item, plan_of
from zerofx.scheduler.search.items import num_free
from zerofx.scheduler.search.order import order_moves
from zerofx.scheduler.search.question import Question
from zerofx.scheduler.search.rehearsal import Held, Rehearsal

_SCANNED = 16  # lengths of an order that are tried, at least, before a budget is said to be out of its reach
_HALVED_AFTER = 5  # every fifth guess is the middle of what is left, in case moves free other bytes than they should
CARRIED_OUT = ("tile", "divide", "recompute", "spread", "compress")
"""The passes that the graph of ``plan_of`` has been through, whose nodes a plan names like captured ones."""


class Prefixes:
    """One order of moves, and the lengths of it that have been tried: looks for the shortest that fits.

    ``items`` are what moves are about, ``name`` is what texts call their order. ``first`` is another order for the same
    question: without a move, both have one plan. ``count`` is called for every length that is tried.
    """

    def __init__(
        self,
        question: Question,
        name: str,
        items: Sequence[Item],
        rehearsal: Rehearsal,
        first: Prefixes | None = None,
        count: Callable[[], object] = lambda: None,
    ) -> None:
        self._question, self._rehearsal, self.name, self._count = question, rehearsal, name, count
        self._items, self._first = items, first
        self._moves = order_moves([item.levels for item in self._items])
        self._freed = list(accumulate((move.freed_bytes for move in self._moves), initial=0))
        of_states = (move.freed_bytes * (items[move.item].kind == "states") for move in self._moves)
        self._states = list(accumulate(of_states, operator.sub, initial=question.bytes_of_states))
        self._tried: dict[int, tuple[Held, Plan]] = {}
        self._fitting = 0

    def try_length(self, length: int) -> tuple[Held, Plan]:
        """Peak memory and plan of the first ``length`` moves."""
        if length == 0 and self._first is not None:
            return self._first.try_length(0)
        if length not in self._tried:
            self._count()
            plan, carried_out = plan_of(self._question, self._items, self._moves[:length])
            self._tried[length] = (self._rehearsal.peak_memory(plan, carried_out, CARRIED_OUT), plan)
        return self._tried[length]

    @property
    def num_tried(self) -> int:
        """Lengths that have been tried."""
        return len(self._tried)

    @property
    def num_moves(self) -> int:
        return len(self._moves)

    @property
    def last_bytes(self) -> int:
        """The peak after all moves."""
        return self._bytes(len(self._moves))

    @property
    def known_bytes(self) -> int:
        """Bytes that are known to be needed: the peak after all moves, or where that has not been tried the states."""
        return self.last_bytes if len(self._moves) in self._tried else self._states[-1]

    def may_fit(self, budget: int) -> bool:
        """False if every length holds more: fewer moves keep all that is held at the peak after all of them, but for
        values that are computed again there."""
        return self._states[-1] <= budget and self.try_length(len(self._moves))[0].firm_bytes <= budget

    def lowest(self, limit: float = math.inf) -> tuple[int, Plan]:
        """The least peak, and its plan, of some lengths of the whole order, and around the best of them.

        What a length holds firmly, all shorter ones do: they are looked at as long as that is less than the best, and
        within ``limit``.
        """
        last = len(self._moves)
        gap = max(1, last // _SCANNED)
        tried = {last: self._bytes(last)}
        best = length = last
        while length > 0 and (firm := self.try_length(length)[0].firm_bytes) < tried[best] and firm <= limit:
            length = max(0, length - gap)
            tried[length] = self._bytes(length)
            best = min(tried, key=lambda n: (tried[n], n))
        while gap := gap // 2:
            tried |= {n: self._bytes(n) for n in (best - gap, best + gap) if 0 <= n <= last}
            best = min(tried, key=lambda n: (tried[n], n))
        return tried[best], self.try_length(best)[1]

    def find_plan(self, budget: int) -> Plan | None:
        """The plan of a length that fits, one move fewer being too few; None where not even all moves are enough.

        Moves that cost nothing are always made. The length is looked for where enough bytes should be free, going by
        what the moves tried so far have really freed.
        """
        length = self._shortest(budget)
        self._fitting = length or 0
        return self.try_length(length)[1] if length is not None else None

    def drop_prefetching(self) -> Prefixes | None:
        """The same order without the prefetch move, if the plan that was found contains it; None else.

        None too where it has most parameters come from nvme: those that are issued ahead take the host's memory.
        """
        moved = [self._items[move.item] for move in self._moves[: self._fitting]]
        num_parameters = sum(item.kind == "parameters" for item in self._items)
        num_from_nvme = sum(item.kind == "parameters" and item.levels[1].tier == "nvme" for item in moved)
        if 2 * num_from_nvme > num_parameters or all(item.kind != "prefetch" for item in moved):
            return None
        items = [item for item in self._items if item.kind != "prefetch"]
        name = f"{self.name}, gathers as far ahead"
        return Prefixes(self._question, name, items, self._rehearsal, self, self._count)

    def _shortest(self, budget: int) -> int | None:
        low = num_free(self._items, self._moves) if self._question.inlines else 0
        high = len(self._moves)
        # States that stay on the device are there at every position, which no plan need be made to see.
        if self._states[low] <= budget and self._bytes(low) <= budget:
            return low
        if self._states[high] > budget or self._bytes(high) > budget:
            return None
        near: Sequence[int] = (low, high)
        tried = 0
        while high - low > 1:
            tried += 1
            guess = self._guess(near, budget) if tried % _HALVED_AFTER else (low + high) // 2
            if not low < guess < high:
                guess = min(max(self._guess((low, high), budget), low + 1), high - 1)
            # The two next to the budget say best what the moves between them and it will free.
            near = sorted((*near, guess), key=lambda length: abs(self._bytes(length) - budget))[:2]
            if self._bytes(guess) <= budget:
                high = guess
            else:
                low = guess
        return high

    def _bytes(self, length: int) -> int:
        return self.try_length(length)[0].peak_bytes

    def _guess(self, near: Sequence[int], budget: int) -> int:
        """The shortest length that should fit, going by what the moves between two tried lengths have really freed."""
        first, second = sorted(near)
        freed = self._freed[second] - self._freed[first]
        share = max(0, self._bytes(first) - self._bytes(second)) / freed if freed > 0 else 0.0
        wanted = self._freed[second] - (budget - self._bytes(second)) / (share or 1.0)
        return bisect_left(self._freed, wanted)


def least(orders: Sequence[Prefixes], limit: float = math.inf) -> list[tuple[int, Plan]]:
    """The least peak, and its plan, of the order whose last length is the least, where only what is within ``limit`` is
    looked for; empty where there are no orders."""
    return [min(orders, key=lambda order: order.last_bytes).lowest(limit)] if orders else []
