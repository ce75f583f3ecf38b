"""A captured step with its buckets and the update of each: what a plan is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zerofx.driver.captures import Captures
from zerofx.errors import UsageError
from zerofx.ir.batch import Batch
from zerofx.ir.buckets import BucketLayout, layout_of
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions, check_bucket_names
from zerofx.progress import watched
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.optimizer import OptimizerBinding, group_of_parameters
from zerofx.runtime.state.state import TrainingState
from zerofx.scheduler.analysis.slices import Slices
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.search.stages.parameter_slices import slices_asked, slices_of
from zerofx.settings import Settings


@dataclass(frozen=True)
class Request:
    """What is asked for: a step of this model, optimizer and batch, for a number of ranks of a machine.

    ``verbose``: whether this rank shows how long it takes.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    options: CompileOptions
    settings: Settings
    num_ranks: int
    machine: Machine
    verbose: bool


@dataclass(frozen=True)
class Earlier:
    """What the first step of a model has made, for further ones."""

    layout: BucketLayout
    binding: OptimizerBinding
    state: TrainingState


@dataclass(frozen=True)
class Prepared:
    """A captured step with the buckets of its parameters and the update of each; the planner's ``Work``.

    ``updates``: those of the coming step, then what later steps have in their place. ``groups``: the index of the param
    group of each trained parameter, by name. ``may_be_sliced``: whether its
    parameters may be in other slices; not where the layout is given.
    """

    request: Request
    captures: Captures
    layout: BucketLayout
    binding: OptimizerBinding
    updates: Sequence[dict[int, UpdateProgram]]
    groups: Mapping[str, int]
    may_be_sliced: bool
    in_slices: dict[Slices, Prepared] = field(default_factory=dict, repr=False, compare=False)

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

    def graph(self, num_micro_batches: int) -> StepGraph:
        """The captured step in so many micro-batches, which is not to be edited."""
        return self.captures.graph(num_micro_batches)

    def sliced(self, slices: Slices) -> Prepared:
        """The same step with parameters in these slices.

        Raises:
            ZeroFXError: one of them cannot be worked with so, or the optimizer's update of one.
        """
        if slices == self.captures.slices:
            return self
        assert self.may_be_sliced, "a layout that is given has its slices"
        if slices not in self.in_slices:
            self.in_slices[slices] = _laid_out(self.request, self.captures.sliced(slices), self.groups, self.in_slices)
        return self.in_slices[slices]

    def agree(self, control: Control) -> None:
        """Compare with the other ranks.

        Raises:
            RankMismatchError: another rank captured another graph, or has another optimizer.
        """
        agree_on_graph(self.captured, control)
        control.agree(
            "compare optimizers", f"{self.layout}\n{self.binding.variant}", "buckets and optimizer update",
            "Give every rank the same param groups and options.",
        )  # fmt: skip


def prepare(request: Request, captures: Captures, earlier: Earlier | None = None) -> Prepared:
    """Do all that can fail because of what the user gave, beginning with the first of ``captures``.

    ``earlier`` is None for the first step of a model.

    Raises:
        ZeroFXError: the model cannot be captured, or the optimizer does not belong to it.
    """
    with watched("capturing the model", show=request.verbose):
        captured = captures.first
    groups = group_of_parameters(request.model, request.optimizer, captured.parameters, set(captured.gradients))
    if earlier is None:
        return _laid_out(request, captures.sliced(slices_asked(captured, request.options)), groups, {})
    captures = captures.sliced(slices_of(earlier.layout))
    check_bucket_names(request.options.policy.keep, [bucket.name for bucket in earlier.layout.buckets])
    _check_gradients(captures.first, earlier.layout)
    updates = [earlier.binding.programs(earlier.state)]
    return Prepared(request, captures, earlier.layout, earlier.binding, updates, groups, may_be_sliced=False)


def _laid_out(
    request: Request, captures: Captures, groups: Mapping[str, int], in_slices: dict[Slices, Prepared]
) -> Prepared:
    """A model's first step: its parameters in buckets, and the update of each."""
    options, captured = request.options, captures.first
    layout = layout_of(
        captured, groups, request.num_ranks, options.block,
        reduce_dtype=options.reduced_in, state_dtype=options.states_in,
    )  # fmt: skip
    check_bucket_names(options.policy.keep, [bucket.name for bucket in layout.buckets])
    binding = OptimizerBinding(request.optimizer, layout, captured.device, prefer_fused=options.compiles_regions)
    binding.programs(None, binding.held(dict(request.model.named_parameters())))
    updates = binding.updates(ahead=options.memory_budget is not None)
    return Prepared(request, captures, layout, binding, updates, groups, may_be_sliced=True, in_slices=in_slices)


def agree_on_graph(captured: StepGraph, control: Control) -> None:
    """Compare a captured graph with the other ranks'.

    Raises:
        RankMismatchError: another rank captured another.
    """
    control.agree(
        "compare captured graphs", captured.text(), "captured graph",
        "Build the same model on every rank. Where the forward computes with the rank's number, which is a constant of "
        "each graph, pass it as a tensor in the batch: step(x, rank=torch.tensor(rank)).",
    )  # fmt: skip


def _check_gradients(captured: StepGraph, layout: BucketLayout) -> None:
    trained = {slot.name for bucket in layout.buckets if bucket.trainable for slot in bucket.slots}
    changed = sorted(trained ^ set(captured.gradients))
    if changed:
        raise UsageError(
            f"expected a gradient for the parameters that the first batch trained, found a difference in "
            f"{', '.join(changed[:5])}: parameters must be trained, or not, in every step"
        )
