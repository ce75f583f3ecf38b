"""The state between steps: flat parameters, master copies, optimizer states; and giving them back to the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.facts import DEVICE, Role
from zerofx.ir.graph import Strides
from zerofx.optimizers import UpdateProgram
from zerofx.runtime.comm.transport import Transport
from zerofx.runtime.state.weights import Weights, whole_bucket
from zerofx.runtime.tiers.tiers import Stored, Tiers
from zerofx.scheduler.plan.decisions import StateDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.torch_private.tensors import version_of


@dataclass
class BucketState:
    """One bucket's tensors on this rank.

    ``full`` ([numel], compute dtype) stays on the device at stages 0 to 2. ``shard`` ([shard_numel], compute dtype) is
    this rank's slice, at stages 1 and 2 a view of ``full``; ``tier`` is where it lives. ``master`` holds the stored
    values where their dtype is another, or where the update runs on the host and ``shard`` is not in a slower tier.
    ``flat`` and ``scalars`` are the optimizer's states; ``present`` names those that have their values. ``decision``
    says in which tier ``master`` and ``flat`` are; None is the device. ``delayed`` is what a delayed update hands over
    from one step to the next, by the names that ``Role.DELAYED`` has.
    """

    full: torch.Tensor | None
    shard: torch.Tensor | Stored | None
    master: torch.Tensor | Stored | None
    tier: str = DEVICE
    decision: StateDecision | None = None
    flat: dict[str, torch.Tensor | Stored] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    delayed: dict[str, Stored] = field(default_factory=dict)

    def forget(self) -> None:
        """Let go of the optimizer's states, which then begin as they did before the first step."""
        self.flat.clear()
        self.scalars.clear()
        self.present = frozenset()

    @property
    def low(self) -> torch.Tensor | Stored:
        """What the model computes with, in the compute dtype: this rank's slice, or the whole bucket at stage 0."""
        values = self.shard if self.shard is not None else self.full
        assert values is not None
        return values

    @property
    def stored(self) -> torch.Tensor | Stored:
        """The values that the optimizer updates: this rank's slice, or the whole bucket at stage 0."""
        return self.master if self.master is not None else self.low

    @property
    def version(self) -> int:
        """Another number than before if the bucket has been updated since, or its delayed update has been started."""
        if self.delayed:
            assert isinstance(self.stored, Stored)
            return self.stored.num_writes
        if isinstance(self.stored, torch.Tensor):
            return version_of(self.stored)
        return version_of(self.low) if isinstance(self.low, torch.Tensor) else self.low.version

    def value(self, role: Role, name: str) -> Any:
        """What a placeholder of ``role`` stands for; ``name`` is that of a state."""
        match role:
            case Role.FULL:
                return self.full
            case Role.SHARD:
                return self.shard
            case Role.MASTER:
                return self.master
            case Role.STATE:
                return self.flat[name]
            case Role.DELAYED:
                return self.delayed[name]
            case Role.SCALAR_STATE:
                return self.scalars[name]
            case _:
                raise AssertionError(f"a bucket has no {role}")


