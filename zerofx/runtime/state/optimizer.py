"""A step of the user's optimizers: its scalars, and what it leaves in states, groups and attributes.

Optimizer objects stay the user's. Their ``param_groups`` are read at every step, so schedulers that change them just
work. Their states live in flat slices (``zerofx/runtime/state/optimizer_state.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofx.optimizers import Optimizers
from zerofx.optimizers.binding import OptimizerBinding, distinct
from zerofx.optimizers.outside import Change
from zerofx.optimizers.program import WHOLE_STATES, UpdateProgram
from zerofx.optimizers.whole import Updated, WholeOptimizer, WholeStep
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.state import TrainingState


@dataclass
class Advance:
    """One step's scalars by bucket, what each bucket has after it, and what the step changes outside of the states.

    What a bucket has: its scalar states, and the names of all states that have values. ``whole``: the updates of whole
    parameters, by the first bucket of each.
    """

    values: dict[int, tuple[float, ...]]
    after: dict[int, tuple[dict[str, Any], frozenset[str]]]
    changes: list[Change] = field(default_factory=list)
    whole: dict[int, WholeStep] = field(default_factory=dict)

    def swap(self, state: TrainingState, buckets: Iterable[int] | None = None) -> None:
        """Exchange what the buckets have with what is noted here: once to advance, a second time to go back.

        Groups and attributes of the optimizers change when all buckets do.
        """
        indices = list(self.after if buckets is None else buckets)
        for index in indices:
            bucket = state.buckets[index]
            before = (bucket.scalars, bucket.present)
            bucket.scalars, bucket.present = self.after[index]
            self.after[index] = before
        if len(indices) == len(self.after):
            for change in self.changes:
                change.swap()


def advance(binding: OptimizerBinding, state: TrainingState) -> Advance | None:
    """The coming step's scalars and their effects; None when an update must be traced anew. Changes nothing.

    Raises:
        UsageError: param groups were added since compile, or have other parameters.
        OptimizerError: the coming step cannot run on flat shards.
    """
    binding.check_groups()
    stand_ins = binding.stand_ins(state.buckets)
    step = binding.shadow.next_step(distinct(stand_ins))
    coming = Advance({}, {}, list(step.changes))
    for index, stand_in in stand_ins.items():
        update = step.updates[stand_in.key]
        mine, singles = state.buckets[index], update.program.tensor_scalars
        if not binding.is_for(index, update.program) or _begins_anew(mine, update.program):
            return None
        scalars = update.scalars
        if singles:  # the kernel counts on the device, for this bucket alone
            scalars = {spec.name: mine.scalars[spec.name].clone() for spec in singles} | scalars
        coming.values[index], coming.after[index] = update.numbers, (scalars, update.present)
    known = all(_advance_whole(binding, at, whole, state, coming) for at, whole in binding.whole.items())
    return coming if known else None


def _advance_whole(
    binding: OptimizerBinding, at: int, whole: WholeOptimizer, state: TrainingState, coming: Advance
) -> bool:
    """Add the updates of whole parameters by the optimizer ``at``; False when states have no place yet."""
    next_step, updated = whole.next_step(), list[Updated]()
    coming.changes += next_step.changes
    for index, program in sorted(binding.latest_programs.items()):
        mine, bucket = state.buckets[index], state.layout.buckets[index]
        of, group = binding.place_index(bucket)
        if of != at:
            continue
        if mine.owned.waiting or _begins_anew(mine, program):
            return False
        places = {slot.name: next_step.order[id(state.parameter(slot.source))] for slot in bucket.slots}
        owners, rank = state.owners[index], state.rank_among_owners(bucket)
        coming.after[index] = ({}, frozenset({WHOLE_STATES}))
        updated.append(Updated(bucket, group, program, owners, rank, places, mine.owned))
    steps = [WholeStep(next_step, tuple(updated))] if whole.combines else [WholeStep(next_step, (u,)) for u in updated]
    coming.whole |= {step.buckets[0].bucket.index: step for step in steps}
    return True


def _begins_anew(bucket: BucketState, program: UpdateProgram) -> bool:
    """True if there are no tensors yet for states of the update."""
    return any(spec.name not in bucket.flat for spec in program.states) or any(
        spec.name not in bucket.scalars for spec in program.tensor_scalars
    )


def hyperparameter_texts(optimizers: Optimizers) -> dict[str, str]:
    """The numbers and words of each param group as they are now, by group and name."""
    return {
        f"{name} of param group {index}": str(_number(value))
        for index, group in enumerate(optimizers.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_number(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
