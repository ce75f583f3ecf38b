"""Predict the kernel torch picks for ``scaled_dot_product_attention`` on an NVIDIA GPU, and the call it makes.

The rules are those of ``select_sdp_backend`` in torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, the
calls those of ``scaled_dot_product_attention`` in ``.../transformers/attention.cpp``, both in builds for CUDA 13 with
cuDNN 9.15.1 or later. Another build may choose otherwise: it then captures another graph, and refuses a plan that was
made with these rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128
_MASK_ALIGNMENT = 8  # elements, of what the memory-efficient kernel reads a mask by


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention``: queries, keys and values are ``[batch, heads, length, head]``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def is_plain(self) -> bool:
        """True if the three have one dtype, four non-empty dimensions, and contiguous heads."""
        return all(
            tensor.dtype == self.query.dtype
            and tensor.dim() == 4
            and tensor.numel()
            and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
            for tensor in self.operands
        )

    @property
    def is_trained(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.operands)

    @property
    def shares_heads(self) -> bool:
        """True if several heads of queries share one head of keys and values."""
        return self.query.shape[1] != self.key.shape[1] or self.query.shape[1] != self.value.shape[1]

    @property
    def heads(self) -> tuple[int, int]:
        """Head sizes: of queries and keys, and of values."""
        return self.query.shape[-1], self.value.shape[-1]


def kernel_of(call: Attention, capability: tuple[int, int]) -> str:
    """``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``: torch's choice on a GPU of that compute capability."""
    if not call.is_plain or (call.shares_heads and not call.enable_gqa):
        return "math"
    order = ("cudnn", "flash", "efficient") if capability[0] in (9, 10) else ("flash", "efficient", "cudnn")
    takes = {"cudnn": _cudnn_takes, "flash": _flash_takes, "efficient": _efficient_takes}
    return next((name for name in order if takes[name](call, capability)), "math")


def _cudnn_takes(call: Attention, capability: tuple[int, int]) -> bool:
    head, value_head = call.heads
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and capability >= (8, 0)
        and call.query.dtype in _HALVES
        and (not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled())
        and call.dropout * 16 == math.floor(call.dropout * 16)
        and (max(head, value_head) <= _LARGEST_CUDNN_HEAD or (head, value_head) == (192, 128))
        and head % 8 == value_head % 8 == 0
        and call.key.shape[2] != 1
        and (not call.dropout or call.query.shape[2] != 1)
    )


def _flash_takes(call: Attention, capability: tuple[int, int]) -> bool:
    head, value_head = call.heads
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and capability >= (8, 0)
        and call.query.dtype in _HALVES
        and call.mask is None
        and head == call.key.shape[-1] == value_head <= _LARGEST_FLASH_HEAD
        and (not call.is_causal or call.query.shape[2] == call.key.shape[2])
        and not (call.is_trained and _is_small(capability) and not _small_trains(head, call.dropout))
    )


def _is_small(capability: tuple[int, int]) -> bool:
    """True if a multiprocessor has too little shared memory for the backward of large heads."""
    return (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)


def _small_trains(head: int, dropout: float) -> bool:
    return head <= 192 or (not dropout and head > 224)


def _efficient_takes(call: Attention, capability: tuple[int, int]) -> bool:
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and call.query.dtype in _HALVES):  # tensor cores multiply them
        alignment = max(alignment, 16 // call.query.itemsize)
    head, value_head = call.heads
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and capability >= (5, 0)
        and call.query.dtype in dtypes
        and not call.shares_heads
        and head == call.key.shape[-1]
        and head % alignment == value_head % alignment == 0
    )


def attend(call: Attention, kernel: str) -> Tensor:
    """The call's result, ``[batch, heads, length of queries, head of values]``, by the operator of ``kernel``."""
    mask = call.mask
    if mask is not None and mask.dtype is torch.bool:
        allowed = torch.scalar_tensor(0.0, dtype=call.query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), -math.inf, allowed)
    if kernel == "cudnn":
        results = _aten._scaled_dot_product_cudnn_attention(
            *call.operands, mask, call.is_trained, call.dropout, call.is_causal, False, scale=call.scale
        )
    elif kernel == "flash":
        head = call.query.shape[-1]
        padded = [F.pad(operand, (0, -head % 8)) if head % 8 else operand for operand in call.operands]
        scale = 1.0 / math.sqrt(head) if call.scale is None else call.scale
        results = _aten._scaled_dot_product_flash_attention(*padded, call.dropout, call.is_causal, False, scale=scale)
        results = (results[0][..., :head] if head % 8 else results[0],)
    elif kernel == "efficient":
        mask = None if mask is None else _expand_mask(mask, call)
        results = _aten._scaled_dot_product_efficient_attention(
            *call.operands, mask, call.is_trained, call.dropout, call.is_causal, scale=call.scale
        )
    else:
        results = _aten._scaled_dot_product_attention_math(
            *call.operands, mask, call.dropout, call.is_causal, None, scale=call.scale, enable_gqa=call.enable_gqa
        )
    result: Tensor = results[0]
    return result


def _expand_mask(mask: Tensor, call: Attention) -> Tensor:
    """The mask for each sample and head, with rows aligned to what the kernel reads at once."""
    aligned = all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    if not aligned:
        length = mask.shape[-1]
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(*call.query.shape[:3], call.key.shape[2])