class TrainingState:
    """All buckets' tensors, taken over from a model."""

    def __init__(
        self, model: nn.Module, layout: BucketLayout, stage: int, transport: Transport | None, tiers: Tiers
    ) -> None:
        self.layout = layout
        self.stage = stage
        self.model = model
        self.device = tiers.device
        self._transport = transport
        self._tiers = tiers
        self._tensors = _distinct_parameters(model)
        self.buckets: list[BucketState] = []
        self._is_stale = False  # whether updates may be under way whose results the device has not

    @property
    def sharded(self) -> bool:
        """Whether a rank updates a slice of each bucket."""
        return self.stage >= 1 and self.layout.num_ranks > 1

    @property
    def resident(self) -> bool:
        """Whether the model's parameters are whole, in their own dtype, on the device."""
        on_device = all(state.tier == DEVICE and not state.delayed for state in self.buckets)
        in_place = on_device and not self.layout.has_slices
        return self._keeps_full and in_place and not any(bucket.has_master for bucket in self.layout.buckets)

    def take_over(self, weights: Weights, plan: Plan) -> None:
        """Move the model's parameters into flat buckets with the values of ``weights``, a bucket at a time.

        ``plan`` says where parameters, master copies and optimizer states live, as for ``place``.
        Where the step keeps whole parameters in their own dtype, the model's become views of them; elsewhere they are
        replaced by NaN of the same shape that takes no memory.
        """
        for buffer in self.model.buffers():
            self._broadcast(buffer)
        for bucket in self.layout.buckets:
            self.buckets.append(self._divide(bucket, weights.flat(bucket, *self._kept(bucket))))
            if not self._place_bucket(plan, bucket, self.buckets[-1]):
                self._share(self.buckets[-1])
        self.hide_parameters()

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
        for state in self.buckets:
            if not state.delayed:
                continue
            source = state.delayed.get("low", state.stored)
            self._tiers.copy_into(state.low, source).finish(source)
            self.complete(state)
        self._is_stale = False

    def complete(self, state: BucketState) -> None:
        """Bring what a bucket has whole on the device up to date with all ranks' slices. Collective at stages 1, 2."""
        if self.sharded and state.full is not None:
            assert self._transport is not None and isinstance(state.low, torch.Tensor)
            self._transport.all_gather_into(state.full, state.low).finish(None)

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
            low = self.load(state.low)
            state.full = state.shard = None
            if tier != DEVICE:
                state.shard = self._tiers.hold(low, tier)
            elif self.sharded:
                state.shard = low
                self._share(state)
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

    def _share(self, state: BucketState) -> None:
        """Put a slice that is gathered from the device where other ranks can read it, if they can. Collective."""
        if self._transport is not None and not self._keeps_full and isinstance(state.shard, torch.Tensor):
            state.shard = self._transport.share(state.shard)

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
        """Give a bucket the values of one flat state, which are stored in the bucket's dtype for states."""
        state = self.buckets[bucket.index]
        state.flat[name] = self._put(state, values.to(bucket.stored_as(values.dtype)))

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
                    tensor.data = slot.shown(whole)
                    continue
                if slot.first_row == 0:
                    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                slot.box(tensor.data).copy_(slot.view(whole))

    def write_back(self) -> None:
        """Take the model's whole parameters as the values to train on from (rank by rank its own slice)."""
        for bucket in self.layout.buckets:
            state = self.buckets[bucket.index]
            whole = whole_bucket(bucket, self._tensors, self.device)
            mine = self.slice(whole)
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
            if "low" in state.delayed:
                state.delayed["low"] = self._tiers.hold(mine.to(bucket.compute_dtype), "host")

    def gather(self, bucket: Bucket, stored: torch.Tensor) -> torch.Tensor:
        """A flat tensor ``[bucket.numel]`` from every rank's slice; the tensor itself where ranks hold it whole."""
        if not self.sharded:
            return stored
        assert self._transport is not None
        full = stored.new_empty(bucket.numel)
        return self._transport.all_gather_into(full, stored).finish(None)

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, or all of it where ranks hold it whole."""
        if not self.sharded:
            return whole
        assert self._transport is not None
        return whole.chunk(self.layout.num_ranks)[self._transport.rank] if whole.numel() else whole

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

    @property
    def _keeps_full(self) -> bool:
        """Whether buckets stay whole on the device between steps."""
        return self.stage < 3 or self.layout.num_ranks == 1

    def _kept(self, bucket: Bucket) -> tuple[int, int]:
        """The first element that this rank keeps of a bucket's flat buffer, and the one after the last."""
        if self._keeps_full:
            return 0, bucket.numel
        assert self._transport is not None
        first = self._transport.rank * bucket.shard_numel
        return first, first + bucket.shard_numel

    def _divide(self, bucket: Bucket, values: torch.Tensor) -> BucketState:
        """A bucket's tensors from the stored values that this rank keeps (``_kept``), which become its own."""
        low = values.to(bucket.compute_dtype)
        full = low if self._keeps_full else None
        shard = None
        if self.sharded:
            shard = self.slice(low) if self._keeps_full else low
        master = None
        if bucket.has_master:
            master = self.slice(values).clone() if self.sharded and self._keeps_full else values
        return BucketState(full, shard, master)

    def _broadcast(self, tensor: torch.Tensor) -> None:
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


def _distinct_parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters())


def process_group() -> dist.ProcessGroup | None:
    """The default process group, or None when this process is a world of its own."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return None
