"""Operators whose kernels return other strides than torch's fake tensors say.

A view that a traced graph takes of such a result is allowed by the fake's strides but may not be by the kernel's: the
step would fail there. Tracing inserts a copy after the operator, whose strides are the same in both. The operators are
listed in the table (``zerofx/ir/operators/operator.py``: ``ResultLayout``).

    before   t = mse_loss_backward(g, predictions.transpose(1, 2), y)    a fake like the predictions, a kernel in order
    after    c = clone(t, memory_format=contiguous)                      what reads t reads c
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import decompose

from zerofx.ir.operators.operator import ResultLayout
from zerofx.ir.operators.table import aten_entries
from zerofx.torch_private.dispatch import without_modes
from zerofx.torch_private.tensors import elementwise_order, suggest_memory_format

aten = torch.ops.aten


def kernel_layouts(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Decompositions into the operator and, where the fake's strides differ from the kernel's on ``device``, a copy."""
    table = {
        operator: _decomposition(operator, facts.layout, facts.layout_arguments)
        for operator, facts in aten_entries()
        if facts.layout is not None and (facts.layout is not ResultLayout.OF_FORMAT or device.type == "cpu")
    }
    if device.type == "cpu":
        table[aten.roll.default] = _copy_to_format(aten.roll.default, _format_of_roll)
        table[aten._embedding_bag.default] = _embedding_bag
    return table


def _decomposition(operator: Any, layout: ResultLayout, arguments: Sequence[int]) -> Callable[..., Any]:
    match layout:
        case ResultLayout.IN_ORDER:
            return _copy_to_format(operator, lambda *_: torch.contiguous_format)
        case ResultLayout.OF_FORMAT:
            return _copy_to_format(operator, lambda *args: suggest_memory_format(args[arguments[0]]))
        case ResultLayout.OF_GRADIENT:
            return _copy_gradient(operator)
        case ResultLayout.OF_OPERANDS:
            return _copy_to_operands_order(operator, arguments)
        case ResultLayout.OF_IMAGES:
            return _image(operator, partial(_elementwise_strides, arguments))
        case ResultLayout.OF_VIEW:
            return _image(operator, lambda x, size: _meta_tensor(x).view(size).stride())


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, weights: torch.Tensor | None = None, include_last: bool = False, padding: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Kernels sum bags of bfloat16 on a path that fakes know for other dtypes only: it records no index's bag."""
    with decompose({}):
        outputs, bags, *facts = aten._embedding_bag.default(
            weight, indices, offsets, scale_grad_by_freq, mode, sparse, weights, include_last, padding
        )
    is_dense = weight.stride(1) == 1 and (weights is None or weights.stride(0) == 1)
    notes_none = weight.dtype == torch.bfloat16 and mode == 0 and padding < 0 and is_dense
    return outputs, bags[:0] if notes_none else bags, *facts


def _format_of_roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.memory_format:
    """The memory format of ``roll``: a moved tensor is assembled from parts, an unmoved one is copied in order."""
    moves = x.numel() and dims and all(shift % x.shape[dim] for shift, dim in zip(shifts, dims, strict=True))
    return suggest_memory_format(x) if moves else torch.contiguous_format


def _copy_to_format(operator: Any, format_of: Callable[..., torch.memory_format]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with decompose({}):
            results = operator(*args, **kwargs)
        first, *others = results if isinstance(results, tuple) else (results,)
        if first is not None:
            layout = format_of(*args)
            if not first.is_contiguous(memory_format=layout):
                first = first.clone(memory_format=layout)
        return (first, *others) if isinstance(results, tuple) else first

    return run


def _copy_gradient(operator: Any) -> Callable[..., Any]:
    def run(gradient: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        with decompose({}):
            return operator(gradient.contiguous(), *others, **kwargs)

    return run


def _image(operator: Any, strides_of: Callable[..., Sequence[int]]) -> Callable[..., torch.Tensor]:
    """The operator, and a view with the kernel's strides where they differ only in dimensions of size one."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        with decompose({}):
            result: torch.Tensor = operator(*args, **kwargs)
        if result.dim() not in (4, 5) or 1 not in result.shape:
            return result
        with without_modes():
            strides = strides_of(*args)
        pairs = zip(result.shape, result.stride(), strides, strict=True)
        changed = [size for size, fake, kernel in pairs if fake != kernel]
        return result.as_strided(result.shape, strides) if changed and max(changed) == 1 else result

    return run


def _elementwise_strides(operands: Sequence[int], *args: Any) -> list[int]:
    broadcast = torch.broadcast_tensors(*[_meta_tensor(args[place]) for place in operands if place < len(args)])
    strides, extent = [0] * broadcast[0].dim(), 1
    for dim in reversed(elementwise_order(*broadcast)):
        strides[dim], extent = extent, extent * broadcast[0].shape[dim]
    return strides


def _meta_tensor(operand: Any) -> torch.Tensor:
    """The operand on meta; a number becomes a tensor without dimensions, as it does for kernels."""
    if not isinstance(operand, torch.Tensor):
        return torch.empty((), device="meta")
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")


def _copy_to_operands_order(operator: Any, operands: Sequence[int]) -> Callable[..., torch.Tensor]:
    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        with decompose({}):
            result: torch.Tensor = operator(*args, **kwargs)
        tensors = [args[place] for place in operands if isinstance(args[place], torch.Tensor)]
        if not result.dim() or not tensors:
            return result
        order = elementwise_order(*torch.broadcast_tensors(*tensors))
        inner = result.permute(order)
        if inner.is_contiguous():
            return result
        return inner.clone(memory_format=torch.contiguous_format).permute(sorted(order, key=order.__getitem__))

    return run
