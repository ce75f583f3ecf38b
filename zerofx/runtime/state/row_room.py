"""Room for rows of experts that ranks send each other: as much as steps have asked for so far, within their budgets.

A step in which rows find none is run again, by what ranks have counted in it: with room for as many, or, where no plan
with that fits the memory budget, in several rounds with the room that steps begin with. The next step sends its rows at
once again; after several in a row that could not, one of every 2, 4, ... steps does.

Where experts may be copied, rows that find no room are first dealt to all ranks, with the room that there is; if a step
is no faster so than with room for them, there is room for them. That goes on until some steps in a row, 1, 2, 4, ...,
would have had room without.
"""

from __future__ import annotations

import math

from zerofx.errors import InternalError, MemoryBudgetError
from zerofx.scheduler.plan.placements import FIRST_CAPACITY, next_capacity
from zerofx.scheduler.plan.plan import Plan

_MOST_IN_A_ROW = 64  # steps in rounds, or with copied experts, before rows are sent at once, to their own experts
_MOST_ROUNDS = 4  # for each rank: experts take turns, so that there are more than rows alone ask for


class RowRoom:
    """Room that steps to come are to have. ``capacity``: of a rank for rows that are sent at once, in equal shares;
    ``most_copies``: the experts of a layer that may be copied."""

    def __init__(self, most_copies: int = 0) -> None:
        self.capacity, self._most_copies = FIRST_CAPACITY, most_copies
        self._needed = 0.0  # what steps with copied experts would have in their place
        self._unpaid = 0.0  # such a capacity with which steps are no slower
        self._num_with_copies, self._latest_copies = 0, 0  # steps with copied experts, as those in rounds
        # A capacity that fits no budget, and one that did.
        self._too_large, self._fitting = math.inf, FIRST_CAPACITY
        self._num_rounds = 1  # as many as have been needed
        self._num_in_rounds, self._latest = 0, 0  # steps in rounds: to come, and those of the latest row

    @property
    def size(self) -> tuple[float, int]:
        """The capacity of the coming step, and the number of its rounds."""
        return (FIRST_CAPACITY, self._num_rounds) if self._num_in_rounds else (self.capacity, 1)

    @property
    def copies(self) -> tuple[int, float]:
        """The number of experts that are copied for the coming step, and the capacity that it has instead where it is
        as fast with that."""
        return (self._most_copies, self._needed) if self._num_with_copies else (0, 0.0)

    @property
    def key(self) -> str:
        """Tells steps from those with other room; empty for what steps begin with."""
        capacity, num_rounds = self.size
        text = "" if self.size == (FIRST_CAPACITY, 1) else f"capacity {capacity:.12g}, rounds {num_rounds}"
        return f"{text}, copied experts for {self._needed:.12g}" if self._num_with_copies else text

    def copy_experts(self, needed: float) -> None:
        """Have experts copied for the coming steps, which would need the capacity ``needed`` instead."""
        if self._most_copies:
            self._needed = needed
            self._latest_copies = min(2 * self._latest_copies or 1, _MOST_IN_A_ROW)
            self._num_with_copies = self._latest_copies

    def widen(self, shares: float, num_ranks: int) -> None:
        """After a step in which rows found no room: have it for ``shares`` equal shares.

        Raises:
            MemoryBudgetError: in any number of rounds some find none.
            InternalError: there was room for all.
        """
        needed = next_capacity(self.capacity, shares, num_ranks)
        if self._most_copies and not self._num_with_copies and needed > max(self._unpaid, self.capacity):
            self.copy_experts(needed)
            return
        if self._num_in_rounds:
            self._num_rounds += 1
            if self._num_rounds > _MOST_ROUNDS * num_ranks:
                self._num_rounds, self._num_in_rounds = 1, 0
                raise MemoryBudgetError(
                    f"expected rows of experts, {shares:.12g} equal shares of which are for one rank, to fit into the "
                    f"memory budget in rounds, found that some do not: allow more memory, or have tokens gathered "
                    f"with shardings= that name another way than 'exchange'"
                )
            return
        if needed <= self.capacity:  # or the step would be run again for ever
            raise InternalError(
                f"expected {shares:.12g} equal shares of the rows of experts to fit in {self.capacity:.12g}, found "
                f"that some do not"
            )
        if needed < self._too_large:
            self._fitting, self.capacity = self.capacity, needed
        else:
            self._go_in_rounds(math.ceil(shares / FIRST_CAPACITY))

    def note_built(self, plan: Plan) -> None:
        """Keep to what a step was built with, where that is less than was asked for."""
        if self._num_with_copies and not plan.num_copied_experts:
            self._unpaid, self._num_with_copies = max(self._unpaid, self._needed), 0
            self._fitting, self.capacity = self.capacity, self._needed
        if not self._num_in_rounds and plan.row_capacity < self.capacity > FIRST_CAPACITY:
            self.give_up()
            if plan.num_row_rounds > 1:
                self._go_in_rounds(plan.num_row_rounds)

    def give_up(self) -> None:
        """No step could be built with what was asked for: later ones have the room that they had before."""
        if self.capacity > self._fitting:
            self._too_large, self.capacity = self.capacity, self._fitting

    def note_run(self, undealt: float = 0.0) -> None:
        """A step has been run; ``undealt``: the shares for which it would have needed room if no rows were dealt."""
        if self._num_with_copies:
            self._num_with_copies -= undealt <= self.capacity
        else:
            self._latest_copies = 0
        if self._num_in_rounds:
            self._num_in_rounds -= 1
        else:
            self._latest = 0

    def _go_in_rounds(self, num_rounds: int) -> None:
        self._num_rounds = max(self._num_rounds, num_rounds)
        self._latest = min(2 * self._latest or 1, _MOST_IN_A_ROW)
        self._num_in_rounds = self._latest
