"""The state between steps: flat parameters, master copies, optimizer states; and giving them back to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.facts import DEVICE
from zerofx.ir.parameters import Strides
from zerofx.optimizers import UpdateProgram
from zerofx.runtime.comm.communicators import Communicators
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.weights import Weights, whole_bucket
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.decisions import ParameterDecision, StateDecision
from zerofx.scheduler.plan.locations import Locations
from zerofx.scheduler.plan.mesh import AXES, MODEL, Axes
from zerofx.scheduler.plan.plan import Plan


class TrainingState:
    """All buckets' tensors, taken over from a model."""

    def __init__(
        self, model: nn.Module, layout: BucketLayout, stage: int, communicators: Communicators, tiers: Tiers
    ) -> None:
        self.layout = layout.of_rank(communicators.world.rank if communicators.world is not None else 0)
        self.stage = stage
        self.model = model
        self.device = tiers.device
        self._communicators = communicators
        self._transport = communicators.world
        self._tiers = tiers
        self._tensors = dict(model.named_parameters())
        self.buckets: list[BucketState] = []
        self._is_stale = False  # whether updates may be under way whose results the device has not

    @property
    def sharded(self) -> bool:
        """Whether other ranks update parts of what this one does not."""
        return any(bucket.is_cut(self.stage) for bucket in self.layout.buckets)

    @property
    def resident(self) -> bool:
        """Whether the model's parameters are whole, in their own dtype, on the device."""
        on_device = all(state.tier == DEVICE and not state.delayed for state in self.buckets)
        in_place = on_device and not self.layout.has_slices and not self.layout.has_model_parts
        are_whole = not any(bucket.is_gathered(self.stage) for bucket in self.layout.buckets)
        return are_whole and in_place and not any(bucket.has_master for bucket in self.layout.buckets)

    def take_over(self, weights: Weights, plan: Plan) -> None:
        """Move the model's parameters into flat buckets with the values of ``weights``, a bucket at a time.

        ``plan`` says where parameters, master copies and optimizer states live, as for ``place``.
        Where the step keeps whole parameters in their own dtype, the model's become views of them; elsewhere they are
        replaced by NaN of the same shape that takes no memory.
        """
        for buffer in self.model.buffers():
            self.broadcast(buffer)
        for bucket in self.layout.buckets:
            self.buckets.append(self._divide(bucket, weights.flat(bucket, *self._kept(bucket))))
            if not self._place_bucket(plan, bucket, self.buckets[-1]):
                self._share(bucket, self.buckets[-1])
        self.hide_parameters()

    def number_along(self, axis: str) -> int:
        """This rank's number on an axis of the mesh."""
        (known,) = (known for known in AXES if known == axis)
        return self.layout.mesh.place(self._rank, known)

    def place(self, plan: Plan) -> bool:
        """Have parameters, master copies and optimizer states where ``plan`` says.

        Returns whether parameters have moved: the model then has to be shown them anew (``hide_parameters``).
        """
        if any(self._is_elsewhere(plan, *pair) for pair in zip(self.layout.buckets, self.buckets, strict=True)):
            self.flush()
        moved = [
            self._place_bucket(plan, bucket, state)
            for bucket, state in zip(self.layout.buckets, self.buckets, strict=True)
        ]
        return any(moved)

    def locations(self) -> Locations:
        """What is in slower tiers now."""
        pairs = list(zip(self.layout.buckets, self.buckets, strict=True))
        why = "as training has them"
        return Locations(
            tuple(ParameterDecision(bucket.index, state.tier, why) for bucket, state in pairs if state.tier != DEVICE),
            tuple(
                StateDecision(bucket.index, d.tier, d.update, why, delayed=d.delayed)
                for bucket, state in pairs
                if (d := state.decision) is not None
            ),
        )

    def _is_elsewhere(self, plan: Plan, bucket: Bucket, state: BucketState) -> bool:
        return _planned(plan, bucket) != (state.tier, _home(state.decision))

    def count_delayed(self) -> None:
        """A step with delayed updates has run: parameters on the device lack the last update."""
        self._is_stale = any(state.delayed for state in self.buckets)

    def settle(self) -> None:
        """Block until the host is done with all delayed updates; parameters on the device stay as they are."""
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if state.delayed:
                self._tiers.settle_host(bucket.index)

    def flush(self) -> None:
        """Finish delayed updates, and bring the parameters on the device up to date. Collective at stages 1 and 2."""
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

    def complete(self, bucket: Bucket, state: BucketState) -> None:
        """Bring what a bucket has on the device besides what this rank updates up to date. Collective."""
        if not bucket.is_cut(self.stage):
            return
        if state.part is not None:
            self._gather_into(state.shard if state.shard is not None else state.full, state.part, bucket.parts_over)
        if state.full is not None and state.shard is not None:
            self._gather_into(state.full, state.shard, bucket.gathered_over)

    def _gather_into(self, full: torch.Tensor | Stored | None, own: torch.Tensor | Stored, axes: Axes) -> torch.Tensor:
        assert isinstance(full, torch.Tensor) and isinstance(own, torch.Tensor), "what is gathered is on the device"
        return self._communicators.along(axes).all_gather_into(full, own).finish(None)

    def _place_bucket(self, plan: Plan, bucket: Bucket, state: BucketState) -> bool:
        tier, _ = _planned(plan, bucket)
        decision = _state_decision(plan, bucket)
        moves, regroups = tier != state.tier, _home(decision) != _home(state.decision)
        was_delayed = bool(state.delayed)
        needs_master = bucket.has_master or (_home(decision)[1] == "host" and tier == DEVICE)
        state.decision = decision
        if needs_master != (state.master is not None) or (needs_master and regroups):
            state.master = self._put(state, self.load(state.stored)) if needs_master else None
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
                state.flat[name] = self._put(state, self.load(state.flat[name]))
            device = self._device_of_update(state)
            state.scalars = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in state.scalars.items()}
            state.delayed = {}
            if decision is not None and decision.delayed:
                self._make_delayed(bucket, state)
        return moves or was_delayed != bool(state.delayed)

    def _share(self, bucket: Bucket, state: BucketState) -> None:
        """Put a slice that is gathered from the device where other ranks can read it, if they can. Collective."""
        if bucket.is_gathered(self.stage) and isinstance(state.shard, torch.Tensor):
            state.shard = self._communicators.along(bucket.gathered_over).share(state.shard)
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
        state.scalars[name] = value.to(device) if isinstance(value, torch.Tensor) else value

    def set_flat(self, bucket: Bucket, name: str, values: torch.Tensor) -> None:
        """Give a bucket the values of one flat state, which are stored in the bucket's dtype for states.

        Those of a bucket that is not trained now wait on the host.
        """
        state, stored = self.buckets[bucket.index], values.to(bucket.stored_as(values.dtype))
        state.flat[name] = self._put(state, stored) if bucket.trainable else self._tiers.hold(stored, "host")

    def load(self, stored: torch.Tensor | Stored) -> torch.Tensor:
        """A tensor that is on the device, or a copy there of one that is not."""
        return stored if isinstance(stored, torch.Tensor) else self._tiers.load(stored)

    def _put(self, state: BucketState, value: torch.Tensor) -> torch.Tensor | Stored:
        return value if state.decision is None else self._tiers.hold(value, state.decision.tier)

    def new_states(self, bucket: Bucket, program: UpdateProgram, device: torch.device) -> None:
        """Allocate the optimizer states of ``program`` that ``bucket`` does not have yet.

        Those that were loaded in another dtype than the program's take that.
        """
        state = self.buckets[bucket.index]
        for spec in program.states:
            if spec.name not in state.flat:
                initial = torch.full(state.low.shape, spec.initial, dtype=spec.dtype, device=device)
                state.flat[spec.name] = self._put(state, initial)
            elif state.flat[spec.name].dtype != spec.dtype:
                state.flat[spec.name] = self._put(state, self.load(state.flat[spec.name]).to(spec.dtype))
        for name, scalar in program.new_scalar_states(self._device_of_update(state)).items():
            state.scalars.setdefault(name, scalar)
        state.present |= program.state_before

    def _device_of_update(self, state: BucketState) -> torch.device:
        """Where a bucket's update finds its scalar states."""
        return torch.device("cpu") if _home(state.decision)[1] == "host" else self.device

    def hide_parameters(self) -> None:
        """Show the model its parameters where they are whole, or NaN where they are not."""
        resident = self.resident
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            for slot in bucket.slots:
                if resident:
                    assert state.full is not None
                    self._tensors[slot.source].data = slot.shown(state.full)
                else:
                    tensor = self._tensors[slot.source]
                    nothing = torch.full((), float("nan"), dtype=tensor.dtype, device=self.device)
                    tensor.data = nothing.expand(tensor.shape)

    def strides(self) -> Strides:
        """Those of the parameters as a step reads them: NaN that takes no memory has others."""
        return {id(self._tensors[slot.source]): slot.shown_stride for _, _, slot in self.slots()}

    def show_parameters(self) -> None:
        """Give the model its whole parameters, gathered from all ranks, in their own dtype."""
        for bucket in self.layout.buckets:
            stored = self.buckets[bucket.index].stored
            whole = self.gather(bucket, self.load(stored))
            if whole is stored and not self.resident:
                # What is shown is a copy there too: changes that are not written back are dropped everywhere.
                whole = whole.clone()
            for slot in bucket.slots:
                tensor = self._tensors[slot.source]
                if slot.whole is None:
                    tensor.data = self.shown(slot, whole)
                    continue
                if slot.first_row == 0:
                    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                slot.box(tensor.data).copy_(slot.view(whole))

    def write_back(self) -> None:
        """Take the model's whole parameters as the values to train on from (rank by rank its own slice)."""
        for bucket in self.layout.buckets:
            self.write_bucket(bucket, whole_bucket(bucket, self._tensors, self.device))

    def write_bucket(self, bucket: Bucket, whole: torch.Tensor) -> None:
        """Take a flat tensor ``[bucket.numel]`` as the values of a bucket to train on from."""
        state, mine = self.buckets[bucket.index], self.slice(bucket, whole)
        if isinstance(state.master, Stored):
            state.master = self._put(state, mine.clone())
        elif state.master is not None:
            state.master.copy_(mine)
        if isinstance(state.low, Stored):
            state.shard = self._tiers.hold(mine.to(bucket.compute_dtype), state.tier)
        else:
            state.low.copy_(mine)
        if state.full is not None and state.full is not state.low:
            state.full.copy_(whole)
        if state.full is None and state.part is not None:
            assert isinstance(state.shard, torch.Tensor)
            first, last = self._kept(bucket)
            state.shard.copy_(whole[first:last])
        if "low" in state.delayed:
            state.delayed["low"] = self._tiers.hold(mine.to(bucket.compute_dtype), "host")

    def gather(self, bucket: Bucket, stored: torch.Tensor) -> torch.Tensor:
        """A flat tensor ``[bucket.numel]`` from what every rank updates; the tensor itself where all hold it whole."""
        if bucket.is_cut(self.stage):
            for axes in (bucket.parts_over, bucket.gathered_over):
                size = bucket.mesh.size(axes)
                if size > 1:
                    stored = self._gather_into(stored.new_empty(stored.numel() * size), stored, axes)
        return stored

    def shown(self, slot: Slot, full: torch.Tensor) -> torch.Tensor:
        """A parameter, or a state of it, of the model's shape, from the flat tensor ``[bucket.numel]`` that it lies in.

        Collective for one that lies in parts on the model axis; else a view.
        """
        if slot.part is None:
            return slot.shown(full)
        own = slot.view(full).reshape(-1)
        parts = self._gather_into(own.new_empty(slot.num_parts * own.numel()), own, MODEL)
        whole = own.new_empty(slot.whole_shape)
        for index, part in enumerate(parts.view(slot.num_parts, *slot.shape)):
            place = replace(slot, part_index=index)
            place.box(whole).copy_(place.boxed(part))
        return torch.view_as_complex(whole) if slot.is_complex else whole

    def slice(self, bucket: Bucket, whole: torch.Tensor) -> torch.Tensor:
        """What this rank updates of a flat tensor ``[bucket.numel]``; a view, or all of it where all hold it whole."""
        if not bucket.is_cut(self.stage):
            return whole
        first = bucket.first_of_part(self._rank)
        return whole[first : first + bucket.part_numel]

    @property
    def _rank(self) -> int:
        return self._transport.rank if self._transport is not None else 0

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The model's distinct parameters by name, as they are now (whole, or without values)."""
        return self._tensors

    def parameter(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def slots(self) -> Iterator[tuple[Bucket, BucketState, Slot]]:
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            for slot in bucket.slots:
                yield bucket, state, slot

    def _kept(self, bucket: Bucket) -> tuple[int, int]:
        """The first element that this rank keeps of a bucket's flat buffer, and the one after the last."""
        if not bucket.is_gathered(self.stage):
            return 0, bucket.numel
        first = bucket.first_of_slice(self._rank)
        return first, first + bucket.shard_numel

    def _divide(self, bucket: Bucket, values: torch.Tensor) -> BucketState:
        """A bucket's tensors from the stored values that this rank keeps (``_kept``), which become its own."""
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
        """What this rank updates of a slice, a view; None where that is all of it."""
        if bucket.num_parts == 1:
            return None
        first = bucket.first_of_part(self._rank) - bucket.first_of_slice(self._rank)
        return shard[first : first + bucket.part_numel]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give a tensor rank 0's values on all ranks. Collective."""
        if self._transport is not None and tensor.numel():
            self._transport.broadcast([tensor])


def _home(decision: StateDecision | None) -> tuple[str, str, bool]:
    """The tier of a bucket's states, where its update runs, and whether that is delayed."""
    return ("device", "device", False) if decision is None else (decision.tier, decision.update, decision.delayed)


def _state_decision(plan: Plan, bucket: Bucket) -> StateDecision | None:
    return next((d for d in plan.states if d.bucket == bucket.index and bucket.trainable), None)


def _planned(plan: Plan, bucket: Bucket) -> tuple[str, tuple[str, str, bool]]:
    """The tier of a bucket's parameters, and the home of its states."""
    tier = next((d.tier for d in plan.parameters if d.bucket == bucket.index), DEVICE)
    return tier, _home(_state_decision(plan, bucket))


def process_group() -> dist.ProcessGroup | None:
    """The default process group, or None when this process is a world of its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None
