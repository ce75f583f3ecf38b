"""The user's optimizer as the step sees it: its groups, its update, this step's scalars.

The optimizer object stays the user's. Its ``param_groups`` are read at every step, so schedulers that change them just
work. Its states live in flat slices (``zerofx/runtime/state/optimizer_state.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from zerofx.errors import OptimizerError, UsageError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.optimizers import (
    HostFunction,
    UpdateProgram,
    flat_state_dtypes,
    has_fused,
    scalar_state_names,
    trace_update,
)
from zerofx.optimizers.ahead import programs_ahead
from zerofx.optimizers.following.follower import Follower
from zerofx.optimizers.following.stand_in import StandIn, copied_scalars
from zerofx.optimizers.outside import Change, attributes
from zerofx.optimizers.shadow import structural_flags, tensor_options
from zerofx.optimizers.stored import storing_states
from zerofx.runtime.state.held_states import HeldState, held_by_bucket
from zerofx.runtime.state.state import TrainingState


@dataclass
class Advance:
    """One step's scalars by bucket, what each bucket has after it, and what the step changes outside of the states.

    What a bucket has: its scalar states, and the names of all states that have values.
    """

    values: dict[int, tuple[float, ...]]
    after: dict[int, tuple[dict[str, Any], frozenset[str]]]
    changes: list[Change] = field(default_factory=list)

    def swap(self, state: TrainingState, buckets: Iterable[int] | None = None) -> None:
        """Exchange what the buckets have with what is noted here: once to advance, a second time to go back.

        Groups and attributes of the optimizer change when all buckets do.
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


