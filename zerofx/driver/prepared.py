"""A captured step with its buckets and the update of each: what a plan is made for, in training or evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zerofx.capture.by_size import KnownSizes
from zerofx.capture.objective.evaluation import Evaluation
from zerofx.driver.captures import Captures
from zerofx.driver.lent import Borrowed, add_borrowed
from zerofx.errors import UsageError
from zerofx.ir.batch import Batch
from zerofx.ir.bucketing import layout_of
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.ir.tensor_parts import named_parameters
from zerofx.optimizers import Optimizers, UpdateProgram
from zerofx.optimizers.binding import OptimizerBinding
from zerofx.option_checks import check_bucket_names
from zerofx.option_table import defaults_for
from zerofx.options import CompileOptions
from zerofx.progress import watch_progress
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.stages import agree_in_stages
from zerofx.runtime.state.parameter_groups import group_of_parameters, histories_of
from zerofx.runtime.state.state import TrainingState
from zerofx.scheduler.analysis.slices import Slices
from zerofx.scheduler.analysis.stages_of_nodes import chunks_of_buckets
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.decisions import Absence, ShardingDecision
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.placements import FIRST_CAPACITY, Placement
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.fp8_products import ProductKey
from zerofx.scheduler.search.stages.parameter_slices import slices_asked, slices_of
from zerofx.scheduler.search.target import Target
from zerofx.settings import Settings
from zerofx.units import first_few


@dataclass(frozen=True)
class Request:
    """A request for a step of this model, optimizers and batch, for the ranks of a mesh on a machine.

    ``locations``: None for a training step; for an evaluation, where what it reads and what it leaves alone lies.
    ``fixed``: for a training step next to others, where states and parameters stay; None where its plan says it.
    ``lenders``: the models of other steps that may be read from buckets. ``sizes``: what was captured for batches of
    other sizes, of which the step's graph may be made. ``capacity``: of a rank for rows of experts, in equal shares,
    which are sent in ``num_rounds``. ``num_copies``: the number of experts that are copied; ``needed``: the capacity
    that there is instead, unless copies are faster; 0 where they are not to be compared. ``why_copies``: what has been
    found of that.
    ``verbose``: whether this rank shows how long it takes.
    """

    model: nn.Module
    optimizers: Optimizers
    batch: Batch
    options: CompileOptions
    settings: Settings
    mesh: Mesh
    machine: Machine
    verbose: bool
    locations: tuple[Absence, ...] | None = None
    fixed: tuple[Absence, ...] | None = None
    lenders: tuple[Borrowed, ...] = ()
    sizes: KnownSizes | None = None
    capacity: float = FIRST_CAPACITY
    num_rounds: int = 1
    num_copies: int = 0
    needed: float = 0.0
    why_copies: str = ""

    @property
    def borrowed(self) -> tuple[Borrowed, ...]:
        """The models of other steps that are read, as far as captures have shown."""
        used = {lent.name for lent in self.options.objective.free_tensors.lent}
        return tuple(lender for lender in self.lenders if lender.lent.name in used)

    def target(self, device: torch.device, *, on_cpu: bool, verbose: bool = True) -> Target:
        """The target to plan and lower a step for, with its tensors on ``device``; ``on_cpu`` as for ``Target``."""
        verbose = verbose and self.verbose
        return Target.create(self.machine, self.options, self.settings, device, on_cpu=on_cpu, verbose=verbose)


@dataclass(frozen=True)
class Shared:
    """Shardings of the captured step that ``given`` identifies, over ranks of the model axis, and the placements of all
    parameters there; ``cuts``: the parts of its forward that later stages of the axis pipe begin with, ``buckets`` and
    ``by_chunk``: as ``PipeStage`` has them. ``in_fp8``: its products that are."""

    given: str
    shardings: tuple[ShardingDecision, ...]
    placements: Mapping[str, Placement]
    cuts: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    by_chunk: bool = False
    in_fp8: tuple[ProductKey, ...] = ()


@dataclass(frozen=True)
class Earlier:
    """Results of a model's first step, for further ones. ``shared`` says how ranks share it."""

    layout: BucketLayout
    binding: OptimizerBinding
    state: TrainingState
    shared: Shared


