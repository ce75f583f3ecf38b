"""Pad a batch along its samples and its length, so that padding counts for nothing in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from zerofx.ir.batch import Batch
from zerofx.lengths.axes import BatchAxes

MASK = "attention_mask"


@dataclass(frozen=True)
class Filling:
    """The values that a batch is padded with.

    Padding tokens have ``values`` by the names of their tensors, and 0 in all others. Padding samples repeat the last
    sample, except for the tensors in ``masked``, in which all their tokens have that value: labels that are then
    ignored, and also masks if labels are not enough to leave a sample out. ``makes_mask``: whether a batch without an
    ``attention_mask`` is given one. ``pads_samples``: whether samples may be added.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    masked: frozenset[str] = frozenset()
    makes_mask: bool = False
    pads_samples: bool = True

    @property
    def extra_keywords(self) -> tuple[str, ...]:
        """The keywords that are added to batches."""
        return (MASK,) if self.makes_mask else ()

    def add_mask(self, batch: Batch, axes: BatchAxes) -> Batch:
        """The batch with the mask that the model needs, if it has none."""
        if not self.makes_mask or MASK in batch.names:
            return batch
        length, samples = axes.sizes(batch)
        args, kwargs = batch.call
        mask = torch.ones((samples, length), dtype=torch.long, device=batch.tensors[0].device)
        masked = Batch.from_call(args, {**kwargs, MASK: mask})
        return replace(masked, hashes=batch.hashes)

    def pad(self, batch: Batch, axes: BatchAxes, length: int, samples: int) -> Batch:
        """Pad the batch to so many tokens and samples, which are no fewer than it has."""
        tensors = [
            self._pad_tensor(name, tensor, axes, length, samples)
            for name, tensor in zip(batch.names, batch.tensors, strict=True)
        ]
        if all(padded is tensor for padded, tensor in zip(tensors, batch.tensors, strict=True)):
            return batch
        return batch.replace_tensors(tuple(tensors))

    def _pad_tensor(self, name: str, tensor: torch.Tensor, axes: BatchAxes, length: int, samples: int) -> torch.Tensor:
        value = self.values.get(name, 0)
        for dim in axes.along.get(name, ()):
            if missing := length - tensor.shape[dim]:
                tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing], value=value)
        if name in axes.samples and (missing := samples - tensor.shape[0]):
            last = tensor[-1:].expand(missing, *tensor.shape[1:])
            added = torch.full_like(last, value) if name in self.masked else last
            tensor = torch.cat([tensor, added])
        return tensor


def resize(batch: Batch, axes: BatchAxes, length: int, samples: int) -> Batch:
    """A batch of so many tokens and samples, of the same form, with any values: the existing ones, and zeros."""
    return Filling().pad(cut(batch, axes, length, samples), axes, length, samples)


def cut(batch: Batch, axes: BatchAxes, length: int, samples: int) -> Batch:
    """Copy the first ``length`` tokens of the first ``samples`` samples of a batch, or as many as there are."""
    tensors = []
    for name, tensor in zip(batch.names, batch.tensors, strict=True):
        part = tensor[:samples] if name in axes.samples else tensor
        for dim in axes.along.get(name, ()):
            part = part.narrow(dim, 0, min(length, part.shape[dim]))
        tensors.append(part.clone(memory_format=torch.contiguous_format))
    return batch.replace_tensors(tuple(tensors))
