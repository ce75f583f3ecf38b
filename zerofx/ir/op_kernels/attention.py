"""Attention in float32 on CPUs: the calls of torch's operator that our kernel takes, and the memory that it holds.

The kernel (``codegen/cpu/attention.cpp``) goes through scores in blocks of ``QUERIES`` by ``KEYS``, and through
``SPAN`` queries of a head before it packs other keys.
"""

from __future__ import annotations

from typing import Any

import torch

KERNEL = "attention"  # in ZEROFX_KERNELS
QUERIES, KEYS, SPAN = 32, 256, 512
CONSTANTS = f"constexpr long QUERIES = {QUERIES}, KEYS = {KEYS}, SPAN = {SPAN};\n"


def forward_scratch_numel(dim: int) -> int:
    """Elements that each thread holds in the forward: keys, values, scores, results with their tops and totals, and a
    row of the mask."""
    return 2 * KEYS * dim + QUERIES * KEYS + SPAN * (dim + 2) + KEYS


def backward_scratch_numel(dim: int) -> int:
    """Elements that each thread holds in the backward: keys and values in five forms, scores, queries and gradients,
    and a row of the mask."""
    return 5 * KEYS * dim + 2 * QUERIES * KEYS + 2 * QUERIES * dim + KEYS


def mask_rows(mask: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The rows of ``num_keys`` that a mask has, ``[1 | samples, 1 | heads, 1 | queries, num_keys]``: a view without the
    repetitions of broadcast dimensions."""
    rows = mask if mask.dim() == 4 else mask[None, None]
    for dim in range(3):
        rows = rows.narrow(dim, 0, 1) if rows.stride(dim) == 0 else rows
    return rows.expand(-1, -1, -1, num_keys)


def mask_scratch_numel(mask: torch.Tensor, num_keys: int) -> int:
    """Elements of four bytes that all threads hold together for a mask: the end of each row in each block of keys."""
    return mask_rows(mask, num_keys)[..., 0].numel() * -(-num_keys // KEYS)


def has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> bool:
    """True if the kernel computes this call: float32 on a CPU, no dropout, as many heads of keys and values, of one
    width, as of queries, rows with contiguous elements, and no mask but an additive one without a gradient, which ATen
    would have to compute."""
    return (
        dropout == 0.0
        and query.dim() == 4
        and all(
            operand.dtype == torch.float32 and operand.device.type == "cpu" and operand.stride(3) == 1
            for operand in (query, key, value)
        )
        and key.shape == value.shape
        and (query.shape[:2], query.shape[3]) == (key.shape[:2], key.shape[3])
        and query.numel() > 0
        and key.numel() > 0
        and (mask is None or _is_added(mask, (*query.shape[:3], key.shape[2])))
    )


def _is_added(mask: torch.Tensor, scores: tuple[int, ...]) -> bool:
    return (
        mask.dtype == torch.float32
        and mask.device.type == "cpu"
        and not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(size in (1, whole) for size, whole in zip(mask.shape, scores[-mask.dim() :], strict=True))
    )


def empty_results(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the logarithms of the sums of exponentials, laid out as ATen lays them out."""
    samples, heads, tokens, dim = query.shape
    result = query.new_empty(samples, tokens, heads, dim).transpose(1, 2)
    return result, query.new_empty(samples, tokens, heads).transpose(1, 2)


def forward_bytes(
    query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, mask: torch.Tensor | None, *_: Any
) -> int:
    """Bytes that the kernel holds on a CPU, beyond inputs and outputs, for ``zerofx.attention``."""
    scratch = torch.get_num_threads() * 4 * forward_scratch_numel(query.shape[3])
    return scratch + _mask_bytes(mask, key) + _sizes_bytes(5)


def backward_bytes(
    grad: torch.Tensor, _query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, _result: torch.Tensor,
    _log_sums: torch.Tensor, mask: torch.Tensor | None, *_: Any,
) -> int:  # fmt: skip
    """The same for ``zerofx.attention_backward``: a gradient whose rows are not in one piece is copied."""
    copied = grad.numel() * grad.element_size() if grad.stride(3) != 1 else 0
    scratch = torch.get_num_threads() * 4 * backward_scratch_numel(grad.shape[3])
    return scratch + copied + _mask_bytes(mask, key) + _sizes_bytes(9)


def _sizes_bytes(num_tensors: int) -> int:
    """Bytes of the kernel's parameters: 15 sizes and strides, and three strides of each tensor but the mask."""
    return 8 * (15 + 3 * num_tensors)


def _mask_bytes(mask: torch.Tensor | None, key: torch.Tensor) -> int:
    return 0 if mask is None else 4 * mask_scratch_numel(mask, key.shape[2])
