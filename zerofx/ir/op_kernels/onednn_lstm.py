"""An LSTM's layer by oneDNN, as eager mode runs it on a CPU: ATen's operators, in a form that a step graph can hold.

ATen's keeps what its backward needs only with autograd on, as it is in no step, and in a buffer whose size its fake
does not know: oneDNN alone does, which is asked by a call. Its backward gives one tensor as the gradients of both
biases.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import InternalError
from zerofx.torch_private.dispatch import below_autograd, without_modes

_aten = torch.ops.aten
_LSTM = 2  # ATen's number of it


def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool,
    has_biases: bool, num_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs ``[time, batch, hidden]``, the last states, and what backward needs, as ``num_bytes`` bytes.

    Args:
        x: ``[time, batch, inputs]``.
        w_ih, w_hh: ``[4 * hidden, inputs]`` and ``[4 * hidden, hidden]``.
        b_ih, b_hh: ``[4 * hidden]``; anything without biases.
        h, c: the first states, ``[batch, hidden]``.
        num_bytes: as ``workspace_bytes`` says; 0 where there is no backward, for which oneDNN has another kernel.

    Raises:
        InternalError: oneDNN keeps another number of bytes.
    """
    given = x, w_ih, w_hh, b_ih, b_hh, h, c, reverse, has_biases
    y, last_h, last_c, workspace = _layer(*given, with_backward=num_bytes > 0)
    if workspace is None:
        return y, last_h, last_c, x.new_empty(0, dtype=torch.uint8)
    _cache()[_key(x, h.shape[-1], has_biases)] = workspace.numel()
    if workspace.numel() != num_bytes:
        raise InternalError(
            f"expected oneDNN to keep {num_bytes} bytes of an LSTM's layer, as it did when the step was captured, "
            f"found {workspace.numel()}: capture it on the processor that it runs on"
        )
    return y, last_h, last_c, workspace


def workspace_bytes(x: Any, hidden: int, has_biases: bool) -> int:
    """Bytes that oneDNN keeps of a layer on this processor, of which ``x``, without values, is the input."""
    key = _key(x, hidden, has_biases)
    if key not in _cache():
        _cache()[key] = _measure(*key)
    return _cache()[key]


def lstm_layer_backward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, y: Tensor, last_h: Tensor,
    last_c: Tensor, grad_y: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, reverse: bool,
    has_biases: bool, workspace: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients, in float32, of ``x``, both weights, either bias, and the first states.

    Raises:
        ValueError: the workspace is that of another layer: oneDNN would read and write past its end.
    """
    num_bytes = workspace_bytes(x, h.shape[-1], has_biases)
    if workspace.numel() != num_bytes:
        raise ValueError(f"expected a workspace of {num_bytes} bytes, found one of {workspace.numel()}")
    of_x, of_w_ih, of_w_hh, of_b, _, of_h, of_c = _aten.mkldnn_rnn_layer_backward(
        x, w_ih, w_hh, b_ih, b_hh, h, c, y, last_h, last_c, grad_y, grad_h, grad_c, reverse, _LSTM, h.shape[-1], 1,
        has_biases, True, False, [], False, workspace,
    )  # fmt: skip
    return of_x, of_w_ih, of_w_hh, of_b, of_h, of_c


def empty_layer(
    x: Tensor, _w_ih: Tensor, _w_hh: Tensor, _b_ih: Tensor, _b_hh: Tensor, h: Tensor, c: Tensor, _reverse: bool,
    _has_biases: bool, num_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty results of ``lstm_layer``."""
    y = x.new_empty(*x.shape[:2], h.shape[-1])
    return y, h.new_empty(h.shape), c.new_empty(c.shape), x.new_empty(num_bytes, dtype=torch.uint8)


def empty_gradients(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, _b_hh: Tensor, h: Tensor, c: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    """Empty results of ``lstm_layer_backward``."""
    shapes = (x.shape, w_ih.shape, w_hh.shape, b_ih.shape[:1], h.shape, c.shape)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool,
    has_biases: bool, *, with_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    with below_autograd(), torch.set_grad_enabled(with_backward):
        results: tuple[Tensor, Tensor, Tensor, Tensor | None] = _aten.mkldnn_rnn_layer(
            x, w_ih, w_hh, b_ih, b_hh, h, c, reverse, [], _LSTM, h.shape[-1], 1, has_biases, False, False, True
        )
    return results


_Key = tuple[tuple[int, ...], int, torch.dtype, bool]


def _key(x: Any, hidden: int, has_biases: bool) -> _Key:
    return tuple(x.shape), hidden, x.dtype, has_biases


@functools.cache
def _cache() -> dict[_Key, int]:
    """Bytes that oneDNN keeps of layers, as far as this process knows."""
    return {}


def _measure(shape: tuple[int, ...], hidden: int, dtype: torch.dtype, has_biases: bool) -> int:
    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=dtype, device="cpu")

    with without_modes():
        state, bias = zeros(shape[1], hidden), zeros(4 * hidden)
        weights = zeros(4 * hidden, shape[2]), zeros(4 * hidden, hidden)
        given = zeros(*shape), *weights, bias, bias, state, state, False, has_biases
        workspace = _layer(*given, with_backward=True)[3]
        assert workspace is not None
        return workspace.numel()
