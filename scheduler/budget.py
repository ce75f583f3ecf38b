"""Find the fastest plan whose peak is within a budget of bytes.

Ways to have less memory are put in one fixed order, best first: each step of the order moves one repeated layer one
level down its menu (``scheduler.activations``), by bytes freed per second of extra computation, earlier layers first
since their values live longest. A plan is a length of that order together with a way to gather; every such plan is
simulated whole, so the peak that is compared with the budget is that of the step which will run.

For each way to gather, the shortest length that fits is taken, and the fastest of these wins. A smaller budget
therefore never gives a larger peak: where it changes the plan, the plan before it did not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from zerofx.buckets import BucketLayout
from zerofx.errors import MemoryBudgetError
from zerofx.graph import StepGraph, origin
from zerofx.report.units import format_bytes, format_seconds
from zerofx.scheduler.activations import Level, Segment, crossing_storages, menu, segments, value_node
from zerofx.scheduler.machine import Machine
from zerofx.scheduler.plan import Plan, Prediction, RecomputeDecision
from zerofx.scheduler.policy import PolicyOptions, decide
from zerofx.scheduler.storage import storage_bytes, tensors_of

Evaluate = Callable[[Plan], Prediction]
Progress = Callable[[Iterable[PolicyOptions]], Iterable[PolicyOptions]]


class BudgetMissedError(MemoryBudgetError):
    """No plan fits; ``least_bytes`` is the least peak on the device of all plans that were tried."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Move:
    """One repeated layer goes from one level of its menu to the next."""

    segment: int
    level: int
    freed_bytes: int
    extra_seconds: float

    @property
    def rate(self) -> float:
        """Bytes freed per second."""
        return self.freed_bytes / self.extra_seconds if self.extra_seconds else float("inf")


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for."""

    step: StepGraph
    layout: BucketLayout
    machine: Machine
    stage: int
    precision: str | None
    memory_budget: int | None
    recompute: bool


def fit(
    question: Question,
    ways: Sequence[PolicyOptions],
    peak: Callable[[Plan], int],
    evaluate: Evaluate,
    progress: Progress = iter,
) -> Plan:
    """The fastest plan that fits.

    Args:
        question: graph, machine and budget.
        ways: the ways to gather that may be used, the preferred one first.
        peak: the peak in bytes of a plan that is carried out on a copy of the graph.
        evaluate: the whole simulation of such a plan, which takes longer.
        progress: wraps the iteration over ``ways``, for a progress bar.

    Raises:
        BudgetMissedError: none fits; says the least peak of all plans that were tried, and where it is.
    """
    budget = question.memory_budget
    assert budget is not None
    parts = segments(question.step) if question.recompute else []
    menus = _menus(parts, question.machine)
    moves = order_moves(menus)
    best: tuple[Plan, Prediction] | None = None
    least: tuple[int, Plan] | None = None
    hint: int | None = None
    for way in progress(ways):
        search = _Search(question, way, parts, menus, moves, peak)
        length = search.shortest(budget, hint)
        num_bytes, plan = search.least() if length is None else search.at(length)
        if length is not None:
            hint = length
            prediction = evaluate(plan)
            if best is None or prediction.step_seconds < best[1].step_seconds:
                best = (plan, prediction)
        elif least is None or num_bytes < least[0]:
            least = (num_bytes, plan)
    if best is None:
        assert least is not None
        raise BudgetMissedError(_explain(question, evaluate(least[1])), least[0])
    return best[0].with_prediction(best[1])


def least_memory(question: Question, way: PolicyOptions, evaluate: Evaluate) -> Plan:
    """The plan that recomputes all it can."""
    parts = segments(question.step)
    menus = _menus(parts, question.machine)
    plan = _plan(question, way, parts, menus, order_moves(menus))
    return plan.with_prediction(evaluate(plan))


def order_moves(menus: Sequence[Sequence[Level]]) -> list[Move]:
    """All moves, best first; the moves of one layer stay in the order of its menu."""
    moves = []
    for number, levels in enumerate(menus):
        worst = float("inf")
        for position in range(1, len(levels)):
            before, after = levels[position - 1], levels[position]
            move = Move(number, position, before.num_bytes - after.num_bytes, after.seconds - before.seconds)
            worst = min(worst, move.rate)
            moves.append((worst, move))
    moves.sort(key=lambda pair: (-pair[0], pair[1].level, pair[1].segment))
    return [move for _, move in moves]


def _menus(parts: Sequence[Segment], machine: Machine) -> list[tuple[Level, ...]]:
    known: dict[str, tuple[Level, ...]] = {}
    for segment in parts:
        if segment.key not in known:
            known[segment.key] = menu(segment, machine)
    return [known[segment.key] for segment in parts]


class _Search:
    """Looks for the shortest length of the order of moves that fits, for one way to gather."""

    def __init__(
        self,
        question: Question,
        way: PolicyOptions,
        parts: Sequence[Segment],
        menus: Sequence[tuple[Level, ...]],
        moves: Sequence[Move],
        peak: Callable[[Plan], int],
    ) -> None:
        self._make: Callable[[int], Plan] = lambda length: _plan(question, way, parts, menus, moves[:length])
        self._peak = peak
        self._num_moves = len(moves)
        self._tried: dict[int, tuple[int, Plan]] = {}

    def at(self, length: int) -> tuple[int, Plan]:
        """The peak, and the plan, of a length."""
        if length not in self._tried:
            plan = self._make(length)
            self._tried[length] = (self._peak(plan), plan)
        return self._tried[length]

    def least(self) -> tuple[int, Plan]:
        """The plan of the least peak so far."""
        return min(self._tried.values(), key=lambda tried: tried[0])

    def shortest(self, budget: int, hint: int | None) -> int | None:
        """The least length that fits, or None. ``hint`` is what another way to gather needed: likely near."""

        def fits(length: int) -> bool:
            return self.at(length)[0] <= budget

        if fits(0):
            return 0
        low, high = 0, self._num_moves
        if hint is not None and fits(hint):
            high, reach = hint, 1
            while high - reach > low and fits(high - reach):
                high, reach = high - reach, 2 * reach
            low = max(low, high - reach)
        else:
            fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle
        return high if fits(high) else None


def _plan(
    question: Question,
    way: PolicyOptions,
    parts: Sequence[Segment],
    menus: Sequence[tuple[Level, ...]],
    moves: Sequence[Move],
) -> Plan:
    reached: dict[int, Move] = {}
    for move in moves:
        reached[move.segment] = move
    crossing = set(crossing_storages(question.step))
    recomputes, extra = [], []
    for number in sorted(reached):
        segment, move = parts[number], reached[number]
        kept = menus[number][move.level].kept
        reason = (
            f"level {move.level} of {len(menus[number]) - 1} for {segment.unit}: the last move frees "
            f"{format_bytes(move.freed_bytes)} for {format_seconds(move.extra_seconds)} of computation"
        )
        for i, storage in enumerate(segment.values):
            node = value_node(storage)
            if i in segment.needed and i not in kept:
                size = storage_bytes(tensors_of(node)[0])
                recomputes.append(RecomputeDecision(node.name, size, reason, origin(node).layer))
            elif i in kept and storage not in crossing:
                extra.append(node.name)
    return decide(
        question.step,
        question.layout,
        stage=question.stage,
        precision=question.precision,
        machine=question.machine.name,
        options=way,
        recomputes=tuple(recomputes),
        extra_keeps=tuple(dict.fromkeys(extra)),
        memory_budget=question.memory_budget,
    )


def _explain(question: Question, least: Prediction) -> str:
    live = ", ".join(f"{name} {format_bytes(size)}" for name, size in least.peak_live.items())
    hints = ["a smaller micro-batch"]
    if not question.recompute:
        hints.append("recompute='auto'")
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


def ways_to_gather(asked: PolicyOptions, sharded: bool) -> list[PolicyOptions]:
    """What may be tried: as asked, then less prefetch; nothing else where nothing is gathered."""
    if not sharded:
        return [asked]
    return [replace(asked, prefetch=ahead) for ahead in range(asked.prefetch, -1, -1)]
