"""The stages of a step on the axis pipe: cut alike on all ranks, each of which has its own from then on; and the order
in which all of them take micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from zerofx.choices import OrderOption
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
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.scheduler.cost.pipeline import StageSeconds, simulate_stages, stage_seconds
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import ORDERS_IN_STAGES
from zerofx.scheduler.search.problem import BudgetMissedError
from zerofx.scheduler.search.stage_cuts import BALANCES, Balance, decide_stages, find_cuts, name_cuts
from zerofx.units import format_bytes, format_seconds

T = TypeVar("T")
_AS_FAST = 1.01  # times the seconds of another order: less says nothing


@dataclass(frozen=True)
class CutStep:
    """A captured step as the ranks of each stage run it, and the parts of the forward that later stages begin with.

    ``takes_turns``: whether a stage can run backward of a micro-batch before the forward of later ones.
    """

    stages: tuple[Captures, ...]
    cuts: tuple[int, ...] = ()
    takes_turns: bool = True


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
    why it is so."""

    by_turns: bool = False
    why: str = ""

    def request(self, request: Request) -> Request:
        """The request for a step in this order."""
        order: OrderOption = "micro-batch" if self.by_turns else "layer"
        return replace(request, options=replace(request.options, order=order))


def choose_order(request: Request, cut: CutStep, plan_in: Callable[[StageOrder], Sequence[PlannedStage]]) -> StageOrder:
    """The order that is asked for, or else the faster one that fits, and of two as fast the one that holds less.

    ``plan_in``: all stages as they are planned in an order, which raises ``MemoryBudgetError`` where one does not fit.
    Where stages bring no parameters up, all forward first is the same work in another order, and is not planned.

    Raises:
        MemoryBudgetError: no order fits.
    """
    asked, num, plan = request.options.order, cut.stages[0].candidates[0], request.options.plan
    if isinstance(plan, Plan):
        return StageOrder(not plan.by_layer)
    if num == 1 or len(cut.stages) == 1 or asked != "auto" or not cut.takes_turns:
        why = "as asked" if asked != "auto" else "" if cut.takes_turns else "backward draws random numbers, in order"
        by_turns = asked != "layer" and cut.takes_turns
        return StageOrder(by_turns, f"{ORDERS_IN_STAGES[by_turns]}, {why}" if why and num > 1 else "")
    outcomes = dict[bool, tuple[float, int]]()
    refusals = list[MemoryBudgetError]()
    for by_turns in (True, False):
        try:
            stages = plan_in(StageOrder(by_turns))
        except MemoryBudgetError as refusal:
            refusals.append(refusal)
            continue
        seconds, peak = [stage.seconds for stage in stages], max(stage.peak_bytes for stage in stages)
        outcomes[by_turns] = simulate_stages(seconds, num, by_turns=by_turns).step, peak
        if by_turns and not any(stage.brings_parameters for stage in stages):
            other = simulate_stages(seconds, num).step
            if outcomes[by_turns][0] <= _AS_FAST * other:
                why = f"all forward first takes {format_seconds(other)}, and holds {num} micro-batches"
                return StageOrder(True, f"{_describe(True, *outcomes[True])}: {why}")
    if not outcomes:
        raise refusals[-1]
    if len(outcomes) == 1:
        (by_turns,) = outcomes
        return StageOrder(by_turns, f"{_describe(by_turns, *outcomes[by_turns])}: the other order does not fit")
    (turns, _), (first, _) = outcomes[True], outcomes[False]
    by_turns = turns <= _AS_FAST * first
    return StageOrder(
        by_turns,
        f"{_describe(by_turns, *outcomes[by_turns])}, rather than {_describe(not by_turns, *outcomes[not by_turns])}",
    )


def _describe(by_turns: bool, seconds: float, peak_bytes: int) -> str:
    return f"{ORDERS_IN_STAGES[by_turns]}, {format_seconds(seconds)} in up to {format_bytes(peak_bytes)} a stage"


def try_cuts(request: Request, earlier: Earlier | None, attempt: Callable[[Balance], T]) -> T:
    """The result of ``attempt`` with stages that take alike, or where that fits no budget with those that hold alike.

    Stages that ``earlier`` has or a plan that is given, or that are none, are tried once.

    Raises:
        BudgetMissedError: none fits; the refusal that needs least.
    """
    refusals = list[BudgetMissedError]()
    is_open = request.mesh.pipe > 1 and earlier is None and request.options.plan is None
    for balance in BALANCES if is_open else BALANCES[:1]:
        try:
            return attempt(balance)
        except BudgetMissedError as missed:
            refusals.append(missed)
    raise min(refusals, key=lambda refusal: refusal.least_bytes)


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
    check_stages(step)
    draw, draws = find_unforeseen_draw(step), any(map(is_random, step.calls()))
    if draw is not None:
        raise UsageError(
            f"expected random operators whose draws depend on shapes alone where the mesh has an axis 'pipe', found "
            f"{draw.target} in {origin(draw).layer or 'the model'}: leave the axis out"
        )
    cuts = _decide(request, step, captures.candidates[0], balance) if earlier is None else earlier.shared.cuts
    names = name_cuts(step, request.machine, cuts)
    pipes = [PipeStage(number, num_stages, names, draws=draws) for number in range(num_stages)]
    stages = [captures.stage_captures(pipe) for pipe in pipes]
    num_micro_batches = captures.candidates[0]
    graphs = [staged.rank_graph(num_micro_batches) for staged in stages]
    check_messages(graphs, min(num_micro_batches, num_stages + 1))
    takes_turns = not any(is_random(node) and origin(node).phase is Phase.BACKWARD for node in step.calls())
    if takes_turns:
        check_messages(graphs, min(num_micro_batches, 2 * num_stages + 1), by_turns=True)
    elif request.options.order == "micro-batch":
        raise UsageError(
            "expected a model that draws no random numbers in backward with order='micro-batch' where the mesh has an "
            "axis 'pipe', found one that does: leave order= out"
        )
    if earlier is not None:
        _check_places(graphs, earlier)
    if not step.gradients:
        return CutStep(tuple(stages), cuts, takes_turns)
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
        takes_turns,
    )


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