class OptimizerBinding:
    """Connects an optimizer to buckets. ``prefer_fused``: use torch's fused kernels where a group does not say.

    ``variant`` tells the updates that hold now from others that the same optimizer can take; it is the same text on all
    ranks.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, layout: BucketLayout, device: torch.device, prefer_fused: bool
    ) -> None:
        self.optimizer = optimizer
        self._layout = layout
        self._device = device
        self._prefer_fused = prefer_fused
        self._members = _members(optimizer)
        self._programs: dict[int, UpdateProgram] = {}  # as the optimizer has its states, not as they are stored
        self._storing: dict[tuple[Hashable, torch.dtype], UpdateProgram] = {}
        self._own_dtypes: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        self._starts: dict[int, StandIn] = {}
        self.variant = ""
        self._hosts: dict[str, HostFunction] = {}
        self._follower = Follower(optimizer)
        self._is_followed = False
        self._traced_for: Any = None

    def group(self, bucket: Bucket) -> dict[str, Any]:
        assert bucket.group is not None
        group: dict[str, Any] = self.optimizer.param_groups[bucket.group]
        return group

    @property
    def traced(self) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, as it was traced last."""
        return self._stored(self._programs)

    def programs(
        self,
        state: TrainingState | None,
        held: Mapping[int, HeldState] = MappingProxyType({}),
        known: OptimizerBinding | None = None,
    ) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, for the options and states that hold now.

        A program is traced once, with a function for its scalars, where that says all that there is to know; else the
        optimizer is followed step by step (``zerofx.optimizers.following.follower``), from then on.

        ``held``: before there is a ``state``, what the optimizer holds itself, as the method ``held`` gives it.
        ``known``: the optimizer as it is now with other buckets; what starts as one of those is not traced again.

        Raises:
            OptimizerError: the update cannot run on flat shards.
        """
        stand_ins = self._stand_ins(state, held)
        apart = list({stand_in.key: stand_in for stand_in in stand_ins.values()}.values())
        traced = known._by_start() if known is not None else {}
        is_known = known is not None and all(stand_in.key in traced for stand_in in apart)
        is_followed = self._is_followed
        if known is not None and is_known:
            self._follower, is_followed = known._follower, known._is_followed
            by_bucket = {index: traced[stand_in.key] for index, stand_in in stand_ins.items()}
        elif not is_followed:
            try:
                by_bucket = self._traced(stand_ins)
            except OptimizerError:
                if any(self._fused(self._layout.buckets[index]) for index in stand_ins):
                    raise
                is_followed = True
            else:
                # What its step does to several parameters, and later, is to be seen before the first step.
                self._follower.programs(apart, steps_ahead=3)
                is_followed = self._follower.changes_outside
        if is_followed and not is_known:
            followed = self._follower.programs(apart)
            by_bucket = {index: followed[stand_in.key] for index, stand_in in stand_ins.items()}
        self._is_followed, self._programs, self._starts = is_followed, by_bucket, stand_ins
        self._traced_for = self._options()
        programs = self._stored(self._programs)
        texts = {id(program): _text(program) for program in programs.values()}
        whole = "\n".join(f"{index} {texts[id(program)]}" for index, program in sorted(programs.items()))
        groups = {bucket.group: self.group(bucket) for bucket in self._layout.buckets if bucket.trainable}
        flags = [", ".join(f"{name}={value}" for name, value in structural_flags(group)) for group in groups.values()]
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        self.variant = f"{type(self.optimizer).__name__}({'; '.join(flags)}), traced as {digest}"
        return programs

    def _by_start(self) -> dict[Any, UpdateProgram]:
        """The updates that hold now by what they start from."""
        return {stand_in.key: self._programs[index] for index, stand_in in self._starts.items()}

    def _stored(self, programs: Mapping[int, UpdateProgram]) -> dict[int, UpdateProgram]:
        """``programs`` by bucket, with states as the buckets store them; the same object for the same of both."""
        stored: dict[int, UpdateProgram] = {}
        for index, program in programs.items():
            bucket = self._layout.buckets[index]
            stored[index] = program
            if bucket.state_dtype != bucket.dtype:
                key = (program.key, bucket.state_dtype)
                if key not in self._storing:
                    self._storing[key] = storing_states(program, bucket.state_dtype)
                stored[index] = self._storing[key]
        return stored

    def updates(self, *, ahead: bool) -> list[dict[int, UpdateProgram]]:
        """The update of each trained bucket in the coming step, as ``programs`` gave it, and others of later steps.

        ``ahead``: whether later ones are asked for, which are known for a dozen steps from the first.
        """
        if not ahead:
            return [self._stored(self._programs)]
        forms: dict[int, list[UpdateProgram]] = {}
        alike: dict[Any, list[UpdateProgram]] = {}
        for index, stand_in in self._starts.items():
            if stand_in.key not in alike:
                program = self._programs[index]
                alike[stand_in.key] = (
                    self._follower.forms(stand_in, program)
                    if self._is_followed
                    else programs_ahead(
                        self.optimizer, self.group(self._layout.buckets[index]), program, dict(stand_in.scalars)
                    )
                )
            forms[index] = alike[stand_in.key]
        num_forms = max(map(len, forms.values()), default=1)
        return [
            self._stored({index: several[min(number, len(several) - 1)] for index, several in forms.items()})
            for number in range(num_forms)
        ]

    def _traced(self, stand_ins: Mapping[int, StandIn]) -> dict[int, UpdateProgram]:
        traced: dict[Any, UpdateProgram] = {}
        programs: dict[int, UpdateProgram] = {}
        for index, stand_in in stand_ins.items():
            bucket = self._layout.buckets[index]
            if stand_in.key not in traced:
                scalars = {name: float(value) for name, value in stand_in.scalars}
                traced[stand_in.key] = trace_update(
                    self.optimizer,
                    self.group(bucket),
                    state_present=frozenset(scalars) | frozenset(name for name, _ in stand_in.flat),
                    scalar_values=scalars,
                    dtype=bucket.dtype,
                    fused=self._fused(bucket),
                )
            programs[index] = traced[stand_in.key]
        return programs

    def _stand_ins(self, state: TrainingState | None, held: Mapping[int, HeldState]) -> dict[int, StandIn]:
        """What the coming update of each trained bucket starts from."""
        stand_ins: dict[int, StandIn] = {}
        for bucket in self._layout.buckets:
            if not bucket.trainable:
                continue
            assert bucket.group is not None
            flat: dict[str, torch.dtype] = {}
            scalars: dict[str, Any] = {}
            if state is not None:
                mine = state.buckets[bucket.index]
                flat = {name: value.dtype for name, value in mine.flat.items() if name in mine.present}
                scalars = {name: value for name, value in mine.scalars.items() if name in mine.present}
            elif bucket.index in held:
                flat = {name: values[0].dtype.to_real() for name, values in held[bucket.index].flat.items()}
                scalars = held[bucket.index].scalars
            own = tuple((name, self._own_dtype(bucket, name, dtype)) for name, dtype in flat.items())
            stand_ins[bucket.index] = StandIn(bucket.group, bucket.dtype, own, tuple(scalars.items()))
        return stand_ins

    def _own_dtype(self, bucket: Bucket, name: str, stored: torch.dtype) -> torch.dtype:
        """The optimizer's own dtype of a state that buckets store as ``stored``."""
        if stored == bucket.dtype:
            return stored
        assert bucket.group is not None
        key = (bucket.group, bucket.dtype)
        if key not in self._own_dtypes:
            self._own_dtypes[key] = flat_state_dtypes(
                self.optimizer, bucket.group, dtype=bucket.dtype, fused=self._fused(bucket)
            )
        return self._own_dtypes[key].get(name, bucket.optimizer_dtype(stored))

    def held(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, HeldState]:
        """The states that the optimizer holds per parameter, by bucket; ``parameters`` by name. Changes nothing.

        Parameters that are not trained now may have some, from when they were.

        Raises:
            OptimizerError: parameters of one bucket have states that cannot be updated together.
        """
        states: dict[int, HeldState] = {}
        known: dict[Any, frozenset[str]] = {}
        for bucket in self._layout.buckets:
            entries = [self.optimizer.state.get(parameters[slot.source], {}) for slot in bucket.slots]
            if not any(entries):
                continue
            shapes = [tuple(parameters[slot.source].shape) for slot in bucket.slots]
            if not bucket.trainable:
                states[bucket.index] = held_by_bucket(bucket, entries, shapes, _numbers_in(entries[0], shapes[0]))
                continue
            key = (bucket.group, bucket.dtype)
            if key not in known:
                assert bucket.group is not None
                known[key] = scalar_state_names(
                    self.optimizer, bucket.group, dtype=bucket.dtype, fused=self._fused(bucket)
                )
            states[bucket.index] = held_by_bucket(bucket, entries, shapes, known[key])
        return states

    def advance(self, state: TrainingState) -> Advance | None:
        """This step's scalars and their effects; None when an update must be traced anew. Changes nothing.

        Raises:
            UsageError: param groups were added since compile, or have other parameters.
            OptimizerError: the optimizer is followed, and its coming step cannot run on flat shards.
        """
        members = _members(self.optimizer)
        if members != self._members:
            differs = f"{len(members)}" if len(members) != len(self._members) else "other parameters in them"
            raise UsageError(
                f"expected the {len(self._members)} param groups that the optimizer had at compile, found {differs}: "
                f"call step.close() before add_param_group, or before parameters change groups, and compile again "
                f"after it"
            )
        return self._advance_followed(state) if self._is_followed else self._advance_traced(state)

    def _advance_traced(self, state: TrainingState) -> Advance | None:
        if self._options() != self._traced_for:
            return None
        advance = Advance({}, {})
        for index, program in self._programs.items():
            bucket = state.buckets[index]
            if bucket.present != program.state_before:
                return None
            trial = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in bucket.scalars.items()}
            values = self._host(program)(self.group(self._layout.buckets[index]), trial)
            if values is None:
                return None
            advance.values[index], advance.after[index] = values, (trial, program.state_after)
        return advance

    def _advance_followed(self, state: TrainingState) -> Advance | None:
        stand_ins = self._stand_ins(state, {})
        step = self._follower.next_step(list({stand_in.key: stand_in for stand_in in stand_ins.values()}.values()))
        advance = Advance({}, {}, step.changes)
        for index, stand_in in stand_ins.items():
            update = step.updates[stand_in.key]
            if update.program is not self._programs.get(index):
                return None
            advance.values[index], advance.after[index] = (
                update.numbers,
                (copied_scalars(update.scalars), update.present),
            )
        return advance

    def _options(self) -> Any:
        """What a traced update depends on besides numbers in groups: flags, tensors, the optimizer's attributes."""
        plain = (bool, int, float, str, type(None))
        own = {name: value for name, value in attributes(self.optimizer).items() if isinstance(value, plain)}
        return [(structural_flags(group), tensor_options(group)) for group in self.optimizer.param_groups], own

    def _host(self, program: UpdateProgram) -> HostFunction:
        if program.host_source not in self._hosts:
            self._hosts[program.host_source] = program.host()
        return self._hosts[program.host_source]

    def _fused(self, bucket: Bucket) -> bool:
        fused = self.group(bucket).get("fused")
        if fused is None and not self._prefer_fused:
            return False
        # Of states that live on the host, the update may run there.
        places = {self._device.type, "cpu"}
        return fused is not False and all(has_fused(self.optimizer, place, bucket.dtype) for place in places)


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Which parameters each param group has, by their identities."""
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def _numbers_in(entry: Mapping[str, Any], shape: tuple[int, ...]) -> frozenset[str]:
    """The names of what a parameter that is not trained now has as a number, not as a tensor of its shape."""
    return frozenset(
        name for name, value in entry.items() if not (isinstance(value, torch.Tensor) and tuple(value.shape) == shape)
    )


def hyperparameter_texts(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The numbers and words of each param group as they are now, by group and name."""
    return {
        f"{name} of param group {index}": str(_number(value))
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)):
        return [_number(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _text(program: UpdateProgram) -> str:
    """What ``program.key`` says, as text that is the same in every process."""
    parts = (program.optimizer, program.dtype, program.fused, program.first_step_only, sorted(program.state_before))
    return "\n".join(map(str, (*parts, program.states, program.scalar_states, program.host_source, program.graph)))
