"""The problem that a plan solves: a captured step, options, a machine and a budget; and the error where none fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from zerofx.budgets import gradients_tier, tiers_for
from zerofx.codegen.kernels.table import LOSS
from zerofx.errors import MemoryBudgetError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.whole import OwnedSizes, owners_of
from zerofx.options import CompileOptions
from zerofx.scheduler.analysis.slices import Slices
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.decide.gradients import buckets_reduced_each, gradients_asked
from zerofx.scheduler.decide.ledger import Level
from zerofx.scheduler.decide.states import delay_levels
from zerofx.scheduler.decide.tiling import tiles_of_modules
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.graph_facts import GraphFacts
from zerofx.scheduler.search.question import Question
from zerofx.scheduler.search.rehearsal import Rehearsal
from zerofx.scheduler.search.target import Target

T = TypeVar("T")
C = TypeVar("C")


class BudgetMissedError(MemoryBudgetError):
    """No plan fits; ``least_bytes`` is the least peak on the device that a plan has, whatever the budget.

    ``explain`` gives the message and the least bytes where they are asked for: that takes longer than to see that no
    plan fits, and nobody asks where another way is tried.
    """

    def __init__(
        self, message: str = "", least_bytes: int = 0, *, explain: Callable[[], BudgetMissedError] | None = None
    ) -> None:
        super().__init__(message, least_bytes)
        self._explain = explain

    def _reason(self) -> tuple[str, int]:
        if self._explain is not None:
            explain, self._explain = self._explain, None
            self.args = explain()._reason()
        message, least_bytes = self.args
        return str(message), int(least_bytes)

    @property
    def least_bytes(self) -> int:
        return self._reason()[1]

    def __str__(self) -> str:
        return self._reason()[0]

    def __reduce__(self) -> tuple[type[BudgetMissedError], tuple[str, int]]:
        return type(self), self._reason()  # rank 0's errors are raised everywhere


def needs_least(refusals: Sequence[BudgetMissedError]) -> BudgetMissedError:
    """The refusal of the way that needs the fewest bytes; which of several that is, is found where it is asked for."""
    return _choose(refusals, min)


def needs_most(refusals: Sequence[BudgetMissedError]) -> BudgetMissedError:
    """The refusal of the part that needs the most bytes, of several that all have to fit; found likewise."""
    return _choose(refusals, max)


def _choose(refusals: Sequence[BudgetMissedError], which: Callable[..., BudgetMissedError]) -> BudgetMissedError:
    if len(refusals) == 1:
        return refusals[0]
    return BudgetMissedError(explain=lambda: which(refusals, key=lambda refusal: refusal.least_bytes))


def first_that_fits(candidates: Iterable[C], plan: Callable[[C], T]) -> T:
    """The plan of the first candidate of which one fits the budget; later ones are not made before they are needed.

    Raises:
        BudgetMissedError: none has one; of their refusals that which needs least.
    """
    refusals = list[BudgetMissedError]()
    for candidate in candidates:
        try:
            return plan(candidate)
        except BudgetMissedError as missed:
            refusals.append(missed)
    raise needs_least(refusals)


class StepVariants(Protocol):
    """A captured step with its buckets, in any number of micro-batches, and with parameters in any slices.

    ``candidates``: the numbers of micro-batches that there may be, the least first. ``updates``: those of the coming
    step by bucket, then what later steps have in their place.
    """

    @property
    def layout(self) -> BucketLayout: ...

    @property
    def updates(self) -> Sequence[Mapping[int, UpdateProgram]]: ...

    @property
    def candidates(self) -> Sequence[int]: ...

    @property
    def may_be_sliced(self) -> bool:
        """True if the slices are still open."""
        ...

    def graph(self, num_micro_batches: int, *, by_layer: bool = False) -> StepGraph:
        """The captured step, which is not to be edited."""
        ...

    def slice_parameters(self, slices: Slices) -> StepVariants:
        """The same with parameters in slices."""
        ...

    def use_whole_slices(self) -> StepVariants:
        """The same where every replica updates whole slices."""
        ...

    def put_casts_apart(self) -> StepVariants:
        """The same with weights that products read in fp8 in buckets of their own."""
        ...


@dataclass(frozen=True)
class Problem:
    """A planning problem: each stage settles a part of it, and asks the stages after it for the rest.

    ``rehearsal`` has the graph and the updates that are planned for. ``memory_budget``: bytes on the device; None for
    no limit. ``machine``: the target's, whose host may have less for this plan. ``merges_gathers``: whether gathers may
    start together. ``questions``: the ways to tile and divide that are searched together. ``plan``: one that fits.
    ``locations``: None for a training step; for an evaluation, where parameters and states lie in any case. ``fixed``:
    the same for one of several training steps of a model, which must not move them.
    """

    variants: StepVariants
    rehearsal: Rehearsal
    options: CompileOptions
    memory_budget: int | None
    machine: Machine
    merges_gathers: bool = True
    questions: tuple[Question, ...] = ()
    plan: Plan | None = None
    locations: tuple[Absence, ...] | None = None
    fixed: tuple[Absence, ...] | None = None

    @staticmethod
    def create(
        variants: StepVariants,
        target: Target,
        options: CompileOptions,
        memory_budget: int | None,
        locations: tuple[Absence, ...] | None = None,
        fixed: tuple[Absence, ...] | None = None,
    ) -> Problem:
        """The problem with everything open.

        ``memory_budget``: bytes on the device. ``locations``: of an evaluation, where parameters and states lie.
        ``fixed``: where they stay between steps of a training step that is one of several; None where the plan says it.
        """
        rehearsal = Rehearsal(variants.graph(variants.candidates[0]), variants.layout, variants.updates[0], target)
        return Problem(variants, rehearsal, options, memory_budget, target.machine, locations=locations, fixed=fixed)

    def replace_variants(self, variants: StepVariants, num_micro_batches: int, *, by_layer: bool = False) -> Problem:
        """The same for other slices, or another number of micro-batches, or another order of them."""
        graph, latest = variants.graph(num_micro_batches, by_layer=by_layer), self.rehearsal.latest
        rehearsal = Rehearsal(graph, variants.layout, variants.updates[0], self.target, latest)
        return replace(self, variants=variants, rehearsal=rehearsal)

    def replace_updates(self, programs: Mapping[int, UpdateProgram]) -> Problem:
        """The same where the optimizer's update is another."""
        if programs is self.rehearsal.programs:
            return self
        return replace(self, rehearsal=replace(self.rehearsal, programs=programs))

    @property
    def target(self) -> Target:
        return self.rehearsal.target

    @property
    def step(self) -> StepGraph:
        return self.rehearsal.captured

    @property
    def layout(self) -> BucketLayout:
        return self.rehearsal.layout

    def facts(self) -> GraphFacts:
        """The captured graph on the machine, with what is tiled by name.

        Raises:
            UsageError: ``options.tile`` names what cannot be tiled.
        """
        # What is named in stages are parameters, of which others may have some.
        by_name = self.options.tile if isinstance(self.options.tile, Mapping) and self.step.pipe is None else {}
        tiles = tiles_of_modules(self.step, by_name)
        in_8_bits = self.options.saved is not None
        return GraphFacts(self.step, self.machine, tiles, target=self.target, in_8_bits=in_8_bits)

    def gradients(self) -> tuple[Absence, ...]:
        """The gradients that are asked to wait elsewhere between micro-batches."""
        tier = gradients_tier(self.options.offload, self.machine)
        return gradients_asked(self.layout, self._num_backwards, tier)

    def _buckets_keeping_gradients(self) -> tuple[str, ...]:
        """The buckets with parameters whose gradients are asked for by name."""
        return tuple(
            bucket.name
            for bucket in self.layout.buckets
            if bucket.trainable
            and any(fnmatchcase(s.source, name) for s in bucket.slots for name in self.options.keep_gradients)
        )

    def buckets_reduced_each(self) -> dict[int, str]:
        """The buckets that are reduced in each micro-batch before any move is made, with reasons."""
        if self.gradients():
            return {}
        options, searched = self.options, self.memory_budget is not None
        num = self._num_backwards
        return buckets_reduced_each(self.layout, options.stage, num, options.reduce, searched=searched)

    @property
    def _num_backwards(self) -> int:
        """The number of backwards between which gradients may go, in stages where that is asked for."""
        asked = self.options.parts_gradients and self.step.takes_turns
        return self.step.num_micro_batches if asked else self.step.num_backwards

    def delays(self) -> dict[Bucket, Level]:
        """Levels of states whose updates are asked to run next to the following step."""
        if self.options.delayed_update is None:
            return {}
        return delay_levels(self.layout, self.state_bytes(), self.options.stage, self.on_device)

    def undecided(self) -> Plan:
        """The plan in which nothing is decided yet."""
        options = self.options
        owners = owners_of(self.layout, self.rehearsal.programs, options.stage)
        blank = undecided(self.step, self.layout, options.stage, options.precision.compute, self.machine.name)
        return replace(
            blank,
            buckets=tuple(
                replace(bucket, owners=owners[index].rank_of_each) if index in owners else bucket
                for index, bucket in enumerate(blank.buckets)
            ),
            fp8=options.precision.fp8 or "",
            saved=options.saved or "",
            memory_budget=self.memory_budget,
            max_grad_norm=options.max_grad_norm,
            grad_norms=options.grad_norms,
            kept_gradients=self._buckets_keeping_gradients(),
            loss_scaled=options.loss_scale is not None,
        )

    def question(self) -> Question:
        """The space of plans to search.

        Raises:
            UsageError: ``options.tile`` names what cannot be tiled, or ``options.offload`` a tier that is not there.
        """
        options = self.options
        return Question(
            facts=self.facts(),
            layout=self.layout,
            undecided=self.undecided(),
            recompute=options.recompute != "none",
            tiers=tiers_for(options.offload, self.machine),
            asked=options.policy,
            tile=options.tile == "auto" and not self.step.is_ahead,  # turns hand on what no tile is of
            tile_classes=LOSS in self.target.kernels,
            state_bytes=self.state_bytes(),
            delayed=self.delays(),
            fixed=self.fixed,
            inlines=self.target.fuses and options.recompute != "none",
            gradients=self.gradients(),
            reduce="once" if self.gradients() else options.reduce,
            buckets_reduced_each=self.buckets_reduced_each(),
            on_device=self.on_device,
            at_end=frozenset(i for i, program in self.rehearsal.programs.items() if program.joint is not None),
        )

    @property
    def on_device(self) -> frozenset[int]:
        """The buckets whose updates need whole parameters, which the device alone runs."""
        return frozenset(index for index, program in self.rehearsal.programs.items() if program.whole)

    def state_bytes(self) -> dict[int, int]:
        """Bytes of one rank's optimizer states and masters, by bucket, of those that this step updates: what may be in
        slower tiers."""
        num_bytes, owners = {}, owners_of(self.layout, self.rehearsal.programs, self.options.stage)
        for index, program in self.rehearsal.programs.items():
            bucket = self.layout.buckets[index]
            if bucket.is_lent:
                continue
            local = bucket.updated_numel(self.options.stage)
            master = bucket.dtype.itemsize if bucket.has_master else 0
            if index in owners:
                sizes = OwnedSizes.of(bucket, program, owners[index])
                num_bytes[index] = sizes.numel * master + sizes.state_bytes
            else:
                num_bytes[index] = local * (master + sum(state.dtype.itemsize for state in program.states))
        return num_bytes
