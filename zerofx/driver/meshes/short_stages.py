"""Estimate a step in stages, along the axis ``pipe``, from a few of its layers.

    a b c d    ->    a | b c | d        a | b | c d        a b | c | d

Four layers stand for a row of them: cut into a first, a middle and a last stage of one layer and of two, they show what
every further layer adds to each. Layers are then dealt out so that the slowest stage takes least, and all stages are
simulated next to each other. The middle ones are taken for that next to the first, which holds the most micro-batches.
A step without such a row, or with several, is cut as it is.

Weight gradients that come later are simulated so, the middle stages' one turn later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

from zerofx.driver.captures import Captures
from zerofx.driver.meshes.short_steps import ShortSteps
from zerofx.driver.prepared import Request
from zerofx.driver.stage_order import StageOrder
from zerofx.driver.stages import check_draws, cut_into_stages, takes_turns
from zerofx.errors import UsageError
from zerofx.ir.graph import PipeStage
from zerofx.scheduler.analysis.stages_of_nodes import weight_gradients
from zerofx.scheduler.cost.stages import (
    PipelineSeconds,
    StageSeconds,
    lags_up_to,
    simulate_stages,
    simulate_weights_apart,
    stage_seconds,
)
from zerofx.scheduler.cost.wire_volume import ACROSS, WITHIN
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.scheduler.search.stage_cuts import find_borders

_WAITS = 0.02  # of a step's seconds, for parameters: for less no other order is tried
# Layers of four that later stages begin with, and which of two ways has few, and one more, in each stage.
_OF_TWO, _OF_MORE = ((1,), (2,)), ((1, 3), (1, 2), (2, 3))


@dataclass(frozen=True)
class StageTotals:
    """Quantities of a stage that add up over its layers."""

    peak_bytes: float
    within: float
    across: float
    seconds: StageSeconds

    def plus(self, times: float, more: StageTotals, less: StageTotals) -> StageTotals:
        """These totals plus ``times`` the difference between ``more`` and ``less``."""

        def add(own: float, a: float, b: float) -> float:
            return own + times * (a - b)

        return StageTotals(
            add(self.peak_bytes, more.peak_bytes, less.peak_bytes),
            add(self.within, more.within, less.within),
            add(self.across, more.across, less.across),
            StageSeconds(*map(add, *(astuple(each.seconds) for each in (self, more, less)))),
        )


@dataclass(frozen=True)
class StepInStages:
    """A step in stages: the largest peak, the bytes that the first stage's node sends, and the seconds of all."""

    peak_bytes: float
    within: float
    across: float
    pipeline: PipelineSeconds
    waits: bool

    @property
    def step_seconds(self) -> float:
        return self.pipeline.step

    @property
    def exposed_seconds(self) -> float:
        """The most that a stage waits, for others or for parameters."""
        return max(self.pipeline.exposed)


@dataclass(frozen=True)
class _Kind:
    """Stages that are alike: one of ``num_layers`` layers, and one of one more; None where they are what they are."""

    few: Captures
    more: Captures | None = None
    num_layers: int = 1

    def delay_weights(self, lag: int | None) -> _Kind:
        """The same with weight gradients so many turns later; None: with the rest of backward."""
        return replace(
            self, few=self.few.delay_weights(lag), more=None if self.more is None else self.more.delay_weights(lag)
        )


@dataclass(frozen=True)
class _Dealt:
    """The stages of a step in an order, all layers dealt out: each one's kind, with the totals of few layers of it and
    of one more, its number of layers and its totals; and the step that they are."""

    order: StageOrder
    kinds: Sequence[tuple[_Kind, StageTotals, StageTotals]]
    numbers: Sequence[int]
    totals: Sequence[StageTotals]
    step: StepInStages


