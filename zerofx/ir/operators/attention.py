"""Attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.ir.op_kernels import attention
from zerofx.ir.operators.operator import Operator, OwnKernel, Smaller, SmallerCall
from zerofx.ir.operators.row_rules import sample_attention

# ATen's kernel on CPUs has tiles of as many queries for all numbers of them from this one on, and of as many keys
# (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp), and holds one for each thread.
_QUERIES, _KEYS = 768, 512


def _steps(given: Sequence[Any], _made: Sequence[Any]) -> int:
    """Each element of the queries, or of the result's gradient, is multiplied with all keys, or values: the third
    tensor."""
    return int(math.prod(given[0].shape) * given[2].shape[-2])


def _smaller(first: int) -> Callable[[Sequence[Any], Mapping[str, Any]], Smaller]:
    """One head; and two heads of one and of two samples where the gradient is laid out unlike the result: its copy
    grows with their number. One head of one and of two samples in 16 bits: oneDNN may pack keys and values of each.

    ``first``: the number of the argument that has the queries; keys and values follow.
    """

    def smaller(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Smaller:
        samples, heads, queries, _ = args[first].shape
        keys = args[first + 1].shape[2]
        is_copied = first == 1 and _strides(args[0]) != _strides(args[4])
        lengths, counts = [(min(queries, _QUERIES), min(keys, _KEYS))], ((1, 1), (1, 1))
        if args[first].dtype != torch.float32:
            # oneDNN may pack keys and values, all of a head's, if the processor lets it.
            lengths.insert(0, (queries, keys))
            counts = (2, 1), (1, 1)
        if is_copied:
            counts = (2, min(heads, 2)), (1, min(heads, 2))
        pairs = []
        for length in lengths:
            pair = []
            for few in counts:
                of_keys = (first + 1, first + 2)
                cut = [_cut(arg, (*few, length[place in of_keys])) for place, arg in enumerate(args)]
                masks = {name: _cut_mask(value, (*few, *length)) for name, value in kwargs.items()}
                pair.append(SmallerCall(few[0] * few[1] * length[0], cut, masks))
            pairs.append((pair[0], pair[1]))
        return Smaller(samples * heads * queries, pairs)

    return smaller


def _strides(value: Any) -> list[int]:
    return [stride for stride, size in zip(value.stride, value.shape, strict=True) if size != 1]


def _cut(value: Any, sizes: Sequence[int]) -> Any:
    return value.cut(dict(enumerate(sizes))) if hasattr(value, "shape") else value


def _cut_mask(value: Any, sizes: Sequence[int]) -> Any:
    """Cut a mask to such sizes, except broadcast dimensions."""
    if not hasattr(value, "shape"):
        return value
    whole = zip(value.shape, sizes[-len(value.shape) :], strict=True)
    return value.cut({dim: few for dim, (size, few) in enumerate(whole) if size != 1})


def _forward_bytes(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False,
    *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> int | None:  # fmt: skip
    if not attention.has_kernel(query, key, value, attn_mask, dropout):
        return None
    return attention.forward_bytes(query, key, value, attn_mask, is_causal, scale)


def _backward_bytes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, log_sums: Tensor, dropout: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> int | None:  # fmt: skip
    if not attention.has_kernel(query, key, value, attn_mask, dropout):
        return None
    return attention.backward_bytes(grad, query, key, value, result, log_sums, attn_mask, is_causal, scale)


_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"

OPERATORS: dict[str, Operator] = {
    "_scaled_dot_product_flash_attention_for_cpu": Operator(
        counted_as=_FORWARD,
        rows=sample_attention(range(3), 2),
        steps=_steps,
        smaller=_smaller(0),
        own_kernel=OwnKernel(attention.KERNEL, _forward_bytes),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Operator(
        counted_as=_BACKWARD,
        rows=sample_attention(range(6), 3),
        steps=_steps,
        smaller=_smaller(1),
        own_kernel=OwnKernel(attention.KERNEL, _backward_bytes),
    ),
    "_scaled_dot_product_flash_attention": Operator(rows=sample_attention(range(3), 2, 7)),
    "_scaled_dot_product_flash_attention_backward": Operator(rows=sample_attention(range(6), 3, own_at=(12, 13))),
    "_scaled_dot_product_efficient_attention": Operator(rows=sample_attention(range(3), 2, 2)),
    "_scaled_dot_product_efficient_attention_backward": Operator(
        rows=sample_attention((0, 1, 2, 3, 5, 6), 3, 1, own_at=(7, 8))
    ),
    "_scaled_dot_product_cudnn_attention": Operator(rows=sample_attention(range(3), 2, 7)),
    "_scaled_dot_product_cudnn_attention_backward": Operator(rows=sample_attention(range(6), 3, own_at=(6, 7))),
    "_scaled_dot_product_*": Operator(steps=_steps),
    "_scaled_dot_product_fused_attention_overrideable": Operator(counted_as=_FORWARD),
    "_scaled_dot_product_fused_attention_overrideable_backward": Operator(counted_as=_BACKWARD),
}
