"""The state between steps: flat parameters, master copies and optimizer states, and in which tiers they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.averages import AVERAGE_STATE, STEPS_STATE
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.ir.facts import DEVICE
from zerofx.ir.owners import OwnedSlot, Owners
from zerofx.ir.tensor_parts import named_buffers
from zerofx.optimizers import UpdateProgram
from zerofx.optimizers.program import WHOLE_STATES
from zerofx.optimizers.whole import OwnedSizes, owners_of, state_views
from zerofx.runtime.comm.collectives import send_to_owners, send_to_slices
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.weights import Weights
from zerofx.runtime.state.whole_buckets import WholeBuckets
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan


def do_nothing() -> None:
    """Bring nothing up: all is there."""


class TrainingState(WholeBuckets):
    """All buckets' tensors, taken over from a model."""

    def __init__(
        self, model: nn.Module, layout: BucketLayout, stage: int, communicators: Communicators, tiers: Tiers
    ) -> None:
        super().__init__(model, layout, stage, communicators, tiers)
        self._placed: Plan | None = None  # by which all buckets are where they are
        self.owners: Mapping[int, Owners] = {}  # of the buckets whose updates need whole parameters
        self._whole: Mapping[int, UpdateProgram] = {}  # the updates of those
        self.bring_up: Callable[[], None] = do_nothing  # before values are read: what gave its memory back has it
        self._is_stale = False  # whether updates may be under way whose results the device has not

    def take_over(self, weights: Weights, plan: Plan) -> None:
        """Move the model's parameters into flat buckets with the values of ``weights``, a bucket at a time.

        ``plan`` says where parameters, master copies and optimizer states live, as for ``place``.
        Where the step keeps whole parameters in their own dtype, the model's become views of them; elsewhere they are
        replaced by NaN of the same shape that takes no memory.
        """
        for bucket in self.layout.buckets:
            self.buckets.append(self._divide(bucket, weights.flat(bucket, *self._own_range(bucket))))
            if not self._place_bucket(plan, bucket, self.buckets[-1]):
                self._share(bucket, self.buckets[-1])
        weights.fill_buffers(self.model)
        for _, buffer in named_buffers(self.model):
            self.broadcast(buffer)
        self.hide_parameters()
        self.remember_attributes()

    def is_placed(self, plan: Plan) -> bool:
        """True if all buckets are where ``plan`` says."""
        return plan is self._placed

    def place(self, plan: Plan) -> bool:
        """Have parameters, master copies and optimizer states where ``plan`` says.

        Returns whether parameters have moved: the model then has to be shown them anew (``hide_parameters``).
        """
        if self.is_placed(plan):
            return False
        self._placed = None
        pairs = zip(self.layout.buckets, self.buckets, strict=True)
        if any(_planned_home(plan, bucket) != (state.tier, _home(state.decision)) for bucket, state in pairs):
            self.flush()
        moved = [
            self._place_bucket(plan, bucket, state)
            for bucket, state in zip(self.layout.buckets, self.buckets, strict=True)
        ]
        self._placed = plan
        return any(moved)

    def locations(self) -> tuple[Absence, ...]:
        """The parameters and states of buckets that are in slower tiers now."""
        pairs = list(zip(self.layout.buckets, self.buckets, strict=True))
        why = "as training has them"
        return (
            *(
                Absence(kind="parameters", bucket=bucket.index, tier=state.tier, reason=why)
                for bucket, state in pairs
                if state.tier != DEVICE
            ),
            *(
                Absence(kind="states", bucket=bucket.index, tier=d.tier, update=d.update, reason=why, delayed=d.delayed)
                for bucket, state in pairs
                if (d := state.decision) is not None
            ),
        )

    def count_delayed(self) -> None:
        """A step with delayed updates has run: parameters on the device lack the last update."""
        self._is_stale = any(state.delayed for state in self.buckets)

    def settle(self) -> None:
        """Block until the host is done with all delayed updates; parameters on the device stay as they are."""
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if state.delayed:
                self._tiers.settle_host(bucket.index)

    def flush(self) -> None:
        """Finish what runs on after the last step, and delayed updates: parameters on the device are up to date then.
        Collective at stages 1 and 2 where updates are delayed.

        Raises:
            TierError: an update on the host has failed.
        """
        self.bring_up()
        self._tiers.finish_updates()
        if not self._is_stale:
            return
        self.settle()
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if not state.delayed:
                continue
            source = state.delayed.get("low", state.stored)
            self._tiers.copy_into(state.low, source).finish(source)
            self.complete(bucket, state)
        self._is_stale = False

    def tensors_on_device(self) -> Iterator[torch.Tensor]:
        """The tensors of all buckets that are on the device, the model's parameters in them, and its buffers."""
        for state in self.buckets:
            values = (state.full, state.shard, state.part, state.master)
            yield from (v for v in values if isinstance(v, torch.Tensor) and v.device == self.device)
        yield from self.states_on_device()
        yield from self._tensors.values() if self.resident else ()
        yield from (buffer for _, buffer in named_buffers(self.model) if buffer.device == self.device)

    def states_on_device(self) -> Iterator[torch.Tensor]:
        """The optimizer's states that are on the device."""
        for state in self.buckets:
            values = (*state.flat.values(), *state.scalars.values())
            yield from (v for v in values if isinstance(v, torch.Tensor) and v.device == self.device)

    def share(self) -> None:
        """Put slices that are gathered where other ranks can read them, if they can. Collective."""
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            self._share(bucket, state)

    def _place_bucket(self, plan: Plan, bucket: Bucket, state: BucketState) -> bool:
        tier, _ = _planned_home(plan, bucket)
        decision = _state_decision(plan, bucket)
        moves, regroups = tier != state.tier, _home(decision) != _home(state.decision)
        was_delayed = bool(state.delayed)
        needs_master = bucket.has_master or (_home(decision)[1] == "host" and tier == DEVICE)
        state.decision = decision
        if needs_master != (state.master is not None) or (needs_master and regroups):
            state.master = self._put(state, self._fit_master(bucket, state)) if needs_master else None
        if moves:
            assert state.part is None, "a slice whose parts several ranks update stays on the device"
            low = self.load(state.low)
            state.full = state.shard = None
            if tier != DEVICE:
                state.shard = self._tiers.hold(low, tier)
            elif bucket.is_cut(self.stage):
                state.shard = low
                self._share(bucket, state)
            else:
                state.full = low
            state.tier = tier
        if regroups:
            for name in state.flat:
                state.flat[name] = self._put(state, self._fit_states(bucket, state, self.load(state.flat[name])))
            device = self._device_of_update(state)
            state.scalars = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in state.scalars.items()}
            state.delayed = {}
            if decision is not None and decision.delayed:
                self._make_delayed(bucket, state)
        return moves or was_delayed != bool(state.delayed)

    def _share(self, bucket: Bucket, state: BucketState) -> None:
        """Put a slice that is gathered from the device where other ranks can read it, if they can. Collective."""
        if bucket.is_gathered(self.stage) and isinstance(state.shard, torch.Tensor):
            state.shard = self._communicators.transport_along(bucket.gathered_over).share(state.shard)
            state.part = self._part(bucket, state.shard)

    def _make_delayed(self, bucket: Bucket, state: BucketState) -> None:
        low = state.low
        assert isinstance(low, torch.Tensor), "parameters whose updates are delayed are on the device"
        state.delayed["grad"] = self._tiers.empty_stored(low.numel(), bucket.reduce_dtype, "host")
        if bucket.has_master:
            state.delayed["low"] = self._tiers.hold(low, "host")

    def set_scalar(self, bucket: Bucket, name: str, value: Any) -> None:
        """Give a bucket the value of one scalar state: a number, or a tensor of one."""
        state = self.buckets[bucket.index]
        device = self._device_of_update(state)
        value = value.to(device) if isinstance(value, torch.Tensor) else value
        state.scalars = {**state.scalars, name: value}

    def set_flat(self, bucket: Bucket, name: str, values: torch.Tensor) -> None:
        """Give a bucket the values of one flat state, which are stored in the bucket's dtype for states.

        Those of a bucket that is not trained now wait on the host.
        """
        state, stored = self.buckets[bucket.index], values.to(bucket.storage_dtype(values.dtype))
        state.flat[name] = self._put(state, stored) if bucket.trainable else self._tiers.hold(stored, "host")

    def new_states(self, bucket: Bucket, program: UpdateProgram, device: torch.device) -> None:
        """Allocate the optimizer states of ``program`` that ``bucket`` does not have yet.

        Those that were loaded in another dtype than the program's take that.
        """
        state = self.buckets[bucket.index]
        shape = state.low.shape
        if program.whole:
            shape = torch.Size((self._sizes(bucket, state).state_bytes,))
            if program.states and WHOLE_STATES in state.flat and state.flat[WHOLE_STATES].shape != shape:
                del state.flat[WHOLE_STATES]
        for spec in program.states:
            if spec.name not in state.flat:
                initial = torch.full(shape, spec.initial, dtype=spec.dtype, device=device)
                state.flat[spec.name] = self._put(state, initial)
            elif state.flat[spec.name].dtype != spec.dtype:
                state.flat[spec.name] = self._put(state, self.load(state.flat[spec.name]).to(spec.dtype))
        state.scalars = program.new_tensor_scalars(self._device_of_update(state)) | state.scalars
        if program.whole and state.owned.waiting:
            stored = state.flat.get(WHOLE_STATES)
            buffer = None if stored is None else self.load(stored)
            owned = self.find_owned(bucket)
            here = {each.slot.name for each in owned}
            others = [slot for slot in bucket.slots if slot.name not in here]
            state.owned.settle(program, owned, buffer, others)
            if buffer is not None and buffer is not stored:
                state.flat[WHOLE_STATES] = self._put(state, buffer)

    def set_owners(self, programs: Mapping[int, UpdateProgram]) -> None:
        """Find the owners of parameters for the updates ``programs``, by bucket, and give them their masters.
        Collective where they have others."""
        self._whole = {index: program for index, program in programs.items() if program.whole}
        self.owners = owners_of(self.layout, programs, self.stage)
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            owners = self.owners.get(bucket.index)
            owners = owners if owners is not None and owners.are_apart and bucket.has_master else None
            if owners == state.master_owners:
                continue
            master = self.load_stored(bucket)
            state.master_owners = owners
            if owners is not None:
                transport = self._communicators.transport_along(bucket.states_over)
                owned = master.new_zeros(self._sizes(bucket, state).numel)
                master = send_to_owners(transport, owners, master, owned).finish(None)
            state.master = self._put(state, master)

    def _sizes(self, bucket: Bucket, state: BucketState) -> OwnedSizes:
        """Sizes of the part that this rank keeps of a bucket whose parameters have owners: in slower tiers as much as
        any of them does, as buffers for it are planned."""
        rank = self.rank_among_owners(bucket) if state.decision is None else None
        return OwnedSizes.of(bucket, self._whole[bucket.index], self.owners[bucket.index], rank)

    def _fit_master(self, bucket: Bucket, state: BucketState) -> torch.Tensor:
        master = self.load(state.stored)
        return master if state.master_owners is None else _fit(master, self._sizes(bucket, state).numel)

    def _fit_states(self, bucket: Bucket, state: BucketState, values: torch.Tensor) -> torch.Tensor:
        return _fit(values, self._sizes(bucket, state).state_bytes) if bucket.index in self.owners else values

    def settle_owned(self, bucket: Bucket) -> None:
        """Give loaded states of whole parameters their places, which they wait for until a step or a reader comes."""
        if self.buckets[bucket.index].present:
            self.new_states(bucket, self._whole[bucket.index], self.device)

    def load_owned_states(self, bucket: Bucket) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the states that this rank keeps of what it owns of a bucket, by parameter and path."""
        self.settle_owned(bucket)
        stored = self.buckets[bucket.index].flat.get(WHOLE_STATES)
        buffer = None if stored is None else self.load(stored)
        return state_views(self._whole[bucket.index], self.find_owned(bucket), buffer)

    def gather_owned(self, bucket: Bucket, states: torch.Tensor) -> list[torch.Tensor]:
        """The states that each owner has of a bucket, by rank among them. Collective."""
        sizes = OwnedSizes.of(bucket, self._whole[bucket.index], self.owners[bucket.index])
        whole = self.gather(bucket, _fit(states, sizes.state_bytes))
        return list(whole.chunk(len(self.owners[bucket.index].ranks)))

    def find_owned(self, bucket: Bucket) -> tuple[OwnedSlot, ...]:
        """The parameters that this rank owns of a bucket whose update needs whole ones."""
        return self.owners[bucket.index].ranks[self.rank_among_owners(bucket)]

    def rank_among_owners(self, bucket: Bucket) -> int:
        """This rank's number among the owners of a bucket's parameters."""
        return bucket.mesh.index(self._rank, bucket.states_over) if len(self.owners[bucket.index].ranks) > 1 else 0

    def has_averages(self, after: int) -> bool:
        """True if all trained parameters that this rank updates have averages, of steps ``after`` so many."""
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if not bucket.trainable:
                continue
            if bucket.index in self.owners:
                self.settle_owned(bucket)
            entries = state.owned.trees.values() if bucket.index in self.owners else (state.scalars,)
            if not state.present or any(entry.get(STEPS_STATE, 0) <= after for entry in entries):
                return False
        return True

    def swap_averages(self) -> None:
        """Give trained parameters the values of their averages, and averages those of parameters; done twice, all is
        as it was. Collective."""
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if not bucket.trainable:
                continue
            if bucket.index in self.owners:
                self._swap_owned_averages(bucket, state)
                continue
            average, parameters = state.flat[AVERAGE_STATE], self.load_stored(bucket).clone()
            self.write_bucket(bucket, self.gather(bucket, self.load(average)))
            if isinstance(average, torch.Tensor):
                average.copy_(parameters)
            else:
                self.set_flat(bucket, AVERAGE_STATE, parameters)

    def _swap_owned_averages(self, bucket: Bucket, state: BucketState) -> None:
        """The same where averages are with the other states of whole parameters, at their owners."""
        owners, stored = self.owners[bucket.index], state.flat[WHOLE_STATES]
        buffer, parameters = self.load(stored), self.gather(bucket, self.load_stored(bucket))
        views = state_views(self._whole[bucket.index], self.find_owned(bucket), buffer)
        averages = parameters.new_zeros(owners.numels[self.rank_among_owners(bucket)])
        for each in self.find_owned(bucket):
            average, place = views[each.slot.name][AVERAGE_STATE], replace(each.slot, offset=each.offset)
            place.box_view(place.view(averages)).copy_(place.box(average))
            average.copy_(self.to_parameter(each.slot, parameters))
        if owners.are_apart:
            shard, transport = (
                averages.new_empty(bucket.part_numel),
                self._communicators.transport_along(bucket.states_over),
            )
            averages = self.gather(bucket, send_to_slices(transport, owners, averages, shard).finish(None))
        self.write_bucket(bucket, averages)
        if buffer is not stored:
            state.flat[WHOLE_STATES] = self._put(state, buffer)

    def _device_of_update(self, state: BucketState) -> torch.device:
        """The device on which a bucket's update finds its scalar states."""
        return torch.device("cpu") if _home(state.decision)[1] == "host" else self.device

    def _divide(self, bucket: Bucket, values: torch.Tensor) -> BucketState:
        """A bucket's tensors from the stored values that this rank keeps (``_own_range``), which become its own."""
        low = values.to(bucket.compute_dtype)
        keeps_full, is_cut = not bucket.is_gathered(self.stage), bucket.is_cut(self.stage)
        full = low if keeps_full else None
        shard = None if keeps_full else low
        if keeps_full and is_cut and bucket.num_ranks > 1:
            first = bucket.first_of_slice(self._rank)
            shard = low[first : first + bucket.shard_numel]
        part = self._part(bucket, low if shard is None else shard) if is_cut else None
        master = None
        if bucket.has_master:
            master = values
            if keeps_full and is_cut:
                master = self.slice(bucket, values).clone()
            elif part is not None:
                own = self._part(bucket, values)
                assert own is not None
                master = own.clone()
        return BucketState(full, shard, master, part=part)

    def _part(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor | None:
        """The part of a slice that this rank updates, a view; None if it updates all of it."""
        if bucket.num_parts == 1:
            return None
        first = bucket.first_of_part(self._rank) - bucket.first_of_slice(self._rank)
        return shard[first : first + bucket.part_numel]


def _fit(values: torch.Tensor, numel: int) -> torch.Tensor:
    """Flat ``values`` in a tensor of ``numel`` elements, of which those beyond both are of no parameter."""
    if values.numel() == numel:
        return values
    fitting = values.new_zeros(numel)
    common = min(numel, values.numel())
    fitting[:common] = values[:common]
    return fitting


def _home(decision: Absence | None) -> tuple[str, str, bool]:
    """The tier of a bucket's states, where its update runs, and whether that is delayed."""
    return ("device", "device", False) if decision is None else (decision.tier, decision.update, decision.delayed)


def _state_decision(plan: Plan, bucket: Bucket) -> Absence | None:
    return next((d for d in plan.states if d.bucket == bucket.index and bucket.trainable), None)


def _planned_home(plan: Plan, bucket: Bucket) -> tuple[Tier, tuple[str, str, bool]]:
    """The tier of a bucket's parameters, and the home of its states."""
    tier = next((d.tier for d in plan.parameters if d.bucket == bucket.index), DEVICE)
    return tier, _home(_state_decision(plan, bucket))


def process_group() -> dist.ProcessGroup | None:
    """The default process group, or None when this process is a world of its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None
