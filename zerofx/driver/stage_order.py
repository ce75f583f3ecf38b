"""The order in which all stages of a step take micro-batches: the one that is asked for, or the fastest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from zerofx.choices import OrderOption
from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Request
from zerofx.driver.stages import CutStep
from zerofx.errors import MemoryBudgetError, UsageError
from zerofx.lowering.lower import LoweredStep
from zerofx.passes.lib.message_check import check_messages
from zerofx.scheduler.cost.stages import (
    PipelineSeconds,
    StageSeconds,
    choose_lags,
    chunks_in_order,
    lags_up_to,
    simulate_stages,
    simulate_weights_apart,
    stage_seconds,
)
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import order_in_stages, turns_later
from zerofx.units import format_bytes, format_seconds

_AS_FAST = 1.01  # times the seconds of another order: less says nothing


@dataclass(frozen=True)
class PlannedStage:
    """A stage as it is planned in one order: the peak on its device, the seconds of its chunks, and whether it brings
    parameters up, from other ranks or tiers, which turns do for each micro-batch."""

    peak_bytes: int
    seconds: tuple[StageSeconds, ...]
    brings_parameters: bool

    @staticmethod
    def of(lowered: LoweredStep) -> PlannedStage:
        """The stage that has been planned and lowered by itself."""
        plan = lowered.plan
        return PlannedStage(
            plan.peak_bytes["device"], stage_seconds(lowered.graph, lowered.simulation), bool(plan.gathers)
        )


@dataclass(frozen=True)
class StageOrder:
    """The order of micro-batches in all stages, one forward and one backward by turns or else all forward first, and
    why it is so. ``lags``: how many turns later each computes weight gradients, as for ``simulate_stages``;
    ``num_chunks``: of each stage, which take micro-batches by turns too, or else all through one before the next."""

    by_turns: bool = False
    why: str = field(default="", compare=False)
    lags: tuple[int | None, ...] = ()
    num_chunks: int = 1

    @property
    def cut_in(self) -> int | None:
        """The chunks to cut each stage in, as ``cut_into_stages`` takes them."""
        return self.num_chunks if self.by_turns or self.num_chunks == 1 else None

    def request(self, request: Request) -> Request:
        """The request for a step in this order."""
        order: OrderOption = "micro-batch" if self.by_turns else "layer"
        return replace(request, options=replace(request.options, order=order))

    def captures(self, stage: Captures) -> Captures:
        """The captures of a stage, in this order."""
        return stage if stage.pipe is None else stage.delay_weights(self.lags[stage.pipe.number] if self.lags else None)

    def simulate(self, stages: Sequence[PlannedStage], num_micro_batches: int) -> PipelineSeconds:
        """The seconds of stages that are planned in this order."""
        seconds = chunks_in_order([stage.seconds for stage in stages])
        return simulate_stages(
            seconds, num_micro_batches, by_turns=self.by_turns, lags=self.lags, num_stages=len(stages)
        )

    def words(self) -> str:
        """The order, for people."""
        most = max((lag for lag in self.lags if lag is not None), default=None)
        later = "" if most is None else f", weight gradients {'up to ' if most else ''}{turns_later(most)}"
        return f"{order_in_stages(self.num_chunks, by_turns=self.by_turns)}{later}"


CutIn = Callable[[int | None], CutStep]
PlanIn = Callable[[StageOrder, CutStep], Sequence[PlannedStage]]


def choose_number(
    request: Request, captures: Captures, cut_in: Callable[[Captures, int | None], CutStep], plan_in: PlanIn
) -> tuple[StageOrder, CutStep]:
    """``choose_order`` for as many micro-batches as are asked for, or else for the number with which the step is
    fastest within the budget: stages idle less with more, and hold less at a time, of smaller operators. The fewest are
    planned first, and more as long as that is faster.

    Raises: as ``choose_order``.
    """
    interleaves = request.options.order == "interleaved"
    numbers = [num for num in captures.candidates if not interleaves or num >= request.mesh.pipe]
    if len(captures.candidates) == 1 or not numbers:
        return choose_order(request, partial(cut_in, captures.only(captures.candidates[-1])), plan_in)
    best: tuple[StageOrder, CutStep] | None = None
    seconds, refusals = dict[int, float](), dict[int, MemoryBudgetError]()
    for number in numbers:
        planned = dict[StageOrder, Sequence[PlannedStage]]()

        def plan_once(
            order: StageOrder, cut: CutStep, planned: dict[StageOrder, Sequence[PlannedStage]] = planned
        ) -> Sequence[PlannedStage]:
            if order not in planned:
                planned[order] = plan_in(order, cut)
            return planned[order]

        try:
            order, cut = choose_order(request, partial(cut_in, captures.only(number)), plan_once)
            stages = plan_once(order, cut)
        except MemoryBudgetError as refusal:
            refusals[number] = refusal
            continue
        fastest = min(seconds.values(), default=math.inf)
        seconds[number] = order.simulate(stages, number).step
        if seconds[number] >= fastest:
            break
        best = order, cut
    if best is None:
        raise refusals[numbers[-1]]  # of the most, which hold least
    order, cut = best
    others = [f"{', '.join(map(str, refusals))} do not fit"] if refusals else []
    others += [f"{num} take {format_seconds(own)}" for num, own in seconds.items() if num != cut.num_micro_batches]
    why = f"the fastest number, {format_seconds(seconds[cut.num_micro_batches])}"
    return replace(order, why="; ".join(filter(None, [why, *others, order.why]))), cut


def choose_order(request: Request, cut_in: CutIn, plan_in: PlanIn) -> tuple[StageOrder, CutStep]:
    """The order that is asked for, or else the faster one that fits, and of two as fast the one that holds less; with
    the stages that run in it.

    ``cut_in``: the step in stages, as ``cut_into_stages`` cuts it. ``plan_in``: all stages as they are planned in an
    order, which raises ``MemoryBudgetError`` where one does not fit. Where stages bring no parameters up, all forward
    first is the same work in another order, and is not planned.

    Raises:
        UsageError: the step cannot run in the order that is asked for.
        MemoryBudgetError: no order fits.
    """
    asked, plan = request.options.order_in_stages, request.options.plan
    in_chunks = isinstance(plan, Plan) and plan.by_layer and plan.num_chunks > 1
    cut = cut_in(None if in_chunks or asked == "round-robin" else 1 + (asked == "interleaved"))
    num = cut.num_micro_batches
    if isinstance(plan, Plan):
        # Those of the other stages are in their own plans.
        lags = [plan.weights_lag if number == plan.pipe_stage else None for number in range(len(cut.stages))]
        return StageOrder(not plan.by_layer, lags=tuple(lags), num_chunks=cut.num_chunks), cut
    if cut.by_chunk:
        order = StageOrder(num_chunks=cut.num_chunks)
        return replace(order, why=f"{order.words()}, as asked"), cut
    trial = _Trial({cut.num_chunks: cut}, plan_in, num)
    if cut.num_chunks > 1:
        order = StageOrder(num > 1, num_chunks=cut.num_chunks)
        if num > 1:
            order, weights = _weigh_weights(trial, order)
            order = replace(order, why=f"{trial.describe(order)}{weights}")
        return order, cut
    if num == 1 or len(cut.stages) == 1 or asked in ("layer", "micro-batch") or not cut.takes_turns:
        why = "as asked" if asked != "auto" else "" if cut.takes_turns else "backward draws random numbers, in order"
        order = StageOrder(asked != "layer" and cut.takes_turns)
        return replace(order, why=f"{order.words()}, {why}" if why and num > 1 else ""), cut
    if asked == "zero-bubble":
        order = trial.delay_weights(lambda most: lags_up_to(most, num, cut.splits), len(cut.stages) - 1)
        return replace(order, why=f"{order.words()}, as asked"), cut
    try:
        order = _choose_with_one_chunk(trial)
    except MemoryBudgetError:
        rounds = _plan_rounds(trial, cut_in) if cut.is_open else None
        if rounds is None:
            raise
        order = replace(rounds, why=f"{trial.describe(rounds)}: no other order fits")
    else:
        if cut.is_open:
            order = _weigh_rounds(trial, _weigh_chunks(trial, order, cut_in), cut_in)
    return order, trial.cuts[order.cut_in]


def _choose_with_one_chunk(trial: _Trial) -> StageOrder:
    """The order to take where each stage has one chunk.

    Raises:
        MemoryBudgetError: none fits.
    """
    num, turns, first = trial.num_micro_batches, StageOrder(by_turns=True), StageOrder()
    best, weights, refusal = turns, "", None
    try:
        best, weights = _weigh_weights(trial, turns)
    except MemoryBudgetError as missed:
        refusal = missed
    else:
        stages = trial.planned[turns]
        other = first.simulate(stages, num).step
        brings = any(stage.brings_parameters for stage in stages)
        if not brings and trial.outcomes[best][0] <= _AS_FAST * other:
            why = f"all forward first takes {format_seconds(other)}, and holds {num} micro-batches"
            return replace(best, why=f"{trial.describe(best)}: {why}{weights}")
    try:
        trial.plan(first)
    except MemoryBudgetError:
        if refusal is not None:
            raise
        return replace(best, why=f"{trial.describe(best)}: the other order does not fit{weights}")
    if refusal is not None:
        return replace(first, why=f"{trial.describe(first)}: the other order does not fit")
    is_best = trial.outcomes[best][0] <= _AS_FAST * trial.outcomes[first][0]
    chosen, rejected = (best, first) if is_best else (first, best)
    return replace(chosen, why=f"{trial.describe(chosen)}, rather than {trial.describe(rejected)}{weights}")


def _weigh_chunks(trial: _Trial, order: StageOrder, cut_in: CutIn) -> StageOrder:
    """The order with two chunks a stage, where that is faster than ``order``, and fits."""
    num, seconds = trial.num_micro_batches, trial.outcomes[order][0]
    halves = [*map(_halve, chunks_in_order([stage.seconds for stage in trial.planned[order]]))]
    if _AS_FAST * simulate_weights_apart(halves * 2, num, trial.cuts[1].splits).step > seconds:
        return order
    try:
        trial.cuts[2] = cut_in(2)
        best, weights = _weigh_weights(trial, StageOrder(by_turns=True, num_chunks=2))
    except UsageError:
        return order
    except MemoryBudgetError:
        return replace(order, why=f"{order.why}; two chunks a stage do not fit")
    if _AS_FAST * trial.outcomes[best][0] > seconds:
        return replace(order, why=f"{order.why}; with two chunks a stage {format_seconds(trial.outcomes[best][0])}")
    return replace(best, why=f"{trial.describe(best)}, rather than {trial.describe(order)}{weights}")


def _weigh_rounds(trial: _Trial, order: StageOrder, cut_in: CutIn) -> StageOrder:
    """The order with all micro-batches through one of several chunks before the next, where that is faster than
    ``order``, and fits. Where stages bring no parameters up, turns do the same in as long, and hold less."""
    first, (seconds, _) = StageOrder(), trial.outcomes[order]
    if not any(stage.brings_parameters for stage in trial.planned[replace(order, lags=())]):
        return order
    if first in trial.planned:
        halves = [*map(_halve, chunks_in_order([stage.seconds for stage in trial.planned[first]]))]
        expected = simulate_stages(halves * 2, trial.num_micro_batches, num_stages=len(halves)).step
        if _AS_FAST * expected > seconds:
            return order
    rounds = _plan_rounds(trial, cut_in)
    if rounds is None:
        return order
    if _AS_FAST * trial.outcomes[rounds][0] > seconds:
        return replace(order, why=f"{order.why}; {rounds.words()} {format_seconds(trial.outcomes[rounds][0])}")
    return replace(rounds, why=f"{trial.describe(rounds)}, rather than {trial.describe(order)}")


def _plan_rounds(trial: _Trial, cut_in: CutIn) -> StageOrder | None:
    """The order with all micro-batches through one of several chunks before the next, planned; None where it does not
    fit, or the step has too few parts."""
    try:
        cut = trial.cuts[None] = cut_in(None)
        rounds = StageOrder(num_chunks=cut.num_chunks)
        trial.plan(rounds)
    except (MemoryBudgetError, UsageError):
        return None
    return rounds


def _halve(stage: StageSeconds) -> StageSeconds:
    """A chunk of two of a stage, as they are expected to be: alike, with as large messages as the whole stage has."""
    return replace(
        stage, forward=stage.forward / 2, backward=stage.backward / 2, rest=stage.rest / 2, exposed=stage.exposed / 2
    )


@dataclass(frozen=True)
class _Trial:
    """Orders that stages have been planned in, with the seconds of a step and the largest peak in each; ``cuts``: the
    step as ``StageOrder.cut_in`` has it cut."""

    cuts: dict[int | None, CutStep]
    plan_in: PlanIn
    num_micro_batches: int
    outcomes: dict[StageOrder, tuple[float, int]] = field(default_factory=dict)
    planned: dict[StageOrder, Sequence[PlannedStage]] = field(default_factory=dict)

    def plan(self, order: StageOrder) -> Sequence[PlannedStage]:
        """All stages in an order.

        Raises:
            MemoryBudgetError: one of them does not fit.
        """
        cut = self.cuts[order.cut_in]
        if order.lags:
            num = min(self.num_micro_batches, 2 * order.num_chunks * len(order.lags) + 1)
            graphs = [order.captures(stage).rank_graph(self.num_micro_batches) for stage in cut.stages]
            check_messages(graphs, num, by_turns=True)
        self.planned[order] = stages = self.plan_in(order, cut)
        peak = max(stage.peak_bytes for stage in stages)
        self.outcomes[order] = order.simulate(stages, self.num_micro_batches).step, peak
        return stages

    def delay_weights(
        self, lags_of: Callable[[int], tuple[int | None, ...]], most: int, num_chunks: int = 1
    ) -> StageOrder:
        """The order by turns with weight gradients ``most`` turns later, or as many fewer as it takes to fit.

        Raises:
            MemoryBudgetError: none fits.
        """
        while True:
            order = StageOrder(by_turns=True, lags=lags_of(most), num_chunks=num_chunks)
            try:
                self.plan(order)
            except MemoryBudgetError:
                most = max((lag for lag in order.lags if lag), default=0) - 1
                if most < 0:
                    raise
            else:
                return order

    def describe(self, order: StageOrder) -> str:
        """An order with what it takes."""
        seconds, peak = self.outcomes[order]
        return f"{order.words()}, {format_seconds(seconds)} in up to {format_bytes(peak)} a stage"


def _weigh_weights(trial: _Trial, turns: StageOrder) -> tuple[StageOrder, str]:
    """The faster order by turns, with weight gradients apart or without, and what the other takes.

    Raises:
        MemoryBudgetError: ``turns``, which is without, does not fit.
    """
    stages = trial.plan(turns)
    seconds, num_stages = chunks_in_order([stage.seconds for stage in stages]), len(stages)
    num, without, splits = trial.num_micro_batches, trial.outcomes[turns][0], trial.cuts[turns.num_chunks].splits

    def lags_of(most: int) -> tuple[int | None, ...]:
        return choose_lags(seconds, num, most, splits)

    if not any(splits[1:]):
        return turns, "; no weight gradients are computed apart from what is sent"
    expected = simulate_weights_apart(seconds, num, splits).step
    if _AS_FAST * expected > without:
        return turns, f"; with weight gradients apart {format_seconds(expected)}"
    try:
        apart = trial.delay_weights(lags_of, num_stages - 1, turns.num_chunks)
    except MemoryBudgetError:
        return turns, "; with weight gradients apart it does not fit"
    if _AS_FAST * trial.outcomes[apart][0] > without:
        return turns, f"; with weight gradients apart {format_seconds(trial.outcomes[apart][0])}"
    return (
        apart,
        f"; with weight gradients at once {format_seconds(without)} in {format_bytes(trial.outcomes[turns][1])}",
    )