@dataclass(frozen=True)
class Prepared:
    """A captured step with the buckets of its parameters and the update of each; the planner's ``StepVariants``.

    ``updates``: those of the coming step, then what later steps have in their place. ``groups``: the index of the param
    group of each trained parameter, by name. ``may_be_sliced``: whether its parameters may be in other slices, or
    updated in others; not where the layout is given. ``casts_apart``: whether weights that products read in fp8 are in
    buckets of their own. ``laid_out`` is a cache that these variants of a step share.
    """

    request: Request
    captures: Captures
    layout: BucketLayout
    binding: OptimizerBinding
    updates: Sequence[dict[int, UpdateProgram]]
    groups: Mapping[str, int]
    may_be_sliced: bool
    casts_apart: bool = False
    laid_out: dict[tuple[Slices, bool, bool], Prepared] = field(default_factory=dict, repr=False, compare=False)

    @property
    def programs(self) -> dict[int, UpdateProgram]:
        """The update of each bucket in the coming step."""
        return self.updates[0]

    @property
    def captured(self) -> StepGraph:
        """The step in the least number of micro-batches that may be planned for."""
        return self.captures.first

    @property
    def candidates(self) -> Sequence[int]:
        """The numbers of micro-batches that may be planned for, the least first."""
        return self.captures.candidates

    @property
    def chunks(self) -> list[int]:
        """The chunk of each trained bucket of a stage."""
        return chunks_of_buckets(self.captures.rank_graph(self.candidates[0]), self.layout)

    def number_buckets(self, chunks: Sequence[Sequence[int]]) -> Prepared:
        """The same stage with the numbers of its buckets among those of all stages, which have these ``chunks``."""
        captures = self.captures.number_buckets(chunks)
        return self if captures is self.captures else replace(self, captures=captures)

    def graph(self, num_micro_batches: int, *, by_layer: bool = False) -> StepGraph:
        """The captured step in so many micro-batches, one by one or ``by_layer``, which is not to be edited."""
        return self.captures.graph(num_micro_batches, by_layer=by_layer)

    def graph_for(self, plan: Plan) -> StepGraph:
        """The captured step that ``plan`` is for, which is not to be edited."""
        return self.graph(plan.num_micro_batches, by_layer=plan.by_layer)

    def slice_parameters(self, slices: Slices) -> Prepared:
        """The same step with parameters in these slices.

        Raises:
            ZeroFXError: one of them cannot be worked with so, or the optimizer's update of one.
        """
        return self._other(slices, self.layout.has_parts, self.casts_apart)

    def use_whole_slices(self) -> Prepared:
        """The same step where every replica updates whole slices."""
        return self._other(self.captures.slices, False, self.casts_apart)

    def put_casts_apart(self) -> Prepared:
        """The same step with weights that products read in fp8 in buckets of their own, unless the layout is given."""
        return self._other(self.captures.slices, self.layout.has_parts, self.may_be_sliced)

    def is_for(self, plan: Plan) -> bool:
        """True if parameters and states are as ``plan`` has them."""
        return self._key_for(plan) == (self.captures.slices, self.layout.has_parts, self.casts_apart)

    def adapt_to(self, plan: Plan) -> Prepared:
        """The same step as ``plan`` has its parameters and states.

        Raises:
            ZeroFXError: as ``slice_parameters``.
        """
        return self._other(*self._key_for(plan))

    def _key_for(self, plan: Plan) -> tuple[Slices, bool, bool]:
        return plan.slices, plan.has_parts, plan.has_casts and self.may_be_sliced

    def _other(self, *key: *tuple[Slices, bool, bool]) -> Prepared:
        if key == (self.captures.slices, self.layout.has_parts, self.casts_apart):
            return self
        assert self.may_be_sliced, "a layout that is given has its slices"
        if key not in self.laid_out:
            slices, in_parts, casts_apart = key
            captures = self.captures.slice_parameters(slices)
            self.laid_out[key] = _lay_out(
                self.request, captures, self.groups, self.laid_out, self.binding, in_parts=in_parts,
                casts_apart=casts_apart,
            )  # fmt: skip
        return self.laid_out[key]

    def agree(self, control: Control) -> None:
        """Compare with the other ranks.

        Raises:
            RankMismatchError: another rank captured another graph, or has other optimizers.
        """
        mesh = self.request.mesh
        agree_on_graph(self.captured, control, mesh)
        agree_in_stages(
            control, mesh, "compare optimizers", f"{self.layout}\n{self.binding.variant}",
            "buckets and optimizer update", "Give every rank the same param groups and options.",
        )  # fmt: skip


