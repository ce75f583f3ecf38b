"""Run a plan for a few steps on a copy of model and optimizer; the originals stay as they are."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zerofx.capture.traceable import preserve_randomness
from zerofx.codegen.regions import Region, regions_of
from zerofx.errors import UsageError, ZeroFXError, summarise_error
from zerofx.ir.streams import axes_of_stream
from zerofx.optimizers import Optimizers, copy_optimizer
from zerofx.options import CompileOptions
from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.cost.links import Transfer
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.session.step import Step

_WARM_UP = 2  # steps: the first, and one of the update that the others run


@dataclass(frozen=True)
class PlanTrial:
    """The result of running a plan on this rank: a measurement, or a failure in words.

    ``in_step``: whether all ranks have run the same until the end; if one has failed within a step, others may wait for
    messages that never come, or hold messages meant for it.
    """

    measured: Measurement | None
    failure: str = ""
    in_step: bool = True


@dataclass(frozen=True)
class TunedTraining:
    """The training to tune: the batch is as ``step(*args, **keywords)`` takes it."""

    model: nn.Module
    optimizers: Optimizers
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(iter(self.model.parameters())).device

    def copy(self, options: CompileOptions) -> tuple[TunedTraining, CompileOptions]:
        """Copies of model, optimizers and loss function that share no tensor with these.

        Raises:
            UsageError: one of them cannot be copied.
        """
        memo: dict[int, Any] = {}
        try:
            model = copy.deepcopy(self.model, memo)
            optimizers = replace(
                self.optimizers, each=tuple(copy_optimizer(optimizer, memo) for optimizer in self.optimizers.each)
            )
            objective = options.objective.copy_for(memo)
        except (TypeError, RuntimeError) as error:
            if isinstance(error, ZeroFXError):
                raise
            raise UsageError(
                f"expected a model, an optimizer and a loss function that copy.deepcopy can copy, since tune trains a "
                f"copy, found {type(error).__name__}: {error}"
            ) from error
        return replace(self, model=model, optimizers=optimizers), replace(options, objective=objective)


def run_trial(
    training: TunedTraining, plan: Plan, options: CompileOptions, num_steps: int
) -> tuple[PlanTrial, list[Region]]:
    """Build the step of ``plan`` on a copy and measure ``num_steps`` steps; also gives the step's regions.

    All ranks call it together. Random generators are restored. The copy is freed by ``free_copies``.

    Raises:
        UsageError: the model cannot be copied, or the batch is invalid.
    """
    with preserve_randomness(training.device), ExitStack() as undo:
        copied, own = training.copy(options)
        args, keywords = copied.args, copied.keywords
        try:
            # Without a budget: what the peak is, is to be found out.
            # And at a scale with which no step is left out.
            scale = None if own.loss_scale is None else 1.0
            precision = replace(own.precision, loss_scale=scale)
            alone = replace(own, plan=plan, memory_budget=None, precision=precision)
            step = Step(copied.model, copied.optimizers, alone)
            undo.callback(step.abandon)  # a step that has run cannot be: all ranks close it together, if they can
            step.prepare(*args, **keywords)
        except UsageError:
            raise
        except (ZeroFXError, RuntimeError, MemoryError) as error:
            return PlanTrial(None, summarise_error(error)), []
        try:
            for _ in range(_WARM_UP):
                step(*args, **keywords)
            measurement = step.measure(*args, num_steps=num_steps, **keywords)
        except (ZeroFXError, RuntimeError, MemoryError) as error:
            return PlanTrial(None, summarise_error(error), in_step=False), []
        regions = regions_of(step.compiled.lowered.instructions)
        step.close()
        return PlanTrial(measurement), regions


def free_copies(device: torch.device) -> None:
    """Free the memory of copies whose steps are not used any more: model and step refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def slowest(measured: Sequence[Measurement], mesh: Mesh) -> Measurement:
    """Merge the measurements of the ranks of ``mesh``: the longest times and the highest peaks among them."""
    tiers = dict.fromkeys(tier for of_rank in measured for tier in of_rank.peak_bytes)
    keys = dict.fromkeys(key for of_rank in measured for key in of_rank.region_seconds)
    streams = dict.fromkeys(stream for of_rank in measured for stream in of_rank.transfers)
    return Measurement(
        peak_bytes={tier: max(of_rank.peak_bytes.get(tier, 0) for of_rank in measured) for tier in tiers},
        model_state_bytes=max(of_rank.model_state_bytes for of_rank in measured),
        wire_bytes=max(of_rank.wire_bytes for of_rank in measured),
        step_seconds=max(of_rank.step_seconds for of_rank in measured),
        exposed_seconds=max(of_rank.exposed_seconds for of_rank in measured),
        num_steps=measured[0].num_steps,
        between_seconds=max(of_rank.between_seconds for of_rank in measured),
        region_seconds={key: max(of_rank.region_seconds.get(key, 0.0) for of_rank in measured) for key in keys},
        transfers={
            stream: _transfers(stream, [of_rank.transfers.get(stream, ()) for of_rank in measured], mesh)
            for stream in streams
        },
    )


def _transfers(stream: str, of_ranks: Sequence[tuple[Transfer, ...]], mesh: Mesh) -> tuple[Transfer, ...]:
    """The transfers of all ranks: each copy of each rank, and each collective of each group of ranks once.

    A rank that comes early to a collective waits for the others there: its real time is that of the last to come.
    """
    axes = axes_of_stream(stream)
    if axes is None:
        return tuple(transfer for transfers in of_ranks for transfer in transfers)
    return tuple(
        min(together, key=lambda transfer: transfer.seconds)
        for members in mesh.groups(axes)
        for together in zip(*(of_ranks[rank] for rank in members), strict=True)
    )
