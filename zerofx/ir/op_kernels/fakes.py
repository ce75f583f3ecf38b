"""Fake kernels of the operators of ``zerofx/ir/ops.py``: results of the right shapes, strides and dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.ir.op_kernels.quantise import bytes_of_values, value_numel


def no_result(*_args: object) -> None:
    """The fake of an operator without results."""


def first(given: Tensor, *_args: object, **_options: object) -> Tensor:
    """The first argument itself."""
    return given


def empty_like_first(given: Tensor, *_args: object, **_options: object) -> Tensor:
    """A tensor like the first argument, with its strides."""
    return given.new_empty_strided(given.shape, given.stride())


def dense(given: Tensor, *_args: object, **_options: object) -> Tensor:
    """A dense tensor of the first argument's shape."""
    return given.new_empty(given.shape)


def one_number(values: Tensor) -> Tensor:
    """One number in float64."""
    return values.new_empty(1, dtype=torch.float64)


def whole_bucket(shard: Tensor, bucket: int, num_ranks: int, *_args: object, **_options: object) -> Tensor:
    """The slices of all ranks."""
    return shard.new_empty(shard.numel() * num_ranks)


def flat_of(given: Tensor, bucket: int, num_ranks: int, numel: int, moved: int, **_options: object) -> Tensor:
    """A flat tensor of ``numel`` elements."""
    return given.new_empty(numel)


def slice_apart(gradients: Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> Tensor:
    """One rank's slice, in memory of its own."""
    return gradients.new_empty(gradients.numel() // num_ranks)


def pack(values: Tensor, num_parts: int, encoding: str, interleave: int = 1) -> Tensor:
    """Bytes of quantised values."""
    return values.new_empty(num_parts * bytes_of_values(values.numel() // num_parts, encoding), dtype=torch.uint8)


def unpack(quantised: Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> Tensor:
    """The values of all parts."""
    return quantised.new_empty(num_parts * value_numel(quantised.numel() // num_parts, encoding), dtype=dtype)


def unpack_sum(quantised: Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> Tensor:
    """The values of one part."""
    return quantised.new_empty(value_numel(quantised.numel() // num_parts, encoding), dtype=dtype)
