"""The stages of a step on the axis pipe: cut alike on all ranks, each of which has its own from then on; and the order
in which all of them take micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from zerofx.capture.checks import device_of
from zerofx.choices import OrderOption
from zerofx.deferred import is_deferred
from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Earlier, Request
from zerofx.errors import MemoryBudgetError, UsageError, ZeroFXError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.facts import Phase, is_random, origin
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.lowering.lower import LoweredStep
from zerofx.passes.lib.draws_ahead import find_unforeseen_draw
from zerofx.passes.lib.message_check import check_messages
from zerofx.passes.prepare.stages import check_stages
from zerofx.runtime.comm.collectives import is_on_cpu
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.scheduler.analysis.stages_of_nodes import weight_gradients
from zerofx.scheduler.cost.pipeline import (
    PipelineSeconds,
    StageSeconds,
    choose_lags,
    lags_up_to,
    simulate_stages,
    stage_seconds,
)
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import ORDERS_IN_STAGES, turns_later
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.scheduler.search.stage_cuts import Balance, decide_stages, find_cuts, name_cuts
from zerofx.units import format_bytes, format_seconds

T = TypeVar("T")
_AS_FAST = 1.01  # times the seconds of another order: less says nothing


@dataclass(frozen=True)
class CutStep:
    """A captured step as the ranks of each stage run it, and the parts of the forward that later stages begin with.

    ``takes_turns``: whether a stage can run backward of a micro-batch before the forward of later ones; ``splits``:
    which of them can compute weight gradients apart.
    """

    stages: tuple[Captures, ...]
    cuts: tuple[int, ...] = ()
    takes_turns: bool = True
    splits: tuple[bool, ...] = ()


@dataclass(frozen=True)
class PlannedStage:
    """A stage as it is planned in one order: the peak on its device, the seconds of what it does, and whether it brings
    parameters up, from other ranks or tiers, which turns do for each micro-batch."""

    peak_bytes: int
    seconds: StageSeconds
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
    why it is so. ``lags``: how many turns later each computes weight gradients, as for ``simulate_stages``."""

    by_turns: bool = False
    why: str = field(default="", compare=False)
    lags: tuple[int | None, ...] = ()

    def request(self, request: Request) -> Request:
        """The request for a step in this order."""
        order: OrderOption = "micro-batch" if self.by_turns else "layer"
        return replace(request, options=replace(request.options, order=order))

    def captures(self, stage: Captures) -> Captures:
        """The captures of a stage, in this order."""
        return stage if stage.pipe is None else stage.delay_weights(self.lags[stage.pipe.number] if self.lags else None)

    def simulate(self, stages: Sequence[PlannedStage], num_micro_batches: int) -> PipelineSeconds:
        """The seconds of stages that are planned in this order."""
        seconds = [stage.seconds for stage in stages]
        return simulate_stages(seconds, num_micro_batches, by_turns=self.by_turns, lags=self.lags)

    def words(self) -> str:
        """The order, for people."""
        most = max((lag for lag in self.lags if lag is not None), default=None)
        later = "" if most is None else f", weight gradients {'up to ' if most else ''}{turns_later(most)}"
        return f"{ORDERS_IN_STAGES[self.by_turns]}{later}"


def choose_order(request: Request, cut: CutStep, plan_in: Callable[[StageOrder], Sequence[PlannedStage]]) -> StageOrder:
    """The order that is asked for, or else the faster one that fits, and of two as fast the one that holds less.

    ``plan_in``: all stages as they are planned in an order, which raises ``MemoryBudgetError`` where one does not fit.
    Where stages bring no parameters up, all forward first is the same work in another order, and is not planned.

    Raises:
        MemoryBudgetError: no order fits.
    """
    asked, num, plan = request.options.order, cut.stages[0].candidates[0], request.options.plan
    if isinstance(plan, Plan):
        # Those of the other stages are in their own plans.
        lags = [plan.weights_lag if number == plan.pipe_stage else None for number in range(len(cut.stages))]
        return StageOrder(not plan.by_layer, lags=tuple(lags))
    if num == 1 or len(cut.stages) == 1 or asked in ("layer", "micro-batch") or not cut.takes_turns:
        why = "as asked" if asked != "auto" else "" if cut.takes_turns else "backward draws random numbers, in order"
        order = StageOrder(asked != "layer" and cut.takes_turns)
        return replace(order, why=f"{order.words()}, {why}" if why and num > 1 else "")
    trial = _Trial(cut, plan_in, num, {})
    if asked == "zero-bubble":
        order = trial.delay_weights(lambda most: lags_up_to(most, num, cut.splits), len(cut.stages) - 1)
        return replace(order, why=f"{order.words()}, as asked")
    turns, first = StageOrder(by_turns=True), StageOrder()
    try:
        stages, refusal = trial.plan(turns), None
    except MemoryBudgetError as missed:
        stages, refusal = [], missed
    best, weights = turns, ""
    if stages:
        best, weights = _weigh_weights(trial, turns, [stage.seconds for stage in stages])
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


