"""Sources of parameter values when a step takes a model over, bucket by bucket.

A source gives any part of a bucket's flat buffer, so that a rank that keeps a slice never needs the whole. What it
gives is the caller's own: it lands in the tier that the plan says, and nothing of it stays here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
from torch import nn

from zerofx.deferred import DeferredTensor
from zerofx.ir.buckets import Bucket, Slot
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.transport import Transport


class Weights(Protocol):
    """A source of values. All ranks ask for the same buckets in the same order, each for the part that it needs."""

    def flat(self, bucket: Bucket, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the bucket's flat buffer, in the stored dtype, zero between parameters.

        Raises:
            ZeroFXError: they cannot be had; on every rank.
        """
        ...

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the model's buffers their values, once all buckets have been asked for."""
        ...


class ModelWeights:
    """The values that rank 0's model has, or that its recipes make.

    Where any rank's model is deferred, values are made and sent a parameter at a time. Without a ``transport`` a rank
    takes those of its own model.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device, transport: Transport | None, control: Control
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._transport = transport
        self._control = control
        self._is_alone = transport is None and control.num_ranks > 1
        deferred = any(isinstance(tensor, DeferredTensor) for tensor in tensors.values())
        self._one_by_one = any(control.gather(deferred, "take the model over"))

    def flat(self, bucket: Bucket, start: int, stop: int) -> torch.Tensor:
        if not self._one_by_one and not bucket.has_model_parts:
            whole = whole_bucket(bucket, self._tensors, self._device)
            self._broadcast(whole)
            return whole if stop - start == bucket.numel else whole[start:stop].clone()
        part = torch.zeros(stop - start, dtype=bucket.dtype, device=self._device)
        for slot in bucket.slots:
            self.copy_slot(bucket, slot, part, start)
        return part

    def copy_slot(self, bucket: Bucket, slot: Slot, part: torch.Tensor, start: int) -> None:
        """Copy what lies of a parameter in ``part``, a bucket's flat buffer from element ``start`` on. Collective."""
        purpose = f"make the values of {slot.name}"
        make = partial(self._make_values, bucket, slot)
        values = make() if self._is_alone else self._control.attempt(purpose, make)
        self._broadcast(values)
        if slot.part is not None:
            values = to_bucket_order(slot, slot.box(values).reshape(slot.shape))
        copy_overlap(part, start, values, slot.offset)
        if self._transport is not None and self._is_made(slot):
            # Before the next parameter's are made. A thread of gloo may hold the tensor for a moment longer.
            values.untyped_storage().resize_(0)

    def fill_buffers(self, model: nn.Module) -> None:
        """The model has them."""

    def _is_made(self, slot: Slot) -> bool:
        """True if ``_make_values`` gives memory that nobody else has."""
        of_others = self._transport is not None and self._transport.rank != 0
        return of_others or isinstance(self._tensors[slot.source], DeferredTensor)

    def _make_values(self, bucket: Bucket, slot: Slot) -> torch.Tensor:
        """A parameter's values ``[slot.numel]`` as they lie in the bucket; only rank 0's matter.

        Of one that lies in parts on the model axis all of it, in its own shape: ranks pick their parts.
        """
        if self._transport is not None and self._transport.rank != 0:
            shape = (slot.numel,) if slot.part is None else slot.whole_shape
            return torch.empty(shape, dtype=bucket.dtype, device=self._device)
        tensor = self._tensors[slot.source]
        values = tensor.materialise() if isinstance(tensor, DeferredTensor) else tensor.detach()
        if slot.part is not None:
            return (torch.view_as_real(values) if values.is_complex() else values).contiguous()
        # A slice of what was made lies in memory of its own, which the rest does not have to share.
        part = slot.box(values)
        return to_bucket_order(slot, part.clone() if part is not values else values)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self._transport is not None:
            self._transport.broadcast([tensor])


def whole_bucket(bucket: Bucket, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """A bucket's flat buffer ``[bucket.numel]`` from whole parameters, in the stored dtype."""
    whole = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
    with torch.no_grad():
        for slot in bucket.slots:
            slot.box_view(slot.view(whole)).copy_(slot.box(tensors[slot.source]))
    return whole


def to_bucket_order(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's elements ``[slot.numel]`` in the order in which they lie in a bucket; a view where they lie so."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tuple(tensor.stride()) != slot.stride:
        tensor = torch.empty_strided(slot.shape, slot.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((slot.numel,), (1,))


def copy_overlap(part: torch.Tensor, start: int, values: torch.Tensor, offset: int) -> None:
    """Copy what lies in both: ``part`` is a flat buffer from element ``start`` on, ``values`` from ``offset`` on."""
    first, last = max(start, offset), min(start + part.numel(), offset + values.numel())
    if first < last:
        part[first - start : last - start].copy_(values[first - offset : last - offset])
