"""The stages of a step on the axis pipe: cut alike on all ranks, each of which has its own from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from zerofx.deferred import is_deferred
from zerofx.driver.captures import Captures
from zerofx.driver.prepared import Earlier, Request
from zerofx.errors import InvalidGraphError, UsageError, ZeroFXError
from zerofx.ir.bucketing import layout_of
from zerofx.ir.facts import Phase, is_random, origin
from zerofx.ir.graph import PipeStage, StepGraph
from zerofx.options import CompileOptions
from zerofx.passes.lib.draws_ahead import find_unforeseen_draw
from zerofx.passes.lib.message_check import check_messages
from zerofx.passes.prepare.stages import check_stages
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.scheduler.analysis.slices import slices_of_names
from zerofx.scheduler.analysis.stages_of_nodes import chunks_of_buckets, weight_gradients
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.problem import BudgetMissedError, needs_most
from zerofx.scheduler.search.stage_cuts import Balance, decide_rounds, decide_stages, find_cuts, name_cuts

T = TypeVar("T")


@dataclass(frozen=True)
class CutStep:
    """A captured step as the ranks of each stage run it, and the parts of the forward that later chunks begin with.

    ``takes_turns``: whether a stage can run backward of a micro-batch before the forward of later ones; ``splits``:
    which of them can compute weight gradients apart; ``is_open``: whether it may be cut otherwise; ``by_chunk``: as
    ``PipeStage`` has it.
    """

    stages: tuple[Captures, ...]
    cuts: tuple[int, ...] = ()
    takes_turns: bool = True
    splits: tuple[bool, ...] = ()
    is_open: bool = False
    by_chunk: bool = False

    @property
    def num_micro_batches(self) -> int:
        """The number that it is cut for."""
        return self.stages[0].candidates[0]

    @property
    def num_chunks(self) -> int:
        """The chunks of each stage."""
        return (len(self.cuts) + 1) // len(self.stages)


def plan_all(plans: Iterable[Callable[[], T]]) -> list[T]:
    """The results of ``plans``, one for each stage.

    Raises:
        BudgetMissedError: some fit no budget; explained by that of the stage that needs most.
    """
    done, rest = list[T](), iter(plans)
    for plan in rest:
        try:
            done.append(plan())
        except BudgetMissedError as refusal:
            raise BudgetMissedError(explain=partial(_explain_stages, refusal, rest)) from refusal
    return done


def _explain_stages(first: BudgetMissedError, rest: Iterable[Callable[[], object]]) -> BudgetMissedError:
    """The refusal of stages of which ``first`` does not fit, after which the ``rest`` have not been planned."""
    missed: list[BudgetMissedError] = [first]
    for plan in rest:
        try:
            plan()
        except BudgetMissedError as refusal:
            missed.append(refusal)
    return _choose_refusal(missed)


def choose_worst(failures: Sequence[ZeroFXError]) -> ZeroFXError:
    """The failure of several stages to raise: of budgets that are missed that of the stage that needs most."""
    missed = [failure for failure in failures if isinstance(failure, BudgetMissedError)]
    if len(missed) < len(failures):
        return next(failure for failure in failures if not isinstance(failure, BudgetMissedError))
    return _choose_refusal(missed)


def _choose_refusal(missed: Sequence[BudgetMissedError]) -> BudgetMissedError:
    """The refusal of the stage that needs most."""
    worst = needs_most(missed)
    if len(missed) == 1:
        return worst
    return BudgetMissedError(f"{worst}; {len(missed) - 1} of the other parts cannot meet it either", worst.least_bytes)


@contextmanager
def name_stage(pipe: PipeStage | None) -> Iterator[None]:
    """Say which stage it is that fits no budget."""
    try:
        yield
    except BudgetMissedError as missed:
        if pipe is None:
            raise
        where, refusal = f"part {pipe.number + 1} of {pipe.num_stages} on the axis 'pipe'", missed
        raise BudgetMissedError(explain=lambda: BudgetMissedError(f"{where}: {refusal}", refusal.least_bytes)) from None


def cut_into_stages(
    request: Request,
    captures: Captures,
    earlier: Earlier | None = None,
    balance: Balance = "seconds",
    num_chunks: int | None = 1,
) -> CutStep:
    """The captured step, as one rank of the model axis runs it, in the stages of the axis pipe, of so many chunks each,
    or None for as many as are fastest where all micro-batches run through one before the next: those that ``earlier``,
    or a given plan, has, if there is one.

    Raises:
        UsageError: the step cannot run in as many stages.
    """
    num_stages = request.mesh.pipe
    captures = captures.before_stages()
    step = captures.rank_graph(captures.candidates[0])
    _check_tiles(step, request.options)
    draws, num_micro_batches = check_draws(step), captures.candidates[0]
    is_open = earlier is None and request.options.plan is None
    by_chunk = num_chunks is None and num_micro_batches > 1 if earlier is None else earlier.shared.by_chunk
    if is_open and (num_chunks or 0) > 1 and num_micro_batches < num_stages and step.gradients:
        raise UsageError(
            f"expected at least as many micro-batches as stages with order='interleaved', found {num_micro_batches} on "
            f"{num_stages} stages: leave order= out"
        )
    cuts = _decide(request, step, num_micro_batches, balance, num_chunks) if earlier is None else earlier.shared.cuts
    num_chunks = (len(cuts) + 1) // num_stages
    names = name_cuts(step, request.machine, cuts)
    pipes = [PipeStage(number, num_stages, names, draws=draws, by_chunk=by_chunk) for number in range(num_stages)]
    stages = [captures.stage_captures(pipe) for pipe in pipes]
    graphs = [staged.rank_graph(num_micro_batches) for staged in stages]
    if num_chunks > 1:
        _check_messages_of_chunks(graphs, num_chunks, num_micro_batches, by_turns=not by_chunk)
    else:
        check_messages(graphs, min(num_micro_batches, num_stages + 1))
    if (by_turns := takes_turns(step, request.options)) and num_chunks == 1:
        check_messages(graphs, min(num_micro_batches, 2 * num_stages + 1), by_turns=True)
    splits = tuple(bool(graph.gradients and weight_gradients(graph)) for graph in graphs)
    if earlier is not None:
        _check_places(graphs, earlier)
    if not step.gradients:
        return CutStep(tuple(stages), cuts, by_turns, splits, is_open, by_chunk)
    groups = group_of_parameters(request.model, request.optimizers, step.parameters, set(step.gradients))
    histories = histories_of(request.model, request.optimizers)
    sliced = [_slice_by_name(staged, request.options) for staged in stages]
    layouts = [layout_of(graph, groups, request.mesh, histories=histories) for graph in sliced]
    chunks = [chunks_of_buckets(graph, layout) for graph, layout in zip(graphs, layouts, strict=True)]
    for number, own in enumerate(chunks):
        if not own:
            raise UsageError(
                f"expected parameters to train in each of {num_stages} stages, found none in number {number}: give "
                f"fewer ranks on the axis 'pipe'"
            )
    numbered = [staged.number_buckets(chunks) for staged in stages]
    return CutStep(tuple(numbered), cuts, by_turns, splits, is_open, by_chunk)


def _check_messages_of_chunks(
    graphs: Sequence[StepGraph], num_chunks: int, num_micro_batches: int, *, by_turns: bool
) -> None:
    """Raises:
    UsageError: two stages would send each other values in another order than they are awaited in.
    """
    num = min(num_micro_batches, 2 * num_chunks * len(graphs) + 1)
    try:
        check_messages(graphs, num, by_turns=by_turns and num_micro_batches > 1)
    except InvalidGraphError as error:
        raise UsageError(
            f"expected values that stages of {num_chunks} chunks hand on in the order in which they are awaited, "
            f"found {error}: leave order= out"
        ) from None


def _check_tiles(step: StepGraph, options: CompileOptions) -> None:
    """Raises:
    UsageError: something else than a parameter is to be tiled.
    """
    parameters = {alias for info in step.parameters for alias in (info.source, *info.aliases)}
    for name in options.tile if isinstance(options.tile, Mapping) else ():
        if name not in parameters:
            raise UsageError(
                f"expected tile to name parameters where the mesh has an axis 'pipe', found {name!r}: stages hand on "
                f"what modules make for whole micro-batches; leave it out"
            )


def _slice_by_name(staged: Captures, options: CompileOptions) -> StepGraph:
    """A stage's graph with the slices that are asked for."""
    graph = staged.rank_graph(staged.candidates[0])
    slices = slices_of_names(graph, options.tile) if isinstance(options.tile, Mapping) else ()
    return staged.slice_parameters(slices).first if slices else graph


