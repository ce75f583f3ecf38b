"""Attention in float32 on CPUs: launches ``attention.cpp``, which Inductor's compiler builds once on a machine.

ATen takes blocks of scores through a BLAS, which packs its operands anew for each. Here they are packed once for a
block of keys, and a head's products stay in its core's caches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx.ir.op_kernels.attention import (
    CONSTANTS,
    backward_scratch_numel,
    empty_results,
    forward_scratch_numel,
    mask_rows,
    mask_scratch_numel,
)

_SOURCE = Path(__file__).with_suffix(".cpp")
_ARGUMENTS = ("float*",) * 10 + ("int32_t*", "float*", "int64_t*", "float")


@functools.cache
def build() -> Callable[..., None]:
    """The kernel, built where no file of Inductor's cache has it.

    Raises:
        Exception: what Inductor's compiler raises.
    """
    from zerofx.codegen.inductor.cpp import build_cpp

    return build_cpp(_ARGUMENTS, CONSTANTS + _SOURCE.read_text())


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """``softmax(query @ key^T * scale + mask) @ value`` where ``op_kernels.attention.has_kernel`` is true.

    What no query of a block of queries sees is not read: a mask that hides half costs half.

    Args:
        query: ``[samples, heads, queries, dim]``; ``key`` and ``value`` are ``[samples, heads, keys, dim]``.
        mask: added to the scores, which it is broadcast to; None for nothing. A row that hides all keys gives zeros.
        is_causal: whether a query sees only the keys up to its own place.
        scale: of the scores; None for ``1 / sqrt(dim)``.

    Returns:
        The result, like ``query``, and the logarithm of each row's sum of exponentials, ``[samples, heads, queries]``.
    """
    result, log_sums = empty_results(query)
    tensors = (query, key, value, result, log_sums)
    _launch(tensors, mask, forward_scratch_numel(query.shape[3]), is_causal, scale)
    return result, log_sums


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, log_sums: Tensor,
    mask: Tensor | None, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of ``query``, ``key`` and ``value`` where ``grad`` is that of ``result``; see ``attention``."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tensors = (query, key, value, result, log_sums, grad, *grads)
    _launch(tensors, mask, backward_scratch_numel(query.shape[3]), is_causal, scale)
    return grads


def _launch(
    tensors: tuple[Tensor, ...], mask: Tensor | None, scratch_numel: int, is_causal: bool, scale: float | None
) -> None:
    rows = [tensor if tensor.dim() == 3 or tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors]
    samples, heads, num_queries, dim = rows[0].shape
    num_keys, num_threads = rows[1].shape[2], torch.get_num_threads()
    added = rows[0].new_empty(0) if mask is None else mask_rows(mask, num_keys)
    num_ends = 0 if mask is None else mask_scratch_numel(mask, num_keys)
    sizes: list[Any] = [samples, heads, num_queries, num_keys, dim, is_causal, num_threads, scratch_numel]
    sizes += [0] * 7 if mask is None else [*added.shape[:3], *added.stride()]
    for tensor in rows:
        sizes += tensor.stride()[:3]
    scratch = rows[0].new_empty(num_threads * scratch_numel)
    ends = rows[0].new_empty(num_ends, dtype=torch.int32)
    absent = [rows[0].new_empty(0)] * (9 - len(rows))
    scale = 1 / math.sqrt(dim) if scale is None else scale
    build()(*rows, *absent, added, ends, scratch, torch.tensor(sizes, device="cpu"), scale)
