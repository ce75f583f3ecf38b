"""Recurrent layers: zerofx's own operators for their time steps.

What they hold on a CPU is measured for fewer time steps where a layer takes long. oneDNN's scratchpads grow with the
number of those, and are rounded up to whole pages: where a layer is too large to be called, that is some KiB off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from zerofx.ir.op_kernels.onednn_lstm import workspace_bytes
from zerofx.ir.operators.operator import Operator, OperatorKind, Smaller, SmallerCall

_FEW_STEPS = 2  # the fewest of which one has another before it
_PRODUCTS_A_STEP = 8  # of numbers: a product of matrices takes less time for one than other loops


def _layer_products(given: Sequence[Any]) -> int:
    """Multiplications of all time steps of a layer by oneDNN, forward: each row with both weights."""
    x, w_ih, w_hh = given[:3]
    return int(math.prod(x.shape[:2]) * (math.prod(w_ih.shape) + math.prod(w_hh.shape)))


def _lstm_flops(inputs: Sequence[Tensor], _outputs: Sequence[Tensor]) -> int:
    return 2 * _layer_products(inputs)


def _lstm_gradient_flops(inputs: Sequence[Tensor], _outputs: Sequence[Tensor]) -> int:
    return 4 * _layer_products(inputs)


def _lstm_steps(given: Sequence[Any], _results: Sequence[Any]) -> int:
    return _layer_products(given) // _PRODUCTS_A_STEP


def _steps_flops(inputs: Sequence[Tensor], _outputs: Sequence[Tensor]) -> int:
    """FLOPs of each state times the weights of all gates, which are as many as the columns of the input."""
    return 2 * inputs[0].numel() * inputs[1].shape[-1]


def _steps_gradient_flops(_inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    return 4 * outputs[0].numel() * outputs[1].shape[-1]


def _steps(given: Sequence[Any], _results: Sequence[Any]) -> int:
    return int(math.prod(given[0].shape) * given[1].shape[-1]) // _PRODUCTS_A_STEP


def _gradient_steps(_given: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(math.prod(results[0].shape) * results[1].shape[-1]) // _PRODUCTS_A_STEP


def _fewer(of: Callable[[Sequence[Any], int], list[Any]], first: int) -> Callable[..., Smaller]:
    """The whole call, or calls of fewer time steps: ``of`` cuts the arguments, of which number ``first`` has all."""

    def smaller(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Smaller:
        num = args[first].shape[0]
        calls = [SmallerCall(num, list(args), kwargs)]
        while num >= 2 * _FEW_STEPS:
            num //= 2
            calls.append(SmallerCall(num, of(args, num), kwargs))
        return Smaller(calls[0].num_parts, [(calls[0], calls[0]), *pairwise(calls[1:])])

    return smaller


def _cut_lstm(args: Sequence[Any], num: int) -> list[Any]:
    x = args[0].cut({0: num})
    num_bytes = args[9] and workspace_bytes(x, args[5].shape[-1], args[8])
    return [x, *args[1:9], num_bytes]


def _cut_lstm_gradient(args: Sequence[Any], num: int) -> list[Any]:
    x, y, grad_y = (args[place] and args[place].cut({0: num}) for place in (0, 7, 10))
    workspace = args[15].cut({0: workspace_bytes(x, args[5].shape[-1], args[14])})
    return [x, *args[1:7], y, *args[8:10], grad_y, *args[11:15], workspace]


def _cut_steps(args: Sequence[Any], num: int) -> list[Any]:
    return [args[0].cut({0: num}), *args[1:]]


def _cut_gradient_steps(args: Sequence[Any], num: int) -> list[Any]:
    grad_y = args[0] and args[0].cut({0: num})
    return [grad_y, *args[1:10], args[10].cut({0: num}), *args[11:]]


OPERATORS: dict[str, Operator] = {
    "zerofx::onednn_lstm": Operator(
        kind=OperatorKind.CUBIC, flops=_lstm_flops, steps=_lstm_steps, smaller=_fewer(_cut_lstm, 0)
    ),
    "zerofx::onednn_lstm_backward": Operator(
        kind=OperatorKind.CUBIC, flops=_lstm_gradient_flops, steps=_lstm_steps,
        smaller=_fewer(_cut_lstm_gradient, 0),
    ),
    "zerofx::recurrent_steps": Operator(
        kind=OperatorKind.CUBIC, flops=_steps_flops, steps=_steps, smaller=_fewer(_cut_steps, 0)
    ),
    "zerofx::recurrent_steps_backward": Operator(
        kind=OperatorKind.CUBIC, flops=_steps_gradient_flops, steps=_gradient_steps,
        smaller=_fewer(_cut_gradient_steps, 10),
    ),
}  # fmt: skip