def reason_against_stages(request: Request) -> str:
    """The reason why the model cannot run in stages here, although its step can be planned so; empty where it can."""
    if is_deferred(request.model) and request.options.weights is None:
        return "a deferred one: make it without zerofx.empty_init(), or give weights= to read"
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


def takes_turns(step: StepGraph, options: CompileOptions) -> bool:
    """True if stages of a captured step can run backward of a micro-batch before the forward of later ones.

    Raises:
        UsageError: they cannot, and are asked to.
    """
    asked = options.order_in_stages
    draws = any(is_random(node) and origin(node).phase is Phase.BACKWARD for node in step.calls())
    if draws and asked in ("micro-batch", "zero-bubble", "interleaved"):
        given = "order=" if options.order != "auto" else "reduce='each', and gradients in offload=,"
        raise UsageError(
            f"expected a model that draws no random numbers in backward with order={asked!r} where the mesh has an "
            f"axis 'pipe', found one that does: leave {given} out"
        )
    return not draws


def _decide(
    request: Request, step: StepGraph, num_micro_batches: int, balance: Balance, num_chunks: int | None
) -> tuple[int, ...]:
    mesh, stage, plan = request.mesh, request.options.stage, request.options.plan
    if isinstance(plan, Plan):
        return find_cuts(step, request.machine, plan.stage_cuts)
    slices = mesh.size(("replicate", "shard"))
    # A parameter, its gradient, and two states as of Adam's, each whole or in slices.
    copies = sum(times / (slices if stage >= least else 1) for least, times in ((3, 1), (2, 1), (1, 2)))
    if num_chunks is None:
        return decide_rounds(step, mesh, request.machine, balance, num_micro_batches, copies)
    return decide_stages(step, mesh, request.machine, balance, num_micro_batches, copies, num_chunks)


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