@dataclass(frozen=True)
class ShortStages:
    """The stages of a step on the mesh of ``request``, ``num_layers`` in all, each simulated with few of its layers."""

    short: ShortSteps
    request: Request
    kinds: tuple[_Kind, ...]
    num_layers: int
    takes_turns: bool
    measured: dict[tuple[StageOrder, _Kind], tuple[StageTotals, StageTotals]] = field(default_factory=dict)

    @staticmethod
    def of(short: ShortSteps, request: Request, captures: Captures) -> ShortStages:
        """``captures``: the short step as one rank of the model axis runs it.

        Raises:
            UsageError: it cannot run in as many stages.
        """
        num_stages, num = request.mesh.pipe, captures.candidates[0]
        if len(short.rows) != 1:
            cut = cut_into_stages(request, captures)
            return ShortStages(short, request, tuple(map(_Kind, cut.stages)), 0, cut.takes_turns)
        layers = short.rows[0].repetitions
        if num_stages > len(layers):
            raise UsageError(
                f"expected a layer for each of {num_stages} stages on the axis 'pipe', found {len(layers)}: give fewer "
                f"ranks there"
            )
        captures = captures.before_stages()
        step = captures.rank_graph(num)
        draws = check_draws(step)
        borders = find_borders(step, request.machine, [layer[0] for layer in (layers[1], *layers[-2:])])

        def divide(way: Sequence[int]) -> list[Captures]:
            cuts = tuple(borders[layer - 1] for layer in way)
            # The middle one is as far from the end as the second of all, the last at the end.
            places = [(0, num_stages), *([(1, num_stages)] if len(way) > 1 else []), (len(way), len(way) + 1)]
            return [captures.stage_captures(PipeStage(*place, cuts, draws=draws)) for place in places]

        ways = [divide(way) for way in (_OF_TWO if num_stages == 2 else _OF_MORE)]
        if num_stages == 2:
            kinds = [_Kind(ways[0][0], ways[1][0]), _Kind(ways[1][1], ways[0][1], 2)]
        else:
            middle = _Kind(ways[1][1], ways[0][1])
            kinds = [_Kind(ways[0][0], ways[2][0]), *[middle] * (num_stages - 2), _Kind(ways[0][2], ways[1][2])]
        return ShortStages(short, request, tuple(kinds), len(layers), takes_turns(step, request.options))

    @property
    def _orders(self) -> list[StageOrder]:
        """The orders that may be taken, of which the first holds least."""
        asked = self.request.options.order_in_stages
        by_turns = self.takes_turns and asked not in ("layer", "round-robin")
        return [StageOrder(by_turns), *([StageOrder()] if by_turns and asked == "auto" else [])]

    def least_seconds(self, fastest: float) -> float:
        """A lower bound of the step's seconds from middle stages, if there are any: as if there were no others, each
        with its part of the layers. One below ``fastest`` is not refined."""
        least, num_stages = math.inf, len(self.kinds)
        if self.num_layers == 0 or num_stages == 2:
            return 0.0
        for order in self._orders:
            few, more = self._measure(order, self.kinds[1])
            middle = few.plus(self.num_layers / num_stages - 1, more, few).seconds
            later = replace(order, lags=(0,) * num_stages) if self._may_delay_weights(order) else order
            least = min(least, self._run(later, [middle] * num_stages).step)
            if least < fastest:
                break
        return least

    def simulate(self, limit: int | None, fastest: float = math.inf) -> StepInStages:
        """The step in the order that is asked for, or the fastest that fits ``limit`` bytes, if one does; stages have
        one chunk each.

        What cannot be faster than ``fastest`` seconds is not searched for what fits.

        Raises:
            ZeroFXError: the step cannot run so.
        """
        first, *others = self._orders
        free = self._simulate_in(first)
        best = self._fit_all(free, limit, fastest)
        fits = limit is None or best.peak_bytes <= limit
        if best is free.step and fits and self._may_delay_weights(first):
            # What weight gradients read is held for longer: no step that has to save memory computes them later.
            best = self._delay_weights(free, limit)
        if not others or (fits and not best.waits and not self._is_faster_by_layer(free)):
            return best
        fastest = min(fastest, best.step_seconds) if fits else fastest
        other = self._fit_all(self._simulate_in(others[0]), limit, fastest)
        if limit is not None and max(best.peak_bytes, other.peak_bytes) > limit:
            return min(best, other, key=lambda step: step.peak_bytes)
        return min(best, other, key=lambda step: step.step_seconds)

    def _is_faster_by_layer(self, dealt: _Dealt) -> bool:
        """True if the same seconds make a shorter step in the other order, as where messages take long."""
        seconds = [total.seconds for total in dealt.totals]
        return simulate_stages(seconds, self._num).step < dealt.step.step_seconds

    def _may_delay_weights(self, order: StageOrder) -> bool:
        return order.by_turns and self.request.options.order_in_stages != "micro-batch"

    def _delay_weights(self, free: _Dealt, limit: int | None) -> StepInStages:
        """The step with weight gradients some turns later, if that is faster than ``free`` and fits; else ``free``."""
        splits = [bool(weight_gradients(kind.few.rank_graph(self._num))) for kind in self.kinds]
        expected = simulate_weights_apart([total.seconds for total in free.totals], self._num, splits).step
        if expected >= free.step.step_seconds:
            return free.step
        apart = self._simulate_in(StageOrder(True, lags=lags_up_to(len(self.kinds) - 1, self._num, splits))).step
        fits = limit is None or apart.peak_bytes <= limit
        return apart if fits and apart.step_seconds < free.step.step_seconds else free.step

    @property
    def _num(self) -> int:
        return self.kinds[0].few.candidates[0]

    def _simulate_in(self, order: StageOrder) -> _Dealt:
        """The step in an order, without a limit."""
        lags = order.lags or [None] * len(self.kinds)
        delayed = [kind.delay_weights(lag) for kind, lag in zip(self.kinds, lags, strict=True)]
        kinds = [(kind, *self._measure(order, kind)) for kind in delayed]
        numbers = self._deal_out(kinds)
        totals = [
            few.plus(number - kind.num_layers, more, few)
            for (kind, few, more), number in zip(kinds, numbers, strict=True)
        ]
        return _Dealt(order, kinds, numbers, totals, self._combine(order, totals))

    def _fit_all(self, dealt: _Dealt, limit: int | None, fastest: float) -> StepInStages:
        """The step within ``limit`` bytes if it can be, unless it takes ``fastest`` seconds or longer as it is."""
        if limit is None or dealt.step.peak_bytes <= limit or dealt.step.step_seconds >= fastest:
            return dealt.step
        request = dealt.order.request(self.request)
        fitted = dict[tuple[_Kind, int], StageTotals]()
        for (kind, _, more), number, whole in zip(dealt.kinds, dealt.numbers, dealt.totals, strict=True):
            if (kind, number) not in fitted:
                fitted[kind, number] = self._fit(request, number, kind, whole, more, limit)
                if fitted[kind, number].peak_bytes > limit:
                    return replace(dealt.step, peak_bytes=fitted[kind, number].peak_bytes)  # as one stage is enough
        totals = [fitted[kind, number] for (kind, *_), number in zip(dealt.kinds, dealt.numbers, strict=True)]
        return self._combine(dealt.order, totals)

    def _combine(self, order: StageOrder, totals: Sequence[StageTotals]) -> StepInStages:
        """The step in stages that have these totals."""
        stages = [total.seconds for total in totals]
        pipeline = self._run(order, stages)
        return StepInStages(
            max(total.peak_bytes for total in totals), totals[0].within, totals[0].across, pipeline,
            waits=any(stage.exposed > _WAITS * pipeline.step for stage in stages),
        )  # fmt: skip

    def _run(self, order: StageOrder, stages: Sequence[StageSeconds]) -> PipelineSeconds:
        """Stages in an order, with weight gradients apart where that is faster."""
        pipeline = simulate_stages(stages, self._num, by_turns=order.by_turns)
        if not order.lags:
            return pipeline
        apart = simulate_weights_apart(stages, self._num, [lag is not None for lag in order.lags])
        return min(pipeline, apart, key=lambda seconds: seconds.step)

    def _measure(self, order: StageOrder, kind: _Kind) -> tuple[StageTotals, StageTotals]:
        """The totals of a stage of few layers, and of one more, where there is one."""
        if (order, kind) not in self.measured:
            request = order.request(self.request)
            few = self._simulate_stage(request, kind.few)
            self.measured[order, kind] = few, few if kind.more is None else self._simulate_stage(request, kind.more)
        return self.measured[order, kind]

    def _deal_out(self, measured: Sequence[tuple[_Kind, StageTotals, StageTotals]]) -> list[int]:
        """The layers of each stage: one after the other goes to the stage that takes least with it."""
        numbers = [kind.num_layers for kind in self.kinds]
        taken = [few.seconds.forward + few.seconds.backward for _, few, _ in measured]
        further = [more.seconds.forward + more.seconds.backward for _, _, more in measured]
        further = [more - few for few, more in zip(taken, further, strict=True)]
        if self.num_layers == 0:
            return numbers
        for number, kind in enumerate(self.kinds):
            taken[number] -= (kind.num_layers - 1) * further[number]
            numbers[number] = 1
        for _ in range(self.num_layers - len(numbers)):
            least = min(range(len(numbers)), key=lambda number: taken[number] + further[number])
            numbers[least] += 1
            taken[least] += further[least]
        return numbers

    def _fit(
        self, request: Request, number: int, kind: _Kind, whole: StageTotals, more: StageTotals, limit: int
    ) -> StageTotals:
        """The totals of a stage of ``number`` layers, ``whole`` otherwise, where each frees its share of the excess."""
        if whole.peak_bytes <= limit:
            return whole
        layers = kind.num_layers + (kind.more is not None)
        budget = int(more.peak_bytes - (whole.peak_bytes - limit) * layers / number)
        try:
            less = self._simulate_stage(request, kind.more or kind.few, budget)
        except BudgetMissedError as missed:
            less = replace(more, peak_bytes=max(missed.least_bytes, budget + 1))
        within = whole.plus(number / layers, less, more)
        # Extrapolated, as a search moves what computation waits for: less than without a limit is none.
        seconds = map(max, astuple(within.seconds), astuple(whole.seconds))
        return replace(within, seconds=StageSeconds(*seconds))

    def _simulate_stage(self, request: Request, captures: Captures, budget: int | None = None) -> StageTotals:
        step, simulation = self.short.simulate(request, captures, budget)
        sent, (seconds,) = simulation.node_wire_bytes, stage_seconds(step, simulation)
        return StageTotals(simulation.live.peaks["device"], sent[WITHIN], sent[ACROSS], seconds)
