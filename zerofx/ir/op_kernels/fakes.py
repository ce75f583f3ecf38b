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


def clone(value: Tensor, *_args: object) -> Tensor:
    """A copy of the first argument."""
    return value.clone()


def like_first(given: Tensor, *_args: object, **_options: object) -> Tensor:
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


def slice_apart(gradients: Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> Tensor:
    """One rank's slice, in memory of its own."""
    return gradients.new_empty(gradients.numel() // num_ranks)


def slice_within(gradients: Tensor, bucket: int, num_ranks: int, *, over: str = "shard") -> Tensor:
    """One rank's slice of what is given."""
    return gradients.narrow(0, 0, gradients.numel() // num_ranks)


def gradients(bucket: int, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat buffer."""
    return torch.empty(numel, dtype=dtype, device=device)


def flat_tensor(numel: int, dtype: torch.dtype, tier: str, *, device: torch.device) -> Tensor:
    """A flat tensor, whatever tier it is on."""
    return torch.empty(numel, dtype=dtype, device=device)


def tensor_of_size(values: Tensor, mask: Tensor, size: list[int]) -> Tensor:
    """A tensor of the given size."""
    return values.new_empty(size)


def factors(gradient: Tensor, x: Tensor, *_args: object) -> Tensor:
    """A tensor of the shape of a product's factors."""
    return x.new_empty(x.shape)


def embedding(grad: Tensor, indices: Tensor, num_weights: int, *_args: object) -> Tensor:
    """A tensor of the shape of an embedding's weight."""
    return grad.new_empty(num_weights, grad.shape[-1])


def pack(values: Tensor, num_parts: int, encoding: str, interleave: int = 1) -> Tensor:
    """Bytes of quantised values."""
    return values.new_empty(num_parts * bytes_of_values(values.numel() // num_parts, encoding), dtype=torch.uint8)


def unpack(quantised: Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> Tensor:
    """The values of all parts."""
    return quantised.new_empty(num_parts * value_numel(quantised.numel() // num_parts, encoding), dtype=dtype)


def unpack_sum(quantised: Tensor, num_parts: int, encoding: str, dtype: torch.dtype) -> Tensor:
    """The values of one part."""
    return quantised.new_empty(value_numel(quantised.numel() // num_parts, encoding), dtype=dtype)


def softmax_stats(logits: Tensor, *_args: object) -> Tensor:
    """Three numbers for each row."""
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


def attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_args: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like the three inputs."""
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
