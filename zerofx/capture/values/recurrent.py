"""Recurrent layers whose time steps eager mode runs one by one on a CPU: traced with one operator for all of them.

    y, h = gru(x, h0, [w_ih, w_hh, b_ih, b_hh])     a product and a dozen more operators for each time step
                                                    here recurrent_steps(linear(x, w_ih, b_ih), h0, w_hh, b_hh)

Layers, directions and dropout are put together as in ATen (RNN.cpp). An LSTM that eager mode gives to oneDNN is an
operator for each layer as it is (``zerofx/capture/compat/decompositions.py``).

Does not handle: packed sequences, whose lengths are values, and autocast, which casts inside of a time step: their
steps are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zerofx.ir import ops
from zerofx.torch_private.capture import forward_class
from zerofx.torch_private.dispatch import without_python_dispatcher

_ONEDNN = frozenset({torch.float32, torch.bfloat16})


class _Layer(NamedTuple):
    """The weights of one layer in one direction."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None


class _Call(NamedTuple):
    """The arguments of ``torch.gru`` and its like."""

    x: Tensor
    states: Any
    weights: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def projects(self) -> bool:
        return isinstance(self.states, list | tuple) and self.states[0].shape[2] != self.states[1].shape[2]

    def layers(self) -> Iterator[_Layer]:
        size = 2 + 2 * self.has_biases + self.projects
        for first in range(0, len(self.weights), size):
            w_ih, w_hh, *rest = self.weights[first : first + size]
            b_ih, b_hh = rest[:2] if self.has_biases else (None, None)
            yield _Layer(w_ih, w_hh, b_ih, b_hh, rest[-1] if self.projects else None)


class RecurrentCalls:
    """The recurrent layers that one forward calls, in order.

    The gradient of a weight is a sum over time steps that continues from a later call with the same weight: each call
    passes its weights on to the next one.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a weight, and what stands for it

    def find_fused_call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], tuple[Tensor, ...]] | None:
        """The call of torch's function of this name with one operator for all time steps; None if there is none."""
        if name not in ("lstm", "gru", "rnn_tanh", "rnn_relu") or kwargs or not isinstance(args[3], bool):
            return None
        call = _Call(*args)
        by_onednn = name == "lstm" and torch.backends.mkldnn.enabled and not call.projects and call.x.dtype in _ONEDNN
        is_on_cpu = call.x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        return None if by_onednn or not is_on_cpu or call.x.numel() == 0 else lambda: self._run(name, call)

    def _run(self, cell: str, call: _Call) -> tuple[Tensor, ...]:
        x = call.x.transpose(0, 1) if call.batch_first else call.x
        is_lstm = cell == "lstm"
        states = zip(*(state.unbind(0) for state in (call.states if is_lstm else [call.states])), strict=True)
        layers, last = call.layers(), []
        for number in range(call.num_layers):
            outputs = []
            for reverse in (False, True) if call.bidirectional else (False,):
                y, *after = self._layer(x, next(states), next(layers), cell, reverse=reverse)
                outputs.append(y)
                last.append(after)
            x = torch.cat(outputs, 2) if call.bidirectional else outputs[0]
            if call.dropout and call.train and number < call.num_layers - 1:
                x = torch.dropout(x, call.dropout, True)
        stacked = [torch.stack(states) for states in list(zip(*last, strict=True))[: 1 + is_lstm]]
        return x.transpose(0, 1) if call.batch_first else x, *stacked

    def _layer(
        self, x: Tensor, states: Sequence[Tensor], layer: _Layer, cell: str, *, reverse: bool
    ) -> tuple[Tensor, ...]:
        with without_python_dispatcher():  # which takes the product apart otherwise than eager mode
            products = functional.linear(x, layer.w_ih, layer.b_ih)
        h, c = (*states, None)[:2]
        weights = layer.w_hh, layer.b_hh, layer.w_hr
        latest = [None if weight is None else self._latest.get(id(weight), (weight, weight))[1] for weight in weights]
        y, last_h, last_c, *after = _Steps.apply(products, h, c, *latest, cell, reverse)  # type: ignore[no-untyped-call]
        for weight, handed_on in zip(weights, after, strict=True):
            if weight is not None:
                self._latest[id(weight)] = weight, handed_on
        return y, last_h, last_c


def is_of_steps(function: Any) -> bool:
    """True if a node of autograd's graph is that of all time steps of a layer."""
    return forward_class(function) is _Steps


class _Steps(torch.autograd.Function):
    """All time steps of a layer in one direction: its outputs, its last states, and its weights for the next call."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None,
        cell: str, reverse: bool,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        y, last_h, last_c, saved = ops.recurrent_steps(x, h, c, w_hh, b_hh, w_hr, cell, reverse)
        ctx.save_for_backward(h, c, w_hh, w_hr, saved)
        ctx.given = cell, reverse, b_hh is not None
        ctx.set_materialize_grads(False)
        return y, last_h, last_c, w_hh, b_hh, w_hr

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _, c, _, w_hr, _ = ctx.saved_tensors
        cell, reverse, has_bias = ctx.given
        of_x, of_h, of_c, of_w_hh, of_b_hh, of_w_hr = ops.recurrent_steps_backward(
            *gradients, *ctx.saved_tensors, cell, reverse, has_bias
        )
        there = (True, True, c is not None, True, has_bias, w_hr is not None)
        given = (of_x, of_h, of_c, of_w_hh, of_b_hh, of_w_hr)
        return *(each if has else None for each, has in zip(given, there, strict=True)), None, None
