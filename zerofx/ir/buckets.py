"""Flat buckets: which parameters are gathered, reduced and updated together, and each one's place in its buffer.

A bucket is one flat buffer. On a mesh it is cut along axes, one inside the other: parameters and gradients along
``gathered_over``, what the optimizer updates along ``states_over``, which begins with those. What is cut along
``("shard", "replicate")`` is in slices along ``shard`` first, each of which is in parts along ``replicate``. Axes with
one rank cut nothing.

A bucket's parameters lie in it in registration order, each at a 64-byte boundary (torch's own
allocation alignment, so kernels see the addresses they would see without zerofx, and choose the same code path). The
buffer is padded so that all ranks hold equal contiguous slices, and parts of slices, again at 64-byte boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.mesh import MODEL, PIPE, SHARD, Axes, Mesh
from zerofx.scheduler.plan.placements import REPLICATED, Placement, Sharded

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket; ``offset`` and ``numel`` in elements.

    A complex parameter is one of real numbers here, with a last dimension of 2 (``torch.view_as_real``).
    Of a slice, ``whole`` is the name of the model's parameter, and ``first_row`` where it begins in dimension 0.
    Of a parameter that lies along ``part`` on ``num_parts`` ranks of the model axis, shape and stride are those of one
    part, here that with the number ``part_index``.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    whole: str | None = None
    first_row: int = 0
    is_complex: bool = False
    part: Sharded | None = None
    num_parts: int = 1
    part_index: int = field(default=0, compare=False, repr=False)

    @property
    def source(self) -> str:
        """The name of the model's own parameter."""
        return self.whole or self.name

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter of which one part on the model axis lies here."""
        if self.part is None:
            return self.shape
        dim = self.part.dim
        return *self.shape[:dim], self.shape[dim] * self.num_parts, *self.shape[dim + 1 :]

    @property
    def shown_stride(self) -> tuple[int, ...]:
        """The stride that the model's own parameter has here; of one in parts, whole, with dimensions in that order."""
        stride = self.stride
        if self.part is not None:
            elements, strides = 1, dict[int, int]()
            for dim in sorted(range(len(self.shape)), key=lambda d: (self.stride[d], self.shape[d])):
                strides[dim], elements = elements, elements * self.whole_shape[dim]
            stride = tuple(strides[dim] for dim in range(len(self.shape)))
        return tuple(elements // 2 for elements in stride[:-1]) if self.is_complex else stride

    @property
    def num_rows(self) -> int:
        """The size of the first dimension that the model's own parameter has here; 1 where it has none."""
        return self.shape[0] if len(self.shape) > self.is_complex else 1

    def box(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of ``tensor``, which has the shape of the model's parameter, that lies here; a view.

        Where it is in several groups along a dimension, the view has a dimension of groups before that.
        """
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        tensor = tensor if self.whole is None else tensor.narrow(0, self.first_row, self.whole_shape[0])
        if self.part is None:
            return tensor
        dim, groups = self.part.dim, self.part.groups
        split = tensor.unflatten(dim, (groups, self.num_parts, self.shape[dim] // groups))
        own: torch.Tensor = split.select(dim + 1, self.part_index)
        return own.squeeze(dim) if groups == 1 else own

    def box_view(self, own: torch.Tensor) -> torch.Tensor:
        """``own``, a tensor of the slot's shape, in the shape that ``box`` gives: a view."""
        if self.part is None or self.part.groups == 1:
            return own
        each = self.shape[self.part.dim] // self.part.groups
        split: torch.Tensor = own.unflatten(self.part.dim, (self.part.groups, each))
        return split

    def view(self, full: torch.Tensor) -> torch.Tensor:
        """The parameter as a view of the flat buffer ``full`` of shape ``[bucket.numel]``."""
        return full.as_strided(self.shape, self.stride, self.offset)

    def view_at(self, flat: torch.Tensor, offset: int) -> torch.Tensor:
        """The same as a view of a flat buffer in which the parameter begins at ``offset``."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + offset)

    def to_parameter(self, full: torch.Tensor) -> torch.Tensor:
        """The same with the shape and kind of number that the model's parameter has."""
        return torch.view_as_complex(self.view(full)) if self.is_complex else self.view(full)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one unit, one param group, and one dtype; or a slice of one parameter, which is a unit by itself.

    ``group`` is the index of the optimizer's param group, or None for parameters that are not trained (frozen, or
    without a gradient in this model). ``dtype`` is that of the stored (master) values, ``compute_dtype`` that of the
    gathered ones. ``reduce_dtype`` is that of gradients on their way from all ranks, and ``state_dtype`` the one in
    which states that the optimizer has in ``dtype`` are stored between updates. Gradients are summed
    along ``gathered_over`` and then along ``crossed_over``; on both, ranks have their own samples, or the axis is one
    of those whose ranks have parts of one gradient. ``lent_at`` is the stage at which another step holds it, which
    trains it, and ``lent_tier`` the slower tier in which it has the parameters; None for the step's own, or the device.
    """

    index: int
    name: str
    unit: str
    group: int | None
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    state_dtype: torch.dtype
    slots: tuple[Slot, ...]
    shard_numel: int
    mesh: Mesh
    gathered_over: Axes = SHARD
    states_over: Axes = SHARD
    crossed_over: Axes = ()
    lent_at: int | None = None
    lent_tier: Tier | None = None

    @property
    def is_lent(self) -> bool:
        """True if another step trains it; that step alone decides on which tier it is."""
        return self.lent_at is not None

    def effective_stage(self, stage: int) -> int:
        """The stage at which it is sharded, in a step of ``stage``."""
        return stage if self.lent_at is None else self.lent_at

    @property
    def num_ranks(self) -> int:
        """Slices that parameters and gradients are cut into: the ranks along ``gathered_over``."""
        return self.mesh.size(self.gathered_over)

    @property
    def reduction_axes(self) -> Axes:
        """The axes along which a reduction of gradients sums them first."""
        return self.gathered_over if self.num_ranks > 1 else self.crossed_over

    @property
    def num_reduced(self) -> int:
        """Slices that the first reduction leaves gradients in."""
        return self.mesh.size(self.reduction_axes)

    @property
    def has_model_parts(self) -> bool:
        """True if some parameter is sharded on the model axis."""
        return any(slot.part is not None for slot in self.slots)

    @property
    def crosses(self) -> bool:
        """True if the sums of slices are summed again, along ``crossed_over``."""
        return self.num_ranks > 1 and self.mesh.size(self.crossed_over) > 1

    @property
    def parts_over(self) -> Axes:
        """The axes along which a slice of the parameters is cut into parts for the optimizer."""
        return self.states_over[len(self.gathered_over) :]

    @property
    def num_parts(self) -> int:
        """Parts of a slice, of which the optimizer updates one."""
        return self.mesh.size(self.parts_over)

    @property
    def part_numel(self) -> int:
        """Elements of what one rank updates of a bucket whose states are cut: of a slice, or a part of one."""
        return self.shard_numel // self.num_parts

    def first_of_slice(self, rank: int) -> int:
        """The first element of a rank's slice of the parameters."""
        return self.mesh.index(rank, self.gathered_over) * self.shard_numel

    def first_of_part(self, rank: int) -> int:
        """The first element of what a rank updates where states are cut."""
        return self.mesh.index(rank, self.states_over) * self.part_numel

    def saved_range(self, rank: int) -> tuple[int, int]:
        """The first element that this rank alone saves in a checkpoint, and the one after the last: ranks divide a
        bucket along all axes that its gradients are summed along, whether or not it is cut along them."""
        axes = (*self.gathered_over, *self.crossed_over)
        each = self.numel // self.mesh.size(axes)
        first = self.mesh.index(rank, axes) * each
        return first, first + each

    def is_gathered(self, stage: int) -> bool:
        """True if ranks keep slices of its parameters, which are gathered for each use."""
        return self.effective_stage(stage) == 3 and self.num_ranks > 1

    def is_cut(self, stage: int) -> bool:
        """True if a rank updates a part of it, not all."""
        return self.effective_stage(stage) >= 1 and self.num_ranks * self.num_parts > 1

    def may_reduce_each(self, stage: int) -> bool:
        """True if each micro-batch's gradients can be reduced separately, and added up as a rank updates them."""
        return self.is_cut(stage) and self.num_reduced > 1

    def updated_numel(self, stage: int) -> int:
        """Elements that a rank updates."""
        return self.part_numel if self.effective_stage(stage) >= 1 else self.numel

    @property
    def numel(self) -> int:
        """Elements of the full buffer, padding included."""
        return self.shard_numel * self.num_ranks

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters alone."""
        return sum(slot.numel for slot in self.slots)

    @property
    def trainable(self) -> bool:
        return self.group is not None

    @property
    def has_master(self) -> bool:
        """True if the stored values differ in dtype from those the graph computes with."""
        return self.dtype != self.compute_dtype

    @property
    def is_slice(self) -> bool:
        """True for a slice of a parameter."""
        return any(slot.whole is not None for slot in self.slots)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.numel * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's slice in the compute dtype."""
        return self.shard_numel * self.compute_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole buffer of gradients."""
        return self.numel * self.reduce_dtype.itemsize

    @property
    def gradient_slice_bytes(self) -> int:
        """Bytes of one rank's slice of reduced gradients."""
        return self.shard_numel * self.reduce_dtype.itemsize

    def storage_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a state that the optimizer has in ``dtype`` is stored."""
        return self.state_dtype if dtype == self.dtype else dtype

    def optimizer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that the optimizer has a state in that is stored in ``dtype``."""
        return self.dtype if dtype == self.state_dtype else dtype

    def padding(self) -> tuple[tuple[int, int], ...]:
        """``(start, end)`` of the elements that belong to no parameter."""
        gaps: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append((end, slot.offset))
            end = slot.offset + slot.numel
        if self.numel > end:
            gaps.append((end, self.numel))
        return tuple(gaps)


@dataclass(frozen=True)
class BucketLayout:
    """All buckets of a model for the ranks of a mesh."""

    buckets: tuple[Bucket, ...]
    mesh: Mesh

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.mesh.num_ranks

    @property
    def num_stage_ranks(self) -> int:
        """The ranks of one stage: all of them without the axis ``pipe``."""
        return self.mesh.num_ranks // self.mesh.pipe

    @property
    def has_parts(self) -> bool:
        """True if replicas update parts of a slice each."""
        return any(bucket.trainable and bucket.num_parts > 1 for bucket in self.buckets)

    @property
    def placements(self) -> dict[str, Placement]:
        """Each parameter's placement on the axis model, by its name."""
        slots = (slot for bucket in self.buckets for slot in bucket.slots)
        return {slot.name: REPLICATED if slot.part is None else slot.part for slot in slots}

    @property
    def groups(self) -> tuple[Axes, ...]:
        """The axes that the collectives of a step run over, without those of one rank, in an order of their own.

        With the axis model, those too along which other steps on the mesh may have what this one reads; with the axis
        pipe, those of a stage and of what stages hand on.
        """
        along = [MODEL, SHARD, (*SHARD, *MODEL)] if self.mesh.model > 1 else list[Axes]()
        along += [PIPE, self.mesh.stage_axes] if self.mesh.pipe > 1 else []
        sets: set[Axes] = {self.mesh.world, *(self.mesh.axes_in_use(axes) for axes in along)} - {()}
        for bucket in self.buckets:
            along = [bucket.gathered_over, bucket.crossed_over, bucket.states_over]
            sets |= {bucket.mesh.axes_in_use(axes) for axes in along} - {()}
        return tuple(sorted(sets))

    @property
    def has_slices(self) -> bool:
        """True if some parameter is in several buckets."""
        return any(bucket.is_slice for bucket in self.buckets)

    @property
    def has_model_parts(self) -> bool:
        """True if some parameter is sharded on the model axis."""
        return any(bucket.has_model_parts for bucket in self.buckets)

    def freeze(self) -> BucketLayout:
        """The layout for a graph without gradients: no bucket is trained."""
        return replace(self, buckets=tuple(replace(bucket, group=None) for bucket in self.buckets))

    def append_lent(self, lent: Iterable[Bucket]) -> BucketLayout:
        """The layout with buckets of other steps after its own."""
        buckets = (*self.buckets, *lent)
        return replace(self, buckets=tuple(replace(bucket, index=index) for index, bucket in enumerate(buckets)))

    @property
    def own(self) -> BucketLayout:
        """The layout without the buckets of other steps."""
        return replace(self, buckets=tuple(bucket for bucket in self.buckets if not bucket.is_lent))

    def local_to(self, rank: int) -> BucketLayout:
        """The layout with the parts of parameters that a rank has."""
        index = self.mesh.place(rank, "model")
        buckets = (
            replace(bucket, slots=tuple(replace(slot, part_index=index) for slot in bucket.slots))
            for bucket in self.buckets
        )
        return replace(self, buckets=tuple(buckets))

    def slot_of(self, name: str) -> tuple[Bucket, Slot]:
        """The bucket and slot of the parameter called ``name``."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.name == name:
                    return bucket, slot
        raise KeyError(name)