def prepare(
    request: Request, captures: Captures, earlier: Earlier | None = None, known: OptimizerBinding | None = None
) -> Prepared:
    """Do all that can fail because of what the user gave, beginning with the first of ``captures``.

    ``earlier`` is None for the first step of a model. ``known`` as for ``OptimizerBinding.programs``.

    Raises:
        ZeroFXError: the model cannot be captured, or an optimizer does not belong to it.
    """
    with watch_progress("capturing the model", show=request.verbose):
        captured = captures.first
    groups = group_of_parameters(request.model, request.optimizers, captured.parameters, set(captured.gradients))
    if earlier is None:
        asked, plan = slices_asked(captured, request.options), request.options.plan
        in_parts = plan.has_parts if isinstance(plan, Plan) else request.options.states_over != "shard"
        casts_apart = isinstance(plan, Plan) and plan.has_casts
        captures = captures.slice_parameters(asked)
        return _lay_out(request, captures, groups, {}, known, in_parts=in_parts, casts_apart=casts_apart)
    captures = captures.slice_parameters(slices_of(earlier.layout))
    check_bucket_names(request.options.policy.keep, [bucket.name for bucket in earlier.layout.buckets])
    _check_gradients(captures.first, earlier.layout)
    layout, others = _add_borrowed(earlier.layout, request, captures.first)
    updates = [earlier.binding.programs(earlier.state.buckets) | others]
    return Prepared(request, captures, layout, earlier.binding, updates, groups, may_be_sliced=False)


def _lay_out(
    request: Request,
    captures: Captures,
    groups: Mapping[str, int],
    laid_out: dict[tuple[Slices, bool, bool], Prepared],
    known: OptimizerBinding | None,
    *,
    in_parts: bool,
    casts_apart: bool,
) -> Prepared:
    """A model's first step: its parameters in buckets, and the update of each."""
    options, captured = request.options, captures.first
    layout = layout_of(
        captured, groups, request.mesh, block=options.block,
        casts_apart=casts_apart, in_parts=in_parts, reduce_dtype=options.gradient_dtype, state_dtype=options.states_in,
        histories=histories_of(request.model, request.optimizers),
    )  # fmt: skip
    check_bucket_names(options.policy.keep, [bucket.name for bucket in layout.buckets])
    binding = OptimizerBinding(request.optimizers, layout, captured.device, prefer_fused=options.compiles_regions)
    binding.programs(None, binding.find_states(dict(named_parameters(request.model))), known)
    layout, others = _add_borrowed(layout, request, captured)
    updates = [update | others for update in binding.updates(ahead=options.memory_budget is not None)]
    return Prepared(
        request, captures, layout, binding, updates, groups, may_be_sliced=True, casts_apart=casts_apart,
        laid_out=laid_out,
    )  # fmt: skip


def _add_borrowed(
    layout: BucketLayout, request: Request, captured: StepGraph
) -> tuple[BucketLayout, dict[int, UpdateProgram]]:
    """The layout with the buckets that the step reads of other steps, and the updates of those; of a step with fewer
    layers than it has, those of the layers that are there.

    Raises:
        UsageError: one of them cannot be read.
    """
    for borrowed in request.borrowed:
        borrowed.check(request.mesh)
    return add_borrowed(layout, request.borrowed, {info.name for info in captured.parameters})


def agree_on_graph(captured: StepGraph, control: Control, mesh: Mesh) -> None:
    """Compare a captured graph with that of the other ranks, of one stage where there are several.

    Raises:
        RankMismatchError: another rank captured another.
    """
    agree_in_stages(
        control, mesh, "compare captured graphs", captured.text(), "captured graph",
        "Build the same model on every rank. Where the forward computes with the rank's number, which is a constant of "
        "each graph, pass it as a tensor in the batch: step(x, rank=torch.tensor(rank)).",
    )  # fmt: skip


def _check_gradients(captured: StepGraph, layout: BucketLayout) -> None:
    trained = {slot.name for bucket in layout.buckets if bucket.trainable for slot in bucket.slots}
    changed = sorted(trained ^ set(captured.gradients))
    if changed:
        raise UsageError(
            f"expected a gradient for the parameters that the first batch trained, found a difference in "
            f"{first_few(changed)}: parameters must be trained, or not, in every step"
        )


def request_to_evaluate(training: Request, batch: Batch, locations: tuple[Absence, ...]) -> Request:
    """The request for what a step that is asked for as ``training`` computes of a batch without training on it.

    What is gathered is sent exactly as it is, and what is only about gradients and updates is left out.
    """
    return replace(training, batch=batch, options=_options(training.options), locations=locations, fixed=None)


def freeze_layout(earlier: Earlier) -> Earlier:
    """The buckets of a model's first step, none of them trained, for an evaluation."""
    return replace(earlier, layout=earlier.layout.freeze())


def _options(options: CompileOptions) -> CompileOptions:
    changed = defaults_for(CompileOptions, "evaluation") | {
        "objective": Evaluation(options.objective),
        "recompute": "none",
        "offload": "none",
        "tile": "none" if options.tile == "none" else "auto",
        "precision": replace(options.precision, reduce_dtype=None),
    }
    return replace(options, **changed)
