"""The update of each bucket by the optimizer that has it, for the options and states that hold now."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.optimizers.held_states import HeldState, collect_states
from zerofx.optimizers.program import UpdateProgram, cast_states
from zerofx.optimizers.several import Optimizers, ShadowOptimizers
from zerofx.optimizers.shadow import structural_flags
from zerofx.optimizers.shadow_optimizer import flat_state_dtypes, scalar_state_names
from zerofx.optimizers.stand_in import StandIn
from zerofx.optimizers.support import has_fused


class BucketStates(Protocol):
    """Optimizer states of a bucket: flat ones, with their dtypes, others, and which have values."""

    @property
    def flat(self) -> Mapping[str, Any]: ...

    @property
    def scalars(self) -> Mapping[str, Any]: ...

    @property
    def present(self) -> frozenset[str]: ...


class OptimizerBinding:
    """Connects optimizers to buckets. ``prefer_fused``: use torch's fused kernels where a group does not say.

    ``variant`` tells the updates that hold now from others that the same optimizers can take; it is the same text on
    all ranks. ``shadow`` follows the optimizers from step to step.
    """

    def __init__(self, optimizers: Optimizers, layout: BucketLayout, device: torch.device, prefer_fused: bool) -> None:
        self.optimizers = optimizers
        self.layout = layout
        self._device = device
        self._members = _members(optimizers)
        self._places = optimizers.places()
        self._prefer_fused = prefer_fused
        self._programs: dict[int, UpdateProgram] = {}  # as the optimizer has its states, not as they are stored
        self._storing: dict[tuple[Hashable, torch.dtype], UpdateProgram] = {}
        self._own_dtypes: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        self._starts: dict[int, StandIn] = {}
        self.variant = ""
        self.shadow = ShadowOptimizers(optimizers)

    def place(self, bucket: Bucket) -> tuple[torch.optim.Optimizer, int]:
        """The optimizer that updates a bucket, and the index of its group there."""
        assert bucket.group is not None
        at, index = self._places[bucket.group]
        return self.optimizers.each[at], index

    def buckets_of(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[Bucket]:
        """The buckets of whose parameters an optimizer has the states; ``parameters`` by name.

        Parameters that no optimizer has are in buckets with those of the first (``histories_of``).
        """
        holders = self.optimizers.holders()
        return [
            bucket
            for bucket in self.layout.buckets
            if self.optimizers.each[holders.get(id(parameters[bucket.slots[0].source]), 0)] is optimizer
        ]

    def check_groups(self) -> None:
        """Refuse optimizers whose param groups are not those that they had at compile.

        Raises:
            UsageError: some were added, or have other parameters.
        """
        members = _members(self.optimizers)
        if members != self._members:
            differs = f"{len(members)}" if len(members) != len(self._members) else "other parameters in them"
            raise UsageError(
                f"expected the {len(self._members)} param groups that there were at compile, found {differs}: "
                f"call step.close() before add_param_group, or before parameters change groups, and compile again "
                f"after it"
            )

    def is_for(self, index: int, program: UpdateProgram) -> bool:
        """True if the update of a bucket is still ``program``, which is as the optimizer has its states."""
        return self._programs.get(index) is program

    @property
    def latest_programs(self) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, as it was traced last."""
        return self._cast_states(self._programs)

    def programs(
        self,
        states: Sequence[BucketStates] | None,
        held: Mapping[int, HeldState] = MappingProxyType({}),
        known: OptimizerBinding | None = None,
    ) -> dict[int, UpdateProgram]:
        """The update of each trained bucket, for the options and states that hold now.

        ``states`` by bucket. ``held``: before there are any, what the optimizer holds itself, as ``find_states``
        gives it. ``known``: the optimizer as it is now with other buckets; what starts as one of those is not traced
        again.

        Raises:
            OptimizerError: the update cannot run on flat shards.
        """
        stand_ins = self.stand_ins(states, held)
        traced = {} if known is None else {s.key: known._programs[index] for index, s in known._starts.items()}
        if known is not None and all(stand_in.key in traced for stand_in in stand_ins.values()):
            self.shadow = known.shadow
        else:
            traced = self.shadow.programs(distinct(stand_ins))
        self._programs = {index: traced[stand_in.key] for index, stand_in in stand_ins.items()}
        self._starts = stand_ins
        programs = self._cast_states(self._programs)
        texts = {id(program): program.text for program in programs.values()}
        whole = "\n".join(f"{index} {texts[id(program)]}" for index, program in sorted(programs.items()))
        places = {bucket.group: self.place(bucket) for bucket in self.layout.buckets if bucket.trainable}
        groups = [optimizer.param_groups[index] for optimizer, index in places.values()]
        flags = [", ".join(f"{name}={value}" for name, value in structural_flags(group)) for group in groups]
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        self.variant = f"{self.optimizers.name}({'; '.join(flags)}), traced as {digest}"
        return programs

    def _cast_states(self, programs: Mapping[int, UpdateProgram]) -> dict[int, UpdateProgram]:
        """``programs`` by bucket, with states as the buckets store them; the same object for the same of both."""
        stored: dict[int, UpdateProgram] = {}
        for index, program in programs.items():
            bucket = self.layout.buckets[index]
            stored[index] = program
            if bucket.state_dtype != bucket.dtype:
                key = (program.key, bucket.state_dtype)
                if key not in self._storing:
                    self._storing[key] = cast_states(program, bucket.state_dtype)
                stored[index] = self._storing[key]
        return stored

    def updates(self, *, ahead: bool) -> list[dict[int, UpdateProgram]]:
        """The update of each trained bucket in the coming step, as ``programs`` gave it, and others of later steps.

        ``ahead``: whether later ones are asked for, which are known for a dozen steps from the first.
        """
        if not ahead:
            return [self._cast_states(self._programs)]
        alike = {s.key: self.shadow.forms(s, self._programs[index]) for index, s in self._starts.items()}
        num_forms = max(map(len, alike.values()), default=1)
        return [
            self._cast_states({
                index: alike[s.key][min(number, len(alike[s.key]) - 1)] for index, s in self._starts.items()
            })
            for number in range(num_forms)
        ]  # fmt: skip

    def stand_ins(
        self, states: Sequence[BucketStates] | None, held: Mapping[int, HeldState] = MappingProxyType({})
    ) -> dict[int, StandIn]:
        """Stand-ins that the coming update of each trained bucket starts from; the same object where they are equal."""
        stand_ins: dict[int, StandIn] = {}
        alike: dict[Any, StandIn] = {}
        for bucket in self.layout.buckets:
            if not bucket.trainable:
                continue
            start = held.get(bucket.index) if states is None else states[bucket.index]
            if start is None:
                start = HeldState({}, {})
            fused = self._is_fused(bucket)
            # Buckets that were updated alike share the scalars that this has left.
            of_bucket = (
                bucket.group, bucket.dtype, bucket.state_dtype, start.present,
                tuple([(name, _dtype_of(value)) for name, value in start.flat.items()]),
                None if fused or not start.scalars else id(start.scalars),
            )  # fmt: skip
            if of_bucket not in alike:
                alike[of_bucket] = self._stand_in(bucket, start, fused=fused)
            stand_ins[bucket.index] = alike[of_bucket]
        return stand_ins

    def _stand_in(self, bucket: Bucket, start: BucketStates, *, fused: bool) -> StandIn:
        assert bucket.group is not None
        at, index = self._places[bucket.group]
        flat = {name: _dtype_of(value).to_real() for name, value in start.flat.items() if name in start.present}
        own = tuple((name, self._own_dtype(bucket, name, dtype)) for name, dtype in flat.items())
        scalars = {name: value for name, value in start.scalars.items() if name in start.present}
        singles = {name: value.dtype for name, value in scalars.items() if fused and isinstance(value, torch.Tensor)}
        others = tuple((name, value) for name, value in scalars.items() if name not in singles)
        return StandIn(index, bucket.dtype, own, others, tuple(singles.items()), fused, optimizer=at)

    def _own_dtype(self, bucket: Bucket, name: str, stored: torch.dtype) -> torch.dtype:
        """The optimizer's own dtype of a state that buckets store as ``stored``."""
        if stored == bucket.dtype:
            return stored
        assert bucket.group is not None
        key = (bucket.group, bucket.dtype)
        if key not in self._own_dtypes:
            self._own_dtypes[key] = flat_state_dtypes(
                *self.place(bucket), dtype=bucket.dtype, fused=self._is_fused(bucket)
            )
        return self._own_dtypes[key].get(name, bucket.optimizer_dtype(stored))

    def find_states(self, parameters: Mapping[str, torch.Tensor]) -> dict[int, HeldState]:
        """The states that the optimizers hold per parameter, by bucket; ``parameters`` by name. Changes nothing.

        Parameters that are not trained now may have some, from when they were.

        Raises:
            OptimizerError: parameters of one bucket have states that cannot be updated together.
        """
        states: dict[int, HeldState] = {}
        known: dict[Any, frozenset[str]] = {}
        each, holders = self.optimizers.each, self.optimizers.holders()
        for bucket in self.layout.buckets:
            mine = [parameters[slot.source] for slot in bucket.slots]
            entries = [each[holders.get(id(parameter), 0)].state.get(parameter, {}) for parameter in mine]
            if not any(entries):
                continue
            shapes = [tuple(parameter.shape) for parameter in mine]
            if not bucket.trainable:
                states[bucket.index] = collect_states(bucket, entries, shapes, _numbers_in(entries[0], shapes[0]))
                continue
            key = (bucket.group, bucket.dtype)
            if key not in known:
                known[key] = scalar_state_names(*self.place(bucket), dtype=bucket.dtype, fused=self._is_fused(bucket))
            states[bucket.index] = collect_states(bucket, entries, shapes, known[key])
        return states

    def _is_fused(self, bucket: Bucket) -> bool:
        optimizer, index = self.place(bucket)
        fused = optimizer.param_groups[index].get("fused")
        if fused is None and not self._prefer_fused:
            return False
        # Of states that live on the host, the update may run there.
        places = {self._device.type, "cpu"}
        return fused is not False and all(has_fused(optimizer, place, bucket.dtype) for place in places)


def _members(optimizers: Optimizers) -> list[tuple[int, list[int]]]:
    """The optimizer of each param group, and identities of its parameters."""
    groups = zip(optimizers.places(), optimizers.param_groups, strict=True)
    return [(at, list(map(id, group["params"]))) for (at, _), group in groups]


def distinct(stand_ins: Mapping[int, StandIn]) -> list[StandIn]:
    """One of the stand-ins that are updated alike."""
    return list({stand_in.key: stand_in for stand_in in stand_ins.values()}.values())


def _dtype_of(state: Any) -> torch.dtype:
    """That of a flat state: of a bucket's tensor, or of those that an optimizer holds of its parameters."""
    dtype: torch.dtype = (state[0] if isinstance(state, list) else state).dtype
    return dtype


def _numbers_in(entry: Mapping[str, Any], shape: tuple[int, ...]) -> frozenset[str]:
    """The names of what a parameter that is not trained now has as a number, not as a tensor of its shape."""
    return frozenset(
        name for name, value in entry.items() if not (isinstance(value, torch.Tensor) and tuple(value.shape) == shape)
    )
