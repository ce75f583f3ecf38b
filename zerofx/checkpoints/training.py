"""State that a checkpoint consists of, and the part of it that each rank writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zerofx.checkpoints.names import ModelNames
from zerofx.checkpoints.pieces import Piece, pieces_of
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.marker import MODEL, NO_PARAMETER, STATE, state_name
from zerofx.disk.checkpoint.shard_file import Entry
from zerofx.ir.buckets import Bucket
from zerofx.optimizers import Optimizers
from zerofx.optimizers.whole import WholeOptimizer
from zerofx.optimizers.whole.states import paths_in, split_tensors, tree_to_plain
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.stages import is_first_of_stage
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.state import TrainingState
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers
from zerofx.scheduler.plan.mesh import AXES, Axes
from zerofx.scheduler.plan.mesh import MODEL as MODEL_AXIS


@dataclass(frozen=True)
class Training:
    """A model and optimizers that a step has taken over, on this rank.

    ``whole``: those whose updates need whole parameters, by the indices of their param groups.
    """

    model: nn.Module
    optimizers: Optimizers
    state: TrainingState
    tiers: Tiers
    control: Control
    whole: Mapping[int, WholeOptimizer] = field(default_factory=dict)

    def whole_optimizers(self) -> dict[str, WholeOptimizer]:
        """The optimizers whose updates need whole parameters, by the names under which their own states are saved."""
        distinct = {id(whole): whole for whole in self.whole.values()}
        return {f"{NO_PARAMETER}{number or ''}": whole for number, whole in enumerate(distinct.values())}

    @property
    def device(self) -> torch.device:
        return self.state.device

    def buckets(self) -> Iterator[tuple[Bucket, BucketState]]:
        yield from zip(self.state.layout.buckets, self.state.buckets, strict=True)

    def range_to_write(self, bucket: Bucket) -> tuple[int, int]:
        """The first element of a bucket that this rank writes, and the one after the last."""
        return bucket.saved_range(self.control.rank)

    def writes_owned(self, bucket: Bucket, but_along: Axes = ()) -> bool:
        """True if this rank writes what it owns of a bucket: of replicas that own the same, the first does. Along
        ``but_along`` they own parts that differ."""
        rank, own = self.control.rank, bucket.states_over if bucket.is_cut(self.state.stage) else ()
        return rank == bucket.mesh.members(rank, tuple(axis for axis in AXES[1:] if axis not in (*own, *but_along)))[0]

    def owned_place(self, bucket: Bucket) -> Bucket:
        """A bucket with what this rank owns of it, as that lies at this rank."""
        slots = tuple(replace(each.slot, offset=each.offset) for each in self.state.find_owned(bucket))
        return replace(bucket, slots=slots)

    def pieces_to_write(self, bucket: Bucket, first: int, last: int) -> list[Piece]:
        """The pieces of a bucket that this rank writes; the first also writes empty parameters, for their names."""
        is_first = is_first_of_stage(self.control, bucket.mesh)
        empty = [slot for slot in bucket.slots if not slot.numel] if is_first else []
        whole = [Piece(slot.source, first, Box.whole(slot.whole_shape), slot.stride) for slot in empty]
        return [*pieces_of(bucket, first, last), *whole]

    def local_range(self, bucket: Bucket) -> tuple[int, int]:
        """The first element of a bucket that this rank stores, and the one after the last."""
        if not bucket.is_cut(self.state.stage):
            return 0, bucket.numel
        first = bucket.first_of_part(self.control.rank)
        return first, first + bucket.part_numel


@dataclass(frozen=True)
class OwnedValues:
    """The values that a rank writes of one bucket, or of one of its optimizer states, ``state``.

    ``stored`` begins with the bucket's element ``first``; it is written from element ``begin`` to ``end``. Where owners
    have it whole, those are elements of what this rank owns.
    """

    bucket: Bucket
    state: str | None
    stored: torch.Tensor | Stored
    first: int
    begin: int
    end: int
    entries: tuple[tuple[Entry, Piece], ...]

    @property
    def kind(self) -> str:
        return MODEL if self.state is None else STATE


def parts_of(training: Training, names: ModelNames) -> Iterator[OwnedValues]:
    """All parameters and states that this rank writes."""
    for bucket, held in training.buckets():
        is_owned = bucket.index in training.state.owners
        states = {} if is_owned else {name: value for name, value in held.flat.items() if name in held.present}
        for state, stored in ((None, held.stored), *states.items()):
            place, first, (begin, end) = bucket, training.local_range(bucket)[0], training.range_to_write(bucket)
            if held.master_owners is not None:
                place, first, begin = training.owned_place(bucket), 0, 0
                end = stored.shape.numel() if training.writes_owned(bucket, MODEL_AXIS) else 0
            pieces = training.pieces_to_write(place, begin, end)
            entries = tuple((_entry(training, names, piece, state, stored.dtype), piece) for piece in pieces)
            yield OwnedValues(bucket, state, stored, first, begin, end, entries)


@dataclass(frozen=True)
class OwnedStates:
    """The states that this rank writes of parameters that it updates whole: tensors by their names in files, and the
    rest as JSON by the names of parameters."""

    tensors: dict[str, torch.Tensor]
    trees: dict[str, Any]


def states_to_write(training: Training, names: ModelNames) -> OwnedStates:
    """The states of whole parameters that this rank writes: of replicas that own the same, the first writes them."""
    owned, rank = OwnedStates({}, {}), training.control.rank
    for bucket, held in training.buckets():
        if bucket.index not in training.state.owners or not training.writes_owned(bucket):
            continue
        views = training.state.load_owned_states(bucket)
        for each in training.state.find_owned(bucket):
            if (tree := held.owned.trees.get(each.slot.name)) is None:
                continue
            name = names.parameters[each.slot.source]
            mine = {path: views[each.slot.name][path] for path in paths_in(tree)}
            owned.trees[name] = tree_to_plain(tree, mine)
            owned.tensors.update({state_name(name, path): tensor for path, tensor in mine.items()})
    for name, whole in training.whole_optimizers().items() if rank == 0 else ():
        if whole.own_states:
            tree, tensors = split_tensors(whole.own_states)
            owned.trees[name] = tree_to_plain(tree, tensors)
            owned.tensors.update({state_name(name, path): tensor for path, tensor in tensors.items()})
    return owned


def _entry(training: Training, names: ModelNames, piece: Piece, state: str | None, dtype: torch.dtype) -> Entry:
    parameter = training.state.parameter(piece.source)
    shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
    name = names.parameters[piece.source]
    return Entry(name if state is None else state_name(name, state), dtype, shape, piece.box)
