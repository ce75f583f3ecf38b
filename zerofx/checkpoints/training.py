"""State that a checkpoint consists of, and the part of it that each rank writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zerofx.checkpoints.names import ModelNames
from zerofx.checkpoints.pieces import Piece, pieces_of
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.marker import MODEL, STATE, state_name
from zerofx.disk.checkpoint.shard_file import Entry
from zerofx.ir.buckets import Bucket
from zerofx.optimizers import Optimizers
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.state import TrainingState
from zerofx.runtime.tiers.stored import Stored
from zerofx.runtime.tiers.tiers import Tiers


@dataclass(frozen=True)
class Training:
    """A model and optimizers that a step has taken over, on this rank."""

    model: nn.Module
    optimizers: Optimizers
    state: TrainingState
    tiers: Tiers
    control: Control

    @property
    def device(self) -> torch.device:
        return self.state.device

    def buckets(self) -> Iterator[tuple[Bucket, BucketState]]:
        yield from zip(self.state.layout.buckets, self.state.buckets, strict=True)

    def range_to_write(self, bucket: Bucket) -> tuple[int, int]:
        """The first element of a bucket that this rank writes, and the one after the last."""
        return bucket.saved_range(self.control.rank)

    def pieces_to_write(self, bucket: Bucket) -> list[Piece]:
        """The pieces of a bucket that this rank writes; rank 0 also writes empty parameters, for their names."""
        first, last = self.range_to_write(bucket)
        empty = [slot for slot in bucket.slots if not slot.numel] if self.control.rank == 0 else []
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

    ``first`` is the bucket's element at the start of ``stored``.
    """

    bucket: Bucket
    state: str | None
    stored: torch.Tensor | Stored
    first: int
    entries: tuple[tuple[Entry, Piece], ...]

    @property
    def kind(self) -> str:
        return MODEL if self.state is None else STATE


def parts_of(training: Training, names: ModelNames) -> Iterator[OwnedValues]:
    """All parameters and states that this rank writes."""
    for bucket, held in training.buckets():
        pieces = training.pieces_to_write(bucket)
        states = {name: value for name, value in held.flat.items() if name in held.present}
        for state, stored in ((None, held.stored), *states.items()):
            entries = tuple((_entry(training, names, piece, state, stored.dtype), piece) for piece in pieces)
            yield OwnedValues(bucket, state, stored, training.local_range(bucket)[0], entries)


def _entry(training: Training, names: ModelNames, piece: Piece, state: str | None, dtype: torch.dtype) -> Entry:
    parameter = training.state.parameter(piece.source)
    shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
    name = names.parameters[piece.source]
    return Entry(name if state is None else state_name(name, state), dtype, shape, piece.box)


def whole_entry(name: str, values: torch.Tensor) -> Entry:
    """The entry of a tensor that is written whole."""
    return Entry(name, values.dtype, tuple(values.shape), Box.whole(values.shape))
