"""Flat parameters of a step read and written whole: gathered from all ranks, shown in the model, and taken from it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket, BucketLayout, Slot
from zerofx.ir.facts import DEVICE
from zerofx.ir.parameters import Strides
from zerofx.ir.tensor_parts import named_parameters, remember_attributes
from zerofx.runtime.comm.collectives import send_to_slices
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.held import hide
from zerofx.runtime.state.weights import whole_bucket
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.mesh import AXES, MODEL, PIPE, Axes
from zerofx.torch_private.modules import parameter_table


class WholeBuckets:
    """The buckets of a model, of which each rank holds what a step's layout and stage say."""

    def __init__(
        self, model: nn.Module, layout: BucketLayout, stage: int, communicators: Communicators, tiers: Tiers
    ) -> None:
        self.layout = layout.local_to(communicators.world.rank if communicators.world is not None else 0)
        self.stage = stage
        self.model = model
        self.device = tiers.device
        self._communicators = communicators
        self._transport = communicators.world
        self._tiers = tiers
        self._tensors = dict(named_parameters(model))
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._attributes: list[Callable[[], bool]] = []
        self.buckets: list[BucketState] = []
        own = {slot.source for bucket in layout.buckets for slot in bucket.slots}
        self.elsewhere = tuple(name for name in self._tensors if name not in own) if layout.mesh.pipe > 1 else ()
        self._strides = {id(self._tensors[name]): self._tensors[name].stride() for name in self.elsewhere}
        # The parameters of each bucket of each stage, where there are several; of those in slices the last slice's.
        self.of_stages: Sequence[Sequence[Sequence[str]]] = ()
        # The stage of each parameter, in the order of ``iterate``.
        self.homes: Mapping[str, int] = {}

    def tell_stages(self, of_stages: Sequence[Sequence[Sequence[str]]]) -> None:
        """Take over which stage has which parameters; ``of_stages`` as ``own_parameters`` of each."""
        self.of_stages = of_stages
        self.homes = {name: number for number, buckets in enumerate(of_stages) for names in buckets for name in names}

    def own_parameters(self) -> list[list[str]]:
        """The parameters of each bucket of this rank's stage; those in slices are with their last slice."""
        last = {slot.source: bucket.index for bucket in self.layout.buckets for slot in bucket.slots}
        return [
            list(dict.fromkeys(slot.source for slot in bucket.slots if last[slot.source] == bucket.index))
            for bucket in self.layout.buckets
        ]

    @property
    def is_sharded(self) -> bool:
        """True if other ranks update parts of the model that this one does not."""
        return any(bucket.is_cut(self.stage) for bucket in self.layout.buckets)

    @property
    def resident(self) -> bool:
        """True if the model's parameters are whole, in their own dtype, on the device."""
        on_device = all(state.tier == DEVICE and not state.delayed for state in self.buckets)
        in_place = on_device and not self.layout.has_slices and not self.layout.has_model_parts
        are_whole = not any(bucket.is_gathered(self.stage) for bucket in self.layout.buckets)
        are_all = not self.elsewhere and not any(bucket.has_master for bucket in self.layout.buckets)
        return are_whole and in_place and are_all

    def remember_attributes(self) -> None:
        """Have what parameters of parts consist of now put back whenever they have been shown."""
        tables = [parameter_table(module) for module in self.model.modules()]
        self._attributes = [
            remember_attributes(table, name) for table in tables for name, value in table.items() if value is not None
        ]

    def hide_parameters(self) -> None:
        """Show the model its parameters where they are whole; where they are not, they are held (``held.py``), and lie
        on NaN (whole numbers: -1) that takes no memory. Parameters of parts are what they were at first."""
        resident = self.resident
        for put_back in self._attributes:
            put_back()
        for bucket, state in zip(self.layout.buckets, self.buckets, strict=True):
            if not resident:
                self.hide_bucket(bucket)
                continue
            assert state.full is not None
            for slot in bucket.slots:
                self._tensors[slot.source].data = slot.to_parameter(state.full)
        for name in self.elsewhere:
            hide(self._tensors[name], self._shapes[name], self.device)

    def hide_bucket(self, bucket: Bucket) -> None:
        """Have the model's parameters that lie in a bucket hold no values."""
        for slot in bucket.slots:
            hide(self._tensors[slot.source], self._shapes[slot.source], self.device)

    def strides(self) -> Strides:
        """Those of the parameters as a step reads them: NaN that takes no memory has others."""
        own = {id(self._tensors[slot.source]): slot.shown_stride for _, _, slot in self.slots()}
        return own | self._strides

    def show_parameters(self) -> None:
        """Give the model its whole parameters, gathered from all ranks, in their own dtype."""
        for bucket in self.layout.buckets:
            self.show_bucket(bucket)
        for stage, buckets in enumerate(self.of_stages):
            self._show_from(stage, itertools.chain.from_iterable(buckets))

    def show_bucket(self, bucket: Bucket) -> None:
        """Give the model the whole parameters that lie in a bucket; those in slices slice by slice. Collective."""
        stored = self.load_stored(bucket)
        whole = self.gather(bucket, stored)
        if whole is self.buckets[bucket.index].stored and not self.resident:
            # What is shown is a copy there too: changes that are not written back are dropped everywhere.
            whole = whole.clone()
        for slot in bucket.slots:
            tensor = self._tensors[slot.source]
            if slot.whole is None:
                tensor.data = self.to_parameter(slot, whole)
                continue
            if slot.first_row == 0:
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            slot.box(tensor.data).copy_(slot.view(whole))

    def show_bucket_of(self, stage: int, index: int) -> None:
        """``show_bucket`` of a bucket of any stage. Collective."""
        if stage == self.number_along("pipe"):
            self.show_bucket(self.layout.buckets[index])
        if self.of_stages:
            self._show_from(stage, self.of_stages[stage][index])

    def hide_bucket_of(self, stage: int, index: int) -> None:
        """``hide_bucket`` of a bucket of any stage."""
        if stage == self.number_along("pipe"):
            self.hide_bucket(self.layout.buckets[index])
            return
        for name in self.of_stages[stage][index]:
            hide(self._tensors[name], self._shapes[name], self.device)

    def whole_bytes(self) -> int:
        """The bytes that ``show_parameters`` takes."""
        of_others = sum(self._shapes[name].numel() * self._tensors[name].dtype.itemsize for name in self.elsewhere)
        return sum(bucket.numel * bucket.dtype.itemsize for bucket in self.layout.buckets) + of_others

    def _show_from(self, stage: int, names: Iterable[str]) -> None:
        """Give the model parameters that one stage shows, from the ranks in this one's place there. Collective."""
        for name in names:
            tensor = self._tensors[name]
            if stage != self.number_along("pipe"):
                tensor.data = torch.empty(self._shapes[name], dtype=tensor.dtype, device=self.device)
            self.give_to_stages(tensor.detach(), stage)

    def give_to_stages(self, values: torch.Tensor, stage: int) -> None:
        """Give values that the ranks of one stage have to those in their places in all others. Collective."""
        here = self.number_along("pipe")
        dense = values.contiguous()
        sent = [(number, dense) for number in range(self.layout.mesh.pipe) if number != here] if stage == here else []
        received = [] if stage == here else [(stage, dense)]
        self._communicators.transport_along(PIPE).exchange_pieces(dense, sent, received, 1).finish(None)
        if received and dense is not values:
            values.copy_(dense)

    def write_back(self) -> None:
        """Take the model's whole parameters as the values to train on from (rank by rank its own slice).

        Raises:
            UsageError: a parameter consists of other parts than before.
        """
        if sum(put_back() for put_back in self._attributes):  # all are put back
            raise UsageError(
                "expected parameters in few bits to have the parts that they had, found that the block has put others "
                "in their place, as bitsandbytes does where a CPU evaluates: use step.evaluate() to evaluate, and "
                "leave write_back= out; nothing is written back"
            )
        for bucket in self.layout.buckets:
            self.write_bucket(bucket, whole_bucket(bucket, self._tensors, self.device))

    def write_bucket(self, bucket: Bucket, whole: torch.Tensor) -> None:
        """Take a flat tensor ``[bucket.numel]`` as the values of a bucket to train on from."""
        state, mine = self.buckets[bucket.index], self.slice(bucket, whole)
        if isinstance(state.master, Stored):
            state.master = self._put(state, self._as_stored(bucket, state.master, whole).clone())
        elif state.master is not None:
            state.master.copy_(self._as_stored(bucket, state.master, whole))
        if isinstance(state.low, Stored):
            state.shard = self._tiers.hold(mine.to(bucket.compute_dtype), state.tier)
        else:
            state.low.copy_(mine)
        if state.full is not None and state.full is not state.low:
            state.full.copy_(whole)
        if state.full is None and state.part is not None:
            assert isinstance(state.shard, torch.Tensor)
            first, last = self._own_range(bucket)
            state.shard.copy_(whole[first:last])
        if "low" in state.delayed:
            state.delayed["low"] = self._tiers.hold(mine.to(bucket.compute_dtype), "host")

    def complete(self, bucket: Bucket, state: BucketState) -> None:
        """Bring what a bucket has on the device besides what this rank updates up to date. Collective."""
        if not bucket.is_cut(self.stage):
            return
        if state.part is not None:
            self._gather_into(state.shard if state.shard is not None else state.full, state.part, bucket.parts_over)
        if state.full is not None and state.shard is not None:
            self._gather_into(state.full, state.shard, bucket.gathered_over)

    def gather(self, bucket: Bucket, stored: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A flat tensor ``[bucket.numel]`` from what every rank updates: ``into``, where that is given, or else perhaps
        the tensor itself where all hold it whole."""
        whole = stored
        if bucket.is_cut(self.stage):
            levels = [axes for axes in (bucket.parts_over, bucket.gathered_over) if bucket.mesh.size(axes) > 1]
            for axes in levels:
                size = whole.numel() * bucket.mesh.size(axes)
                fits = into is not None and size == into.numel() and into.dtype == whole.dtype
                whole = self._gather_into(into if fits else whole.new_empty(size), whole, axes)
        if into is None or whole.data_ptr() == into.data_ptr():
            return whole
        return into.copy_(whole)

    def iterate(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter with its name, whole, on the device, those of real numbers in ``dtype``. Collective.

        All lie in one buffer, as large as the largest bucket: a tensor is valid until the next is asked for. Of one in
        slices there is a copy besides. Parameters of other stages are sent by these, each when it is its turn.
        """
        own = self._iterate_own(dtype)
        if self.layout.mesh.pipe == 1:
            yield from own
        for name, stage in self.homes.items():
            of_model = self._tensors[name].dtype
            kind = dtype if dtype is not None and of_model.is_floating_point else of_model
            if stage == self.number_along("pipe"):
                whole = next(own)[1].to(kind)
            else:
                whole = torch.empty(self._shapes[name], dtype=kind, device=self.device)
            self.give_to_stages(whole, stage)
            yield name, whole

    def _iterate_own(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        kinds = [_cast(bucket, dtype) for bucket in self.layout.buckets]
        sizes = [bucket.numel * kind.itemsize for bucket, kind in zip(self.layout.buckets, kinds, strict=True)]
        memory = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=self.device)
        missing = Counter(slot.source for _, _, slot in self.slots())
        whole: dict[str, torch.Tensor] = {}
        for bucket, kind, size in zip(self.layout.buckets, kinds, sizes, strict=True):
            stored = self.load_stored(bucket)
            # Of a slice the cast is sent; where all is here, it is copied so.
            stored = stored.to(kind) if stored.numel() < bucket.numel else stored
            flat = self.gather(bucket, stored, memory[:size].view(kind))
            del stored
            for slot in bucket.slots:
                missing[slot.source] -= 1
                if slot.whole is None:
                    yield slot.source, self.to_parameter(slot, flat).detach()
                    continue
                if slot.source not in whole:
                    of_model = kind.to_complex() if slot.is_complex else kind
                    whole[slot.source] = torch.empty(self._shapes[slot.source], dtype=of_model, device=self.device)
                slot.box(whole[slot.source]).copy_(slot.view(flat))
                if not missing[slot.source]:
                    yield slot.source, whole.pop(slot.source)

    def to_parameter(self, slot: Slot, full: torch.Tensor) -> torch.Tensor:
        """A parameter, or a state of it, of the model's shape, from the flat tensor ``[bucket.numel]`` that it lies in.

        Collective for one that lies in parts on the model axis; else a view.
        """
        if slot.part is None:
            return slot.to_parameter(full)
        own = slot.view(full).reshape(-1)
        parts = self._gather_into(own.new_empty(slot.num_parts * own.numel()), own, MODEL)
        whole = own.new_empty(slot.whole_shape)
        for index, part in enumerate(parts.view(slot.num_parts, *slot.shape)):
            place = replace(slot, part_index=index)
            place.box(whole).copy_(place.box_view(part))
        return torch.view_as_complex(whole) if slot.is_complex else whole

    def slice(self, bucket: Bucket, whole: torch.Tensor) -> torch.Tensor:
        """The part of a flat tensor ``[bucket.numel]`` that this rank updates: a view, or all of it."""
        if not bucket.is_cut(self.stage):
            return whole
        first = bucket.first_of_part(self._rank)
        return whole[first : first + bucket.part_numel]

    def load_stored(self, bucket: Bucket) -> torch.Tensor:
        """The values that the optimizer updates of what this rank updates as a slice, on the device. Collective where
        owners have them whole."""
        state = self.buckets[bucket.index]
        stored, owners = self.load(state.stored), state.master_owners
        if owners is None:
            return stored
        shard = stored.new_empty(bucket.part_numel)
        transport = self._communicators.transport_along(bucket.states_over)
        return send_to_slices(transport, owners, stored, shard).finish(None)

    def _as_stored(self, bucket: Bucket, master: torch.Tensor | Stored, whole: torch.Tensor) -> torch.Tensor:
        """Of a flat tensor ``[bucket.numel]`` what ``master`` is to have of it."""
        owners = self.buckets[bucket.index].master_owners
        if owners is None:
            return self.slice(bucket, whole)
        owned = whole.new_zeros(master.shape)
        for each in owners.ranks[bucket.mesh.index(self._rank, bucket.states_over)]:
            first, last = each.slot.offset, each.slot.offset + each.slot.numel
            owned[each.offset : each.offset + each.slot.numel] = whole[first:last]
        return owned

    def load(self, stored: torch.Tensor | Stored) -> torch.Tensor:
        """A tensor that is on the device, or a copy there of one that is not."""
        return stored if isinstance(stored, torch.Tensor) else self._tiers.load(stored)

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

    def number_along(self, axis: str) -> int:
        """This rank's number on an axis of the mesh."""
        (known,) = (known for known in AXES if known == axis)
        return self.layout.mesh.place(self._rank, known)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give a tensor rank 0's values on all ranks. Collective."""
        if self._transport is not None:
            self._transport.broadcast([tensor])

    def _put(self, state: BucketState, value: torch.Tensor) -> torch.Tensor | Stored:
        return value if state.decision is None else self._tiers.hold(value, state.decision.tier)

    def _gather_into(self, full: torch.Tensor | Stored | None, own: torch.Tensor | Stored, axes: Axes) -> torch.Tensor:
        assert isinstance(full, torch.Tensor) and isinstance(own, torch.Tensor), "what is gathered is on the device"
        return self._communicators.transport_along(axes).all_gather_into(full, own).finish(None)

    @property
    def _rank(self) -> int:
        return self._transport.rank if self._transport is not None else 0

    def _own_range(self, bucket: Bucket) -> tuple[int, int]:
        """The first element that this rank keeps of a bucket's flat buffer, and the one after the last."""
        if not bucket.is_gathered(self.stage):
            return 0, bucket.numel
        first = bucket.first_of_slice(self._rank)
        return first, first + bucket.shard_numel


def _cast(bucket: Bucket, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a bucket is asked for: its own where it has no real numbers, or there is no other."""
    is_real = bucket.dtype.is_floating_point and not any(slot.is_complex for slot in bucket.slots)
    return bucket.dtype if dtype is None or not is_real else dtype
