"""Decompositions for tracing: operators are replaced by others that give the bits and strides of eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerofx.capture.compat.strides import kernel_layouts
from zerofx.ir import ops
from zerofx.ir.op_kernels.onednn_lstm import workspace_bytes
from zerofx.torch_private.dispatch import override_composite, without_modes


def eager_decompositions(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Decompositions of the operators for which tracing and eager mode on ``device`` differ, with eager mode's bits.

    A GPU's dropout is ``native_dropout``. On a CPU eager mode multiplies by a mask of 0 and 1 / (1 - p), which it
    divides in the tensor's own dtype. Zeros without memory, with which forward-mode derivatives begin, get some:
    compiled regions overwrite values that nothing reads any more. Results whose kernels use other strides than their
    fakes get the kernels' strides. oneDNN's LSTM is an operator of ours, whose fake knows what it keeps. A CPU's batch
    norm takes no statistics in float32 together with a weight in a lower dtype.
    """
    aten = torch.ops.aten
    layouts = kernel_layouts(device) | {aten._efficientzerotensor.default: torch.zeros} | _products_with_codes(device)
    if device.type != "cpu":
        return layouts

    def scale_by_mask(x: torch.Tensor, mask: torch.Tensor, share_kept: float) -> torch.Tensor:
        with without_modes():
            factor = float(torch.ones((), dtype=x.dtype, device="cpu") / share_kept) if share_kept else 0.0
        return x * mask * factor

    def draw_in_memory_order(x: torch.Tensor, p: float) -> torch.Tensor:
        """The result of ``x.bernoulli_(p)``: eager mode draws where it writes, in memory order."""
        outermost = sorted(range(x.dim()), key=x.stride, reverse=True)
        drawn: torch.Tensor = aten.bernoulli.p(x.permute(outermost), p)
        return drawn.permute(sorted(range(x.dim()), key=outermost.__getitem__))

    def bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Any:
        is_ordered = all(before >= after for before, after in itertools.pairwise(x.stride()))
        return NotImplemented if is_ordered or generator is not None else draw_in_memory_order(x, p)

    def dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False or x.numel() == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = draw_in_memory_order(torch.empty_like(x, dtype=torch.bool), 1.0 - p)
        return scale_by_mask(x, mask, 1.0 - p), mask

    def dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return scale_by_mask(gradient, mask, 1.0 / scale if scale else 0.0)

    return (
        layouts
        | _batch_norms_of_two_dtypes(layouts)
        | {
            aten.native_dropout.default: dropout,
            aten.native_dropout_backward.default: dropout_backward,
            aten.bernoulli.p: bernoulli,
            aten.mkldnn_rnn_layer.default: _onednn_lstm,
            aten.mkldnn_rnn_layer_backward.default: _onednn_lstm_backward,
        }
    )


def dropouts_that_may_drop_nothing() -> AbstractContextManager[None]:
    """While open, a dropout that drops nothing returns its input, as in eager mode, not a copy as in tracing: changing
    one in place changes the other."""

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        drops = train and p != 0 and x.numel() > 0
        return torch.ops.aten.native_dropout(x, p, train)[0] if drops else x

    return override_composite(torch.ops.aten.dropout.default, dropout)


# The most rows with which a GPU multiplies codes in one kernel, whose sums are its own (bitsandbytes 0.50).
_MOST_ROWS_IN_ONE_KERNEL = 1536


def _products_with_codes(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """bitsandbytes' product with a weight in 4 bits, where that library is in use, as what its kernel calls."""
    library = torch.ops.bitsandbytes
    if not hasattr(library, "gemm_4bit"):
        return {}

    def multiply(
        x: torch.Tensor, codes: torch.Tensor, shape: Sequence[int], scales: torch.Tensor, block: int, kind: str,
        bias: Any = None, scale_codes: Any = None, table: Any = None, offset: Any = None,
    ) -> Any:  # fmt: skip
        if device.type != "cpu" and x.numel() <= _MOST_ROWS_IN_ONE_KERNEL * x.shape[-1]:
            return NotImplemented
        if scale_codes is not None:
            scales = library.dequantize_blockwise(scale_codes, scales, table, 256, torch.float32) + offset
        weight = library.dequantize_4bit(codes, scales, block, kind, shape, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    return {library.gemm_4bit.default: multiply}


def _batch_norms_of_two_dtypes(layouts: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Batch norms whose weight has another dtype than their statistics, computed in the dtype of the statistics.

    Kernels that accept both do the same inside, but return another dtype than their fakes say.
    """
    aten = torch.ops.aten

    def forward(operator: Any) -> Callable[..., Any]:
        def run_in_one_dtype(x: Any, weight: Any, bias: Any, mean: Any, *rest: Any) -> Any:
            if weight is None or mean is None or weight.dtype == mean.dtype:
                return layouts[operator](x, weight, bias, mean, *rest)
            first, *others = layouts[operator](*_cast((x, weight, bias), mean.dtype), mean, *rest)
            return (first.to(x.dtype), *others)

        return run_in_one_dtype

    def backward(gradient: Any, x: Any, weight: Any, mean: Any, *rest: Any) -> Any:
        if weight is None or mean is None or weight.dtype == mean.dtype:
            return layouts[operator](gradient, x, weight, mean, *rest)
        of_x, *others = layouts[operator](*_cast((gradient, x, weight), mean.dtype), mean, *rest)
        return (*_cast((of_x,), x.dtype), *_cast(others, weight.dtype))

    operator = aten.native_batch_norm_backward.default
    forwards = (
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    )
    return {operator: forward(operator) for operator in forwards} | {operator: backward}


def _onednn_lstm(
    x: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any, h: Any, c: Any, reverse: bool, _batch_sizes: Any, _mode: int,
    hidden: int, _layers: int, has_biases: bool, *_: Any,
) -> Any:  # fmt: skip
    num_bytes = workspace_bytes(x, hidden, has_biases) if torch.is_grad_enabled() else 0
    return ops.onednn_lstm(x, w_ih, w_hh, b_ih, b_hh, h, c, reverse, has_biases, num_bytes)


def _onednn_lstm_backward(*args: Any) -> tuple[Any, ...]:
    tensors, (reverse, _, _, _, has_biases, *_, workspace) = args[:13], args[13:]
    of_x, of_w_ih, of_w_hh, of_b, of_h, of_c = ops.onednn_lstm_backward(*tensors, reverse, has_biases, workspace)
    return of_x, of_w_ih, of_w_hh, of_b, of_b, of_h, of_c


def _cast(tensors: Iterable[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
