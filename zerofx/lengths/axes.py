"""Dimensions of a batch's tensors that vary between batches: its samples, and its length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zerofx.errors import UsageError
from zerofx.ir.batch import Batch


@dataclass(frozen=True)
class BatchAxes:
    """The varying dimensions, found in the first batch and required of all others.

    The length is the second size of the first tensor that has two dimensions or more. The second dimension of every
    tensor with that size varies with it, and so do the last two of a square, such as a mask of pairs of tokens. A
    tensor's first dimension has the samples if it is as long as that of the first tensor.

    ``along``: the dimensions that have the length, by name. ``samples``: the tensors that have a sample in each row.
    ``fixed``: the sizes of all tensors by name, 0 where they vary.
    """

    along: Mapping[str, tuple[int, ...]]
    samples: frozenset[str]
    fixed: Mapping[str, tuple[int, ...]]

    @staticmethod
    def from_batch(batch: Batch) -> BatchAxes:
        """The varying dimensions of the first batch.

        Raises:
            UsageError: no tensor has a length.
        """
        length = _first_of(batch).shape[1]
        named = dict(zip(batch.names, batch.tensors, strict=True))
        samples = batch.divided_names()
        along = {
            name: dims
            for name, tensor in named.items()
            if name not in batch.hashes and (dims := _dims_of(tensor, length, has_samples=name in samples))
        }
        fixed = {
            name: tuple(
                0 if dim in along.get(name, ()) or (dim == 0 and name in samples) else size
                for dim, size in enumerate(tensor.shape)
            )
            for name, tensor in named.items()
        }
        return BatchAxes(along, samples, fixed)

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """The numbers of tokens and samples of a batch.

        Raises:
            UsageError: it varies in other dimensions than the first one.
        """
        length, samples = _first_of(batch).shape[1], batch.size()
        for name, tensor in zip(batch.names, batch.tensors, strict=True):
            if name not in self.fixed:
                raise UsageError(
                    f"expected a batch of {', '.join(self.fixed)} as the first was, whose tokens are known, found "
                    f"{name}: give all batches the same tensors with lengths="
                )
            along = self.along.get(name, ())
            expected = [
                length if dim in along else samples if dim == 0 and name in self.samples else size
                for dim, size in enumerate(self.fixed[name])
            ]
            if list(tensor.shape) != expected:
                raise UsageError(
                    f"expected {name} of shape {expected} in a batch of {samples} samples and {length} tokens, since "
                    f"the first batch had its tokens in dimensions {list(along)} of it, found {list(tensor.shape)}: "
                    f"give batches whose tensors have tokens in the same dimensions, and prepare the step with one "
                    f"that has another number of tokens than of anything else"
                )
        return length, samples


def _first_of(batch: Batch) -> torch.Tensor:
    for name, tensor in zip(batch.names, batch.tensors, strict=True):
        if tensor.dim() >= 2 and name not in batch.hashes:
            return tensor
    raise UsageError(
        "expected a batch with a tensor of two dimensions or more, samples and tokens, to be padded along the second "
        "with lengths=, found none: leave lengths out"
    )


def _dims_of(tensor: torch.Tensor, length: int, *, has_samples: bool) -> tuple[int, ...]:
    """The dimensions of a tensor that have the length."""
    shape, num_dims = tensor.shape, tensor.dim()
    dims = {1} if num_dims >= 2 and shape[1] == length else set()
    if num_dims >= 2 and shape[-1] == shape[-2] == length and not (num_dims == 2 and has_samples):
        dims |= {num_dims - 2, num_dims - 1}
    return tuple(sorted(dims))