@dataclass(frozen=True)
class _Trial:
    """Orders that stages have been planned in, with the seconds of a step and the largest peak in each."""

    cut: CutStep
    plan_in: Callable[[StageOrder], Sequence[PlannedStage]]
    num_micro_batches: int
    outcomes: dict[StageOrder, tuple[float, int]]

    def plan(self, order: StageOrder) -> Sequence[PlannedStage]:
        """All stages in an order.

        Raises:
            MemoryBudgetError: one of them does not fit.
        """
        if order.lags:
            num = min(self.num_micro_batches, 2 * len(order.lags) + 1)
            graphs = [order.captures(stage).rank_graph(self.num_micro_batches) for stage in self.cut.stages]
            check_messages(graphs, num, by_turns=True)
        stages = self.plan_in(order)
        peak = max(stage.peak_bytes for stage in stages)
        self.outcomes[order] = order.simulate(stages, self.num_micro_batches).step, peak
        return stages

    def delay_weights(self, lags_of: Callable[[int], tuple[int | None, ...]], most: int) -> StageOrder:
        """The order by turns with weight gradients ``most`` turns later, or as many fewer as it takes to fit.

        Raises:
            MemoryBudgetError: none fits.
        """
        while True:
            order = StageOrder(by_turns=True, lags=lags_of(most))
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


def _weigh_weights(trial: _Trial, turns: StageOrder, seconds: Sequence[StageSeconds]) -> tuple[StageOrder, str]:
    """The faster order by turns, with weight gradients apart or without, and what the other takes."""
    num, without, splits = trial.num_micro_batches, trial.outcomes[turns][0], trial.cut.splits

    def lags_of(most: int) -> tuple[int | None, ...]:
        return choose_lags(seconds, num, most, splits)

    if not any(splits[1:]):
        return turns, "; no weight gradients are computed apart from what is sent"
    expected = simulate_stages(seconds, num, by_turns=True, lags=lags_of(len(seconds) - 1)).step
    if _AS_FAST * expected > without:
        return turns, f"; with weight gradients apart {format_seconds(expected)}"
    try:
        apart = trial.delay_weights(lags_of, len(seconds) - 1)
    except MemoryBudgetError:
        return turns, "; with weight gradients apart it does not fit"
    if _AS_FAST * trial.outcomes[apart][0] > without:
        return turns, f"; with weight gradients apart {format_seconds(trial.outcomes[apart][0])}"
    return (
        apart,
        f"; with weight gradients at once {format_seconds(without)} in {format_bytes(trial.outcomes[turns][1])}",
    )


def plan_all(plans: Iterable[Callable[[], T]]) -> list[T]:
    """The results of ``plans``, one for each stage.

    Raises:
        BudgetMissedError: some fit no budget; that of the stage that needs most.
    """
    done, missed = list[T](), list[BudgetMissedError]()
    for plan in plans:
        try:
            done.append(plan())
        except BudgetMissedError as refusal:
            missed.append(refusal)
    if missed:
        raise choose_worst(missed)
    return done


def choose_worst(failures: Sequence[ZeroFXError]) -> ZeroFXError:
    """The failure of several stages to raise: of budgets that are missed that of the stage that needs most."""
    missed = [failure for failure in failures if isinstance(failure, BudgetMissedError)]
    if len(missed) < len(failures):
        return next(failure for failure in failures if not isinstance(failure, BudgetMissedError))
    if len(missed) == 1:
        return missed[0]
    worst = max(missed, key=lambda refusal: refusal.least_bytes)
    return BudgetMissedError(f"{worst}; {len(missed) - 1} of the other parts cannot meet it either", worst.least_bytes)


@contextmanager
def name_stage(pipe: PipeStage | None) -> Iterator[None]:
    """Say which stage it is that fits no budget."""
    try:
        yield
    except BudgetMissedError as missed:
        if pipe is None:
            raise
        where = f"part {pipe.number + 1} of {pipe.num_stages} on the axis 'pipe'"
        raise BudgetMissedError(f"{where}: {missed}", missed.least_bytes) from None


