"""The update of each bucket by the optimizer that has it, for the options and states that hold now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from zerofx.averages import STEPS_STATE
from zerofx.errors import OptimizerError, UsageError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.optimizers.blame import NotElementwiseError
from zerofx.optimizers.held_states import HeldState, collect_states
from zerofx.optimizers.nested import NestedOptimizer
from zerofx.optimizers.program import UpdateProgram, cast_states
from zerofx.optimizers.several import Optimizers, ShadowOptimizers
from zerofx.optimizers.shadow import structural_flags
from zerofx.optimizers.shadow_optimizer import flat_state_dtypes, scalar_state_names
from zerofx.optimizers.stand_in import StandIn
from zerofx.optimizers.support import has_fused
from zerofx.optimizers.whole import WholeOptimizer
from zerofx.optimizers.whole.states import split_tensors


class BucketStates(Protocol):
    """Optimizer states of a bucket: flat ones, with their dtypes, others, and which have values; ``entries``: of
    parameters that are updated whole, what has no place yet."""

    @property
    def flat(self) -> Mapping[str, Any]: ...

    @property
    def scalars(self) -> Mapping[str, Any]: ...

    @property
    def present(self) -> frozenset[str]: ...

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]: ...


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
        self._storing: dict[tuple[str, torch.dtype], UpdateProgram] = {}
        self._own_dtypes: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        self._starts: dict[int, StandIn] = {}
        self.variant = ""
        self.shadow = ShadowOptimizers(optimizers)
        self.whole: dict[int, WholeOptimizer] = {}  # those whose updates need whole parameters, by their index
        self._elementwise: set[int] = set()  # of those with states: tried from their first step on

    def place(self, bucket: Bucket) -> tuple[torch.optim.Optimizer, int]:
        """The optimizer whose step updates a bucket, and the index of its group there."""
        at, index = self.place_index(bucket)
        return self.optimizers.steppers[at], index

    def place_index(self, bucket: Bucket) -> tuple[int, int]:
        """The index of the optimizer that updates a bucket, and that of its group there."""
        assert bucket.group is not None
        return self._places[bucket.group]

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
        if known is not None:
            self.whole, self.shadow = known.whole, known.shadow
        stand_ins = self.stand_ins(states, held)
        traced = {} if known is None else {s.key: known._programs[index] for index, s in known._starts.items()}
        if known is None or any(stand_in.key not in traced for stand_in in stand_ins.values()):
            traced = self._trace(stand_ins)
            stand_ins = {i: s for i, s in stand_ins.items() if s.optimizer not in self.whole}
        self._programs = {index: traced[stand_in.key] for index, stand_in in stand_ins.items()}
        self._starts = stand_ins
        for at, whole in self.whole.items():
            mine = [(b, self.place_index(b)[1]) for b in self._trained() if self.place_index(b)[0] == at]
            starts = held.values() if states is None else states
            entries = {name: entry for start in starts for name, entry in start.entries.items()}
            self._programs |= whole.programs(mine, entries)
        return self._name_variant(self._cast_states(self._programs))

    def _trace(self, stand_ins: Mapping[int, StandIn]) -> dict[Any, UpdateProgram]:
        """The programs of stand-ins by their keys; optimizers that have none are run on whole parameters."""
        traced: dict[Any, UpdateProgram] = {}
        for at in range(len(self.optimizers.each)):
            if at in self.whole:
                continue
            mine = [stand_in for stand_in in distinct(stand_ins) if stand_in.optimizer == at]
            try:
                traced |= self.shadow.programs(at, mine)
            except NotElementwiseError as error:
                self._run_whole(at, error)
        return traced

    def _run_whole(self, at: int, because: OptimizerError) -> None:
        self.whole[at] = WholeOptimizer(self.optimizers.steppers[at], because, at)
        self.shadow.leave_out(at)

    def _trained(self) -> list[Bucket]:
        """The trained buckets."""
        return [bucket for bucket in self.layout.buckets if bucket.trainable]

    @property
    def whole_groups(self) -> dict[int, WholeOptimizer]:
        """Optimizers whose updates need whole parameters, by the indices of their param groups."""
        return {group: self.whole[at] for group, (at, _) in enumerate(self._places) if at in self.whole}

    def find_whole(self, optimizer: torch.optim.Optimizer) -> WholeOptimizer | None:
        """``optimizer`` as it runs on whole parameters, if it does."""
        return next((whole for at, whole in self.whole.items() if self.optimizers.each[at] is optimizer), None)

    def _name_variant(self, programs: dict[int, UpdateProgram]) -> dict[int, UpdateProgram]:
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
                key = (program.text, bucket.state_dtype)
                if key not in self._storing:
                    self._storing[key] = cast_states(program, bucket.state_dtype)
                stored[index] = self._storing[key]
        return stored

    def updates(self, *, ahead: bool) -> list[dict[int, UpdateProgram]]:
        """The update of each trained bucket in the coming step, as ``programs`` gave it, and others of later steps.

        ``ahead``: whether later ones are asked for, which are known for a dozen steps from the first.
        """
        if not ahead:
            return [self.latest_programs]
        alike = {s.key: self.shadow.forms(s, self._programs[index]) for index, s in self._starts.items()}
        num_forms = max(map(len, alike.values()), default=1)
        whole = {index: program for index, program in self._programs.items() if program.whole}
        return [
            self._cast_states(whole | {
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
        for bucket in self._trained():
            if self.place_index(bucket)[0] in self.whole:
                continue
            start = held.get(bucket.index) if states is None else states[bucket.index]
            if start is None:
                start = HeldState({}, {})
            fused = self._is_fused(bucket)
            # Buckets that were updated alike share the scalars that this has left.
            of_bucket = (
                bucket.group, bucket.dtype, bucket.state_dtype, start.present,
                tuple([(name, _dtype_of(value)) for name, value in start.flat.items()]),
                start.scalars.get(STEPS_STATE) if fused or not start.scalars else id(start.scalars),
            )  # fmt: skip
            if of_bucket not in alike:
                alike[of_bucket] = self._stand_in(bucket, start, fused=fused)
            stand_ins[bucket.index] = alike[of_bucket]
        return stand_ins

    def _stand_in(self, bucket: Bucket, start: BucketStates, *, fused: bool) -> StandIn:
        at, index = self.place_index(bucket)
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
            mine = {slot.source: parameters[slot.source] for slot in bucket.slots}
            entries = {name: each[holders.get(id(p), 0)].state.get(p, {}) for name, p in mine.items()}
            if not any(entries.values()):
                continue
            shapes = {name: tuple(parameter.shape) for name, parameter in mine.items()}
            if not bucket.trainable:
                first = bucket.slots[0].source
                numbers = _numbers_in(entries[first], shapes[first])
                states[bucket.index] = collect_states(bucket, entries, shapes, numbers)
                continue
            states[bucket.index] = self._collect(bucket, entries, shapes, known)
        return states

    def _collect(
        self,
        bucket: Bucket,
        entries: Mapping[str, Mapping[str, Any]],
        shapes: Mapping[str, tuple[int, ...]],
        known: dict[Any, frozenset[str]],
    ) -> HeldState:
        """The states of a trained bucket: flat, or as they are where its update needs whole parameters."""
        at, _ = self.place_index(bucket)
        if at not in self.whole and at not in self._elementwise:
            self._elementwise.add(at)
            if (obstacle := self._find_obstacle(at)) is not None:
                self._run_whole(at, obstacle)
        if at in self.whole:
            return HeldState({}, {}, dict(entries))
        key = (bucket.group, bucket.dtype)
        if key not in known:
            known[key] = scalar_state_names(*self.place(bucket), dtype=bucket.dtype, fused=self._is_fused(bucket))
        return collect_states(bucket, entries, shapes, known[key])

    def _find_obstacle(self, at: int) -> OptimizerError | None:
        """The error for an optimizer's update on flat shards where it begins without states; None if it runs there.

        An update that needs whole parameters in its first step alone is one of whole parameters in all: what is saved
        has one form, whenever that is.
        """
        own = {(self.place_index(b), b.dtype) for b in self._trained()}
        stand_ins = [StandIn(index, dtype, optimizer=at) for (of, index), dtype in own if of == at]
        try:
            # A shadow of its own: steps from no states are no forms of the updates to come, which plans count.
            ShadowOptimizers(self.optimizers).programs(at, stand_ins)
        except NotElementwiseError as error:
            whole = WholeOptimizer(self.optimizers.steppers[at], error, at)
            if whole.runs_without_states() or not self._has_flat_states(at):
                return error
            return None  # it reads what earlier steps have made
        except OptimizerError:  # it steps only where there are states already
            return None
        return None

    def _has_flat_states(self, at: int) -> bool:
        """True if an optimizer by itself has states, each of its parameter's shape or without dimensions."""
        optimizer = self.optimizers.each[at]
        entries = [(p, split_tensors(entry)[1]) for p, entry in optimizer.state.items() if isinstance(p, torch.Tensor)]
        is_flat = all(tensor.shape == p.shape for p, tensors in entries for tensor in tensors.values())
        return bool(entries) and is_flat and not isinstance(optimizer, NestedOptimizer)

    def _is_fused(self, bucket: Bucket) -> bool:
        at, index = self.place_index(bucket)
        optimizer = self.optimizers.each[at]
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
