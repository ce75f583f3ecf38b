"""Find the fastest plan whose peak is within a budget of bytes.

Ways to have less memory are put in one fixed order, best first (``scheduler.search.moves``): activations computed again
or offloaded, buckets gathered again rather than kept, gathers issued later, reductions awaited earlier. A plan is a
length of that order. Every plan that is tried is carried out and its memory counted whole, at every position, so the
peak that is compared with the budget is that of the step which will run.

Where values may be both computed again and offloaded there are three orders: either alone, and for each tensor the
better of both. For each order the shortest length that fits is taken, and the fastest of these plans wins: so the joint
plan is never slower, as simulated, than the better of the other two. A smaller budget never gives a larger peak: where
it changes the plan, the plan before it did not fit.

A budget that not even all moves of an order come near is out of its reach, which one plan tells: what is held at the
peak then, and is not computed again, is held by every shorter length too (``scheduler.search.held``).

Where no plan fits, and the user allows it, logits are tiled (``scheduler.analysis.loss_heads``) and all is tried again;
then chains of operators between which values are large (``scheduler.analysis.tile_chains``) as well, into more and more
tiles. That comes last because it alone does not train the same bits. Each rung of this ladder is turned to where none
before it fits. What the user has tiled by name is, and nothing else.

Where what is before or between layers is divided into pieces, all is searched without that too: what lies in one piece
can be computed again from less.

What is left of the budget then buys time for collectives: they run beside computation wherever there is room
(``scheduler.decide.overlap``), and gathers that latency dominates are merged (``scheduler.decide.coalesce``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from zerofx.errors import MemoryBudgetError
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.decide.tiling import rungs
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.held import Held
from zerofx.scheduler.search.moves import order_moves
from zerofx.scheduler.search.problem import Activations, Item, Question, items_of, plan_of
from zerofx.units import format_bytes

_SCANNED = 16  # lengths of an order that are tried, at least, before a budget is said to be out of its reach
_HALVED_AFTER = 5  # of as many guesses, one halves what is left, in case moves free other bytes than they should

Peak = Callable[[Plan, StepGraph], Held]
Evaluate = Callable[[Plan], Prediction]
Say = Callable[[str], None]
Spend = Callable[[Plan], Iterable[Plan]]


class BudgetMissedError(MemoryBudgetError):
    """No plan fits; ``least_bytes`` is the least peak on the device that a plan has, whatever the budget."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message, least_bytes)  # both, so that it can be pickled: rank 0's errors are raised everywhere
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        return str(self.args[0])


def fit(
    question: Question, peak: Peak, evaluate: Evaluate, say: Say = lambda _: None, spend: Spend | None = None
) -> Plan:
    """The fastest plan that fits.

    Args:
        question: graph, machine and budget.
        peak: what a plan holds, given a copy of the graph with its recomputation carried out, to be used up.
        evaluate: the whole simulation of a plan, which takes longer.
        say: is told what is searched, for a progress bar.
        spend: the plans that a plan which fits leads to as far as what is left allows, the best last; None for none.

    Raises:
        BudgetMissedError: none fits; says the least peak that a plan has, and where it is.
    """
    budget = question.memory_budget
    assert budget is not None
    searches: list[_Search] = []
    ladder = (
        rungs(question.step, question.tile, classes=question.tile_classes) if not question.tiles else [[question.tiles]]
    )
    for rung in ladder:
        on_rung = list(_searches([one for tiles in rung for one in question.tiled(tiles).divisions], peak, say))
        searches += on_rung
        fitting = [plan for search in on_rung if (plan := search.fitting(budget)) is not None]
        if not fitting:
            # What is computed again for few bytes at the end of an order can itself be the peak.
            within_reach = [search for search in on_rung if search.firm_bytes <= budget]
            fitting = [plan for num_bytes, plan in _least(within_reach) if num_bytes <= budget]
        if fitting:
            predicted = [_predicted(plan, budget, evaluate, spend) for plan in fitting]
            return min(predicted, key=lambda plan: plan.step_seconds)
    say("out of reach: looking for the least possible")
    ((num_bytes, plan),) = _least(searches)
    raise BudgetMissedError(_explain(question, evaluate(plan)), num_bytes)


def _searches(questions: Sequence[Question], peak: Peak, say: Say) -> Iterator[_Search]:
    for question in questions:
        first: _Search | None = None
        for leaning in question.leanings:
            say(leaning)
            search = _Search(question, items_of(question, leaning), peak, first)
            first = first or search
            yield search


def _least(searches: Sequence[_Search]) -> list[tuple[int, Plan]]:
    """The least peak, and its plan, of the search whose last one is the least; empty where there are no searches."""
    return [min(searches, key=lambda search: search.last_bytes).lowest()] if searches else []


def _predicted(plan: Plan, budget: int, evaluate: Evaluate, spend: Spend | None) -> Plan:
    """A plan that fits, made better with what is left of the budget, and with what it leads to."""
    for better in reversed([] if spend is None else list(spend(plan))):
        better = better.with_prediction(evaluate(better))
        # What compiled regions hold is estimated, and a collective that moves may change where they are cut.
        if better.peak_bytes["device"] <= budget:
            return better
    return plan.with_prediction(evaluate(plan))


