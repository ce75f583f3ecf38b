"""Attention in float32 on CPUs: which calls of torch's operator have a kernel of ours, and the memory that one holds.

The kernel (``codegen/kernels/attention.cpp``) goes through scores in blocks of ``QUERIES`` by ``KEYS``, and through
``SPAN`` queries of a head before it packs other keys.
"""

from __future__ import annotations

import torch

QUERIES, KEYS, SPAN = 32, 256, 512
CONSTANTS = f"constexpr long QUERIES = {QUERIES}, KEYS = {KEYS}, SPAN = {SPAN};\n"


def forward_scratch_numel(dim: int) -> int:
    """Elements that each thread holds in the forward: keys, values, scores, and results with their tops and totals."""
    return 2 * KEYS * dim + QUERIES * KEYS + SPAN * (dim + 2)


def backward_scratch_numel(dim: int) -> int:
    """Elements that each thread holds in the backward: keys and values in five forms, scores, queries and gradients."""
    return 5 * KEYS * dim + 2 * QUERIES * KEYS + 2 * QUERIES * dim


def has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, dropout: float) -> bool:
    """Whether the kernel computes this call: float32 on a CPU, no mask but a causal one, no dropout, as many heads of
    keys and values, of one width, as of queries, and each row's elements beside each other."""
    return (
        mask is None
        and dropout == 0.0
        and query.dim() == 4
        and all(
            one.dtype == torch.float32 and one.device.type == "cpu" and one.stride(3) == 1
            for one in (query, key, value)
        )
        and key.shape == value.shape
        and (query.shape[:2], query.shape[3]) == (key.shape[:2], key.shape[3])
        and query.numel() > 0
        and key.numel() > 0
    )


def empty_results(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithms of the sums of exponentials, laid out as ATen lays them out."""
    samples, heads, tokens, dim = query.shape
    result = query.new_empty(samples, tokens, heads, dim).transpose(1, 2)
    return result, query.new_empty(samples, tokens, heads).transpose(1, 2)