def cut_into_stages(
    request: Request, captures: Captures, earlier: Earlier | None = None, balance: Balance = "seconds"
) -> CutStep:
    """The captured step, as one rank of the model axis runs it, in the stages of the axis pipe: those that ``earlier``
    has, if there is one.

    Raises:
        UsageError: the step cannot run in as many stages.
    """
    num_stages = request.mesh.pipe
    if len(captures.candidates) > 1:
        raise UsageError(
            f"expected accumulate to be a number where the mesh has an axis 'pipe', found "
            f"accumulate={request.options.accumulate!r}: say how many micro-batches there are"
        )
    captures = captures.before_stages()
    step = captures.rank_graph(captures.candidates[0])
    draws = check_draws(step)
    cuts = _decide(request, step, captures.candidates[0], balance) if earlier is None else earlier.shared.cuts
    names = name_cuts(step, request.machine, cuts)
    pipes = [PipeStage(number, num_stages, names, draws=draws) for number in range(num_stages)]
    stages = [captures.stage_captures(pipe) for pipe in pipes]
    num_micro_batches = captures.candidates[0]
    graphs = [staged.rank_graph(num_micro_batches) for staged in stages]
    check_messages(graphs, min(num_micro_batches, num_stages + 1))
    if by_turns := takes_turns(step):
        check_messages(graphs, min(num_micro_batches, 2 * num_stages + 1), by_turns=True)
    elif request.options.order in ("micro-batch", "zero-bubble"):
        raise UsageError(
            f"expected a model that draws no random numbers in backward with order={request.options.order!r} where "
            f"the mesh has an axis 'pipe', found one that does: leave order= out"
        )
    splits = tuple(bool(graph.gradients and weight_gradients(graph)) for graph in graphs)
    if earlier is not None:
        _check_places(graphs, earlier)
    if not step.gradients:
        return CutStep(tuple(stages), cuts, by_turns, splits)
    groups = group_of_parameters(request.model, request.optimizers, step.parameters, set(step.gradients))
    histories = histories_of(request.model, request.optimizers)
    layouts = [layout_of(graph, groups, request.mesh, histories=histories) for graph in graphs]
    counts = [sum(bucket.trainable for bucket in layout.buckets) for layout in layouts]
    for number, count in enumerate(counts):
        if not count:
            raise UsageError(
                f"expected parameters to train in each of {num_stages} stages, found none in number {number}: give "
                f"fewer ranks on the axis 'pipe'"
            )
    return CutStep(
        tuple(
            captures.stage_captures(replace(pipe, first_bucket=sum(counts[: pipe.number]), num_buckets=sum(counts)))
            for pipe in pipes
        ),
        cuts,
        by_turns,
        splits,
    )


def reason_against_stages(model: nn.Module) -> str:
    """The reason why a model cannot run in stages here, although its step can be planned so; empty where it can."""
    device = device_of(model)
    if not is_on_cpu(device):
        return f"one on {device}: on GPUs a step can be planned so (zerofx.plan), and not run yet"
    if is_deferred(model):
        return "a deferred one: make it without zerofx.empty_init()"
    return ""


def check_draws(step: StepGraph) -> bool:
    """Check that a captured step can run in stages, whatever the cuts; True if it draws random numbers.

    Raises:
        UsageError: it cannot; says why.
    """
    check_stages(step)
    draw = find_unforeseen_draw(step)
    if draw is not None:
        raise UsageError(
            f"expected random operators whose draws depend on shapes alone where the mesh has an axis 'pipe', found "
            f"{draw.target} in {origin(draw).layer or 'the model'}: leave the axis out"
        )
    return any(map(is_random, step.calls()))


def takes_turns(step: StepGraph) -> bool:
    """True if stages of a captured step can run backward of a micro-batch before the forward of later ones."""
    return not any(is_random(node) and origin(node).phase is Phase.BACKWARD for node in step.calls())


def _decide(request: Request, step: StepGraph, num_micro_batches: int, balance: Balance) -> tuple[int, ...]:
    mesh, stage, plan = request.mesh, request.options.stage, request.options.plan
    if isinstance(plan, Plan):
        return find_cuts(step, request.machine, plan.stage_cuts)
    slices = mesh.size(("replicate", "shard"))
    # A parameter, its gradient, and two states as of Adam's, each whole or in slices.
    copies = sum(times / (slices if stage >= least else 1) for least, times in ((3, 1), (2, 1), (1, 2)))
    return decide_stages(step, mesh, request.machine, balance, num_micro_batches, copies)


def _check_places(graphs: Sequence[StepGraph], earlier: Earlier) -> None:
    """Raises:
    UsageError: a parameter is first read by another stage than the one that has it.
    """
    for number, graph in enumerate(graphs):
        for info in graph.parameters:
            place = earlier.state.homes.get(info.source, number)
            if place != number:
                raise UsageError(
                    f"expected {info.source} to be read first by stage {place}, which has it since the first step, "
                    f"found that stage {number} reads it before: give batches that go through the same layers"
                )