def least_memory(question: Question, evaluate: Evaluate) -> Plan:
    """The plan that computes again all it can, and gathers as asked."""
    found = []
    for one in question.divisions:
        items = [item for item in items_of(one, "recompute") if isinstance(item, Activations)]
        plan, _ = plan_of(one, items, order_moves([item.levels for item in items]))
        found.append(plan.with_prediction(evaluate(plan)))
    return min(found, key=lambda plan: plan.peak_bytes["device"])


class _Search:
    """Looks for the shortest length of one order of moves that fits.

    ``first`` is a search along another order for the same question: without a move, both have one plan.
    """

    def __init__(self, question: Question, items: Sequence[Item], peak: Peak, first: _Search | None) -> None:
        self._question, self._items, self._peak = question, items, peak
        self._moves = order_moves([item.levels for item in items])
        self._freed = list(accumulate((move.freed_bytes for move in self._moves), initial=0))
        self._tried: dict[int, tuple[Held, Plan]] = {0: first.at(0)} if first is not None else {}

    def at(self, length: int) -> tuple[Held, Plan]:
        """What is held, and the plan, of a length."""
        if length not in self._tried:
            plan, carried_out = plan_of(self._question, self._items, self._moves[:length])
            self._tried[length] = (self._peak(plan, carried_out), plan)
        return self._tried[length]

    @property
    def last_bytes(self) -> int:
        """The peak after all moves."""
        return self._bytes(len(self._moves))

    @property
    def firm_bytes(self) -> int:
        """What every length holds at least: fewer moves keep all that is held at the peak after all of them, but for
        values that are computed again there."""
        return self.at(len(self._moves))[0].firm_bytes

    def lowest(self) -> tuple[int, Plan]:
        """The least peak, and its plan, of some lengths of the whole order, and around the best of them.

        What a length holds firmly, all shorter ones do: they are looked at as long as that is less than the best.
        """
        last = len(self._moves)
        gap = max(1, last // _SCANNED)
        tried = {last: self._bytes(last)}
        best = length = last
        while length > 0 and self.at(length)[0].firm_bytes < tried[best]:
            length = max(0, length - gap)
            tried[length] = self._bytes(length)
            best = min(tried, key=lambda n: (tried[n], n))
        while gap := gap // 2:
            tried |= {n: self._bytes(n) for n in (best - gap, best + gap) if 0 <= n <= last}
            best = min(tried, key=lambda n: (tried[n], n))
        return tried[best], self.at(best)[1]

    def fitting(self, budget: int) -> Plan | None:
        """The plan of a length that fits where one move fewer does not; None where not even all moves do.

        It is looked for where enough bytes should be free, going by what the moves tried so far have really freed.
        """
        low, high = 0, len(self._moves)
        if self._bytes(low) <= budget:
            return self.at(low)[1]
        if self._bytes(high) > budget:
            return None
        share, tried = self._share_freed(low, high) or 1.0, 0
        while high - low > 1:
            tried += 1
            if tried % _HALVED_AFTER == 0:
                guess = (low + high) // 2
            else:
                guess = self._where_freed(low, (self._bytes(low) - budget) / share)
            guess = min(max(guess, low + 1), high - 1)
            share = self._share_freed(low, guess) or share
            if self._bytes(guess) <= budget:
                high = guess
            else:
                low = guess
        return self.at(high)[1]

    def _bytes(self, length: int) -> int:
        return self.at(length)[0].peak_bytes

    def _where_freed(self, low: int, num_bytes: float) -> int:
        """The length after ``low`` at which the moves in between should have freed so many bytes."""
        return bisect_left(self._freed, self._freed[low] + num_bytes, low + 1, len(self._moves))

    def _share_freed(self, low: int, high: int) -> float:
        """The share of what the moves from one length to another should free that they do free; 0.0 if none."""
        expected = self._freed[high] - self._freed[low]
        return max(0.0, (self._bytes(low) - self._bytes(high)) / expected) if expected > 0 else 0.0


def _explain(question: Question, least: Prediction) -> str:
    live = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.peak_live.items())
    hints = ["a smaller micro-batch (accumulate=)"]
    if not question.recompute:
        hints.append("recompute='auto'")
    if not question.tiers:
        hints.append("offload='host' or 'nvme'")
    if not question.tile:
        hints.append("tile='auto'")
    if question.layout.num_ranks > 1 and question.stage < 3:
        hints.append("stage=3")
    if question.precision is None:
        hints.append("precision='bf16'")
    if question.layout.num_ranks == 1:
        hints.append("more ranks at stage 3")
    return (
        f"memory_budget={format_bytes(question.memory_budget or 0)} cannot be met: the least possible is "
        f"{format_bytes(least.peak_bytes['device'])} ({least.peak_bytes['device']} bytes), at {least.peak_node}, where "
        f"these are live: {live}. To lower it: {', or '.join(hints)}"
    )
