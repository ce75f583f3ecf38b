"""Fill a rank's buckets and states with values from elsewhere, such as a checkpoint of any mesh, a tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch

from zerofx.checkpoints.pieces import pieces_of
from zerofx.checkpoints.training import Training
from zerofx.disk.checkpoint.boxes import Box
from zerofx.errors import CheckpointError
from zerofx.ir.buckets import Bucket, BucketLayout
from zerofx.optimizers.program import WHOLE_STATES
from zerofx.optimizers.whole import WholeOptimizer
from zerofx.runtime.state.bucket_state import BucketState
from zerofx.runtime.state.on_host import Overwrites, read_on_host


class Source(Protocol):
    """A source of values. ``own`` is a parameter's name in ``named_parameters``."""

    def states(self, own: str) -> tuple[str, ...]:
        """The names of the optimizer's states of a parameter that have a value for each element."""
        ...

    def numbers(self, own: str) -> dict[str, Any]:
        """The other states by name: numbers, or tensors of one element."""
        ...

    def read_into(self, into: torch.Tensor, own: str, state: str | None, box: Box) -> None:
        """Fill ``into``, on the CPU, with a box of the parameter, or of one of its states."""
        ...

    def entry(self, own: str, kinds: Mapping[str, type[Any]]) -> Any:
        """The states of a parameter that is updated whole; None if there are none. ``kinds``: of tensors, by name."""
        ...

    def dtype_of(self, own: str, state: str) -> torch.dtype:
        """The dtype of a state; of its real and imaginary parts if it is complex."""
        ...


def check_histories(source: Source, layout: BucketLayout) -> None:
    """Check that all parameters of a bucket were trained in the same steps, by their states and counts.

    Raises:
        CheckpointError: they were not.
    """
    for bucket in layout.buckets:
        histories = {
            (source.states(slot.source), tuple(sorted(map(_comparable, source.numbers(slot.source).items()))))
            for slot in bucket.slots
        }
        if bucket.trainable and len(histories) > 1:
            raise CheckpointError(
                f"expected one history of all parameters of {bucket.name}, which are updated together, found that some "
                f"were trained otherwise than others: give them a param group of their own. Nothing has been loaded"
            )


def fill_training(source: Source, training: Training, *, optimizer: bool = True) -> None:
    """Fill all buckets with their values, with the optimizer's states or without. Collective."""
    overwrites = Overwrites(training.tiers)
    try:
        for bucket, held in training.buckets():
            _fill_stored(source, training, bucket, held, overwrites)
            training.state.complete(bucket, held)
            if bucket.trainable and optimizer:
                _fill_states(source, training, bucket, held, overwrites)
        for name, whole in training.whole_optimizers().items() if optimizer else ():
            whole.take_own_states(source.entry(name, whole.kinds) or {})
    finally:
        overwrites.finish()


def _fill_stored(source: Source, training: Training, bucket: Bucket, held: BucketState, overwrites: Overwrites) -> None:
    first, last = training.local_range(bucket)
    if held.master_owners is not None:
        owned = training.owned_place(bucket)
        overwrites.run(held.stored, partial(_read, source, owned, 0, bucket.numel, None))
        overwrites.run(held.low, partial(_read, source, bucket, first, last, None))
        return
    overwrites.run(held.stored, partial(_read, source, bucket, first, last, None))
    copies = [] if held.master is None else [held.low]
    copies += [held.delayed["low"]] if "low" in held.delayed else []
    if copies:
        overwrites.finish()
        with read_on_host(held.stored, 0, last - first, training.tiers) as stored:

            def convert(flat: torch.Tensor) -> None:
                flat.copy_(stored)

            for copy in copies:
                overwrites.run(copy, convert)


def _fill_states(source: Source, training: Training, bucket: Bucket, held: BucketState, overwrites: Overwrites) -> None:
    if bucket.group is not None and bucket.group in training.whole:
        _fill_owned(source, training, training.whole[bucket.group], bucket, held)
        return
    first, last = training.local_range(bucket)
    some = bucket.slots[0].source
    states, numbers = source.states(some), source.numbers(some)
    held.scalars = {}
    for name in held.flat.keys() - set(states):
        del held.flat[name]  # which then begins as it did before the first step
    for name, value in numbers.items():
        training.state.set_scalar(bucket, name, value)
    for state in states:
        if state not in held.flat:
            empty = torch.zeros(last - first, dtype=source.dtype_of(some, state), device=training.device)
            training.state.set_flat(bucket, state, empty)
        overwrites.run(held.flat[state], partial(_read, source, bucket, first, last, state))
    held.present = frozenset(states) | frozenset(numbers)


def _fill_owned(source: Source, training: Training, whole: WholeOptimizer, bucket: Bucket, held: BucketState) -> None:
    """Have the states of whole parameters wait for their places: of those that this rank steps on."""
    held.forget()
    mine = {each.slot.source for each in training.state.find_owned(bucket)}
    everywhere = [slot.source for slot in bucket.slots]
    stepped_on = everywhere if whole.combines else [own for own in everywhere if own in mine]
    entries = {own: source.entry(own, whole.kinds) for own in stepped_on}
    held.owned.waiting = {own: entry for own, entry in entries.items() if entry}
    has_begun = held.owned.waiting or any(source.entry(own, whole.kinds) for own in everywhere[:1])
    held.present = frozenset({WHOLE_STATES} if has_begun else ())


def _read(source: Source, bucket: Bucket, first: int, last: int, state: str | None, flat: torch.Tensor) -> None:
    """Fill ``flat`` with elements ``first`` to ``last`` of a bucket, or of one of its states; padding is zero."""
    for begin, end in bucket.padding():
        flat[max(begin - first, 0) : max(end - first, 0)].zero_()
    for piece in pieces_of(bucket, first, last):
        source.read_into(piece.view(flat, first), piece.source, state, piece.box)


def _comparable(item: tuple[str, Any]) -> tuple[str, str]:
    name, value = item
    return (name, f"{value.dtype} {value.item()!r}") if isinstance(value, torch.Tensor) else (name, repr(value))
