"""Operators whose kernels lay their results out otherwise than torch's fake tensors say.

A view that a traced graph takes of such a result is one that the fake's strides allow and the kernel's may not: the
step would fail where it takes it. Tracing puts a copy behind the operator that has the kernel's strides in both.

    before   t = mse_loss_backward(g, predictions.transpose(1, 2), y)    a fake like the predictions, a kernel in order
    after    c = clone(t, memory_format=contiguous)                      what reads t reads c

Not handled: elementwise operators of two tensors in different orders of dimensions, one of them broadcast, whose fakes
are torch's references (``div`` with a rounding mode, ``floor_divide``, ``copysign``, ``xlogy``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import decompose

from zerofx.torch_private import suggest_memory_format

aten = torch.ops.aten

# of a loss with respect to its input: zeros in the order of the dimensions, on every device
_ORDERED = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)

# on a CPU, in the memory format which this argument suggests
_FORMAT_OF = {
    aten.native_batch_norm.default: 0,
    aten._native_batch_norm_legit.default: 0,
    aten._native_batch_norm_legit.no_stats: 0,
    aten._native_batch_norm_legit_functional.default: 0,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.reflection_pad2d_backward.default: 1,
    aten.reflection_pad3d.default: 0,
    aten.reflection_pad3d_backward.default: 1,
    aten.replication_pad2d_backward.default: 1,
    aten.replication_pad3d.default: 0,
    aten.replication_pad3d_backward.default: 1,
    aten.max_unpool2d.default: 0,
    aten.channel_shuffle.default: 0,
}


def kernel_layouts(device: torch.device) -> dict[Any, Callable[..., Any]]:
    """Decompositions into the operator and, where a fake's strides are not the kernel's on ``device``, a copy."""
    formats = dict.fromkeys(_ORDERED, _contiguous)
    if device.type == "cpu":
        formats |= {operator: partial(_suggested_by, place) for operator, place in _FORMAT_OF.items()}
        formats[aten.roll.default] = _rolled
    return {operator: _laid_out(operator, format_of) for operator, format_of in formats.items()}


def _contiguous(*args: Any) -> torch.memory_format:
    return torch.contiguous_format


def _suggested_by(place: int, *args: Any) -> torch.memory_format:
    return suggest_memory_format(args[place])


def _rolled(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.memory_format:
    """What is moved along each dimension is put together from parts, what stays where it is is copied in order."""
    moves = x.numel() and dims and all(shift % x.shape[dim] for shift, dim in zip(shifts, dims, strict=True))
    return suggest_memory_format(x) if moves else torch.contiguous_format


def _laid_out(operator: Any, format_of: Callable[..., torch.memory_format]) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        with decompose({}):
            results = operator(*args, **kwargs)
        first, *others = results if isinstance(results, tuple) else (results,)
        if first is not None:
            layout = format_of(*args)
            if not first.is_contiguous(memory_format=layout):
                first = first.clone(memory_format=layout)
        return (first, *others) if isinstance(results, tuple) else first

    return decomposed
