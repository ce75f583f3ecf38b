"""Decompositions for compiled regions, where Inductor's own would lose speed, bits or strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zerofx.codegen.inductor.mends import MENDS
from zerofx.ir import ops
from zerofx.ir.op_kernels import fp8, quantise, saved
from zerofx.ir.op_kernels.attention import has_kernel
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]


def merge_decompositions(inductors: Decompositions, *, attention: bool) -> Decompositions:
    """Inductor's decompositions and, in the place of some, those of regions.

    ``attention``: whether zerofx's own kernel takes what it can.
    """
    launches = _ATTENTION if attention else {}
    loss = _nll_loss_backward(inductors[aten.nll_loss_backward.default])
    return {**inductors, **MENDS, **_OWN, **launches, aten.nll_loss_backward.default: loss}


def _nll_loss_backward(general: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the usual loss without a scatter, so that it is fused into the softmax's; ``general`` is of all.

    A scatter is a buffer of its own, as large as the logits. Values are those of torch's decomposition, to the bit.
    """

    def backward(
        grad: torch.Tensor,
        log_probabilities: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
        total_weight: torch.Tensor,
    ) -> Any:
        if log_probabilities.dim() != 2 or weight is not None or reduction == 0:
            return general(grad, log_probabilities, target, weight, reduction, ignore_index, total_weight)
        scale = -(grad / total_weight) if reduction == 1 else -grad
        classes = torch.arange(log_probabilities.shape[1], device=target.device)
        picked = (classes == target.unsqueeze(1)) & (target != ignore_index).unsqueeze(1)
        return torch.where(picked, scale, 0.0).to(log_probabilities.dtype)

    return backward


def _product_into(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Inductor has no out= operators, but calls any operator that mutates an input and returns nothing."""
    torch.ops.zerofx.mm_into(out, a, b)
    return out


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float = 0.0, is_causal: bool = False,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if not has_kernel(query, key, value, attn_mask, dropout):
        return NotImplemented
    return torch.ops.zerofx.attention(query, key, value, attn_mask, is_causal, scale)


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, result: torch.Tensor,
    log_sums: torch.Tensor, dropout: float, is_causal: bool,
    *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if not has_kernel(query, key, value, attn_mask, dropout):
        return NotImplemented
    given = (grad, query, key, value, result, log_sums, attn_mask)
    return torch.ops.zerofx.attention_backward(*given, is_causal, scale)


def replication_pad_backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """The gradient of ``x`` that was padded with its edges: along each dimension an edge has the sum of its copies.

    As loops, because a fake tensor does not say how ATen's kernel lays its result out. ``grad`` is like the padded one.
    """
    for place in range(0, len(padding), 2):
        dim, size = x.dim() - 1 - place // 2, x.shape[x.dim() - 1 - place // 2]
        before, after = padding[place : place + 2]
        # What is cut off has no part in the result.
        grad = aten.constant_pad_nd(grad, [*[0] * place, max(-before, 0), max(-after, 0)])
        before, after = max(before, 0), max(after, 0)
        if size == 1:
            grad = grad.sum(dim, keepdim=True)
        elif before or after:
            first = grad.narrow(dim, 0, before + 1).sum(dim, keepdim=True)
            last = grad.narrow(dim, before + size - 1, after + 1).sum(dim, keepdim=True)
            grad = torch.cat([first, grad.narrow(dim, before + 1, size - 2), last], dim)
    return grad


def _bernoulli(chances: torch.Tensor, *, generator: torch.Generator | None = None, **rank: torch.Tensor) -> Any:
    return NotImplemented if generator is not None else _draw(chances, chances, 0.0, **rank)


def _bernoulli_of(
    x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None, **rank: torch.Tensor
) -> Any:
    return NotImplemented if generator is not None else _draw(x, None, p, **rank)


def _draw(x: torch.Tensor, chances: torch.Tensor | None, p: float, **rank: torch.Tensor) -> torch.Tensor:
    """Draws of the shape of ``x``: by ATen, row by row whatever its strides, and also where nobody reads them.

    Inductor compares uniform numbers, or draws over a copy in any layout, and leaves out what is not read: other draws.
    """
    drawn = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (OWN_DRAWS[ops.bernoulli_into] if rank else ops.bernoulli_into)(drawn, chances, p, **rank)
    return drawn


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """By ATen: Inductor would mask and convert what is added in buffers of their own, and add it in any order."""
    gradient_of_weight: torch.Tensor = torch.ops.zerofx.embedding_gradient(
        grad, indices, num_weights, padding_idx, scale_grad_by_freq
    )
    return gradient_of_weight


_OWN: Decompositions = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_of,
    OWN_DRAWS[aten.bernoulli.default]: _bernoulli,
    OWN_DRAWS[aten.bernoulli.p]: _bernoulli_of,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.replication_pad1d_backward.default: replication_pad_backward,
    aten.replication_pad2d_backward.default: replication_pad_backward,
    aten.replication_pad3d_backward.default: replication_pad_backward,
    aten.mm.out: _product_into,
    ops.quantise: quantise.quantise_at_once,
    ops.dequantise: quantise.dequantise_at_once,
    ops.dequantise_sum: quantise.dequantise_sum_at_once,
    ops.quantise_saved: saved.quantise_at_once,
    ops.restore_saved: saved.restore_at_once,
    ops.fp8_largest: fp8.largest,
    ops.fp8_scale: fp8.scale,
    ops.fp8_cast: fp8.cast,
    ops.fp8_unscale: fp8.unscale,
}
_ATTENTION: Decompositions = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
