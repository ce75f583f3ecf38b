"""The time steps of a recurrent layer, in one direction, as one operator with the bits of eager mode on a CPU.

ATen's layers multiply their input for all time steps at once; then each step multiplies the state and applies a cell.
These steps, which eager mode runs and differentiates one by one, are made here of the same calls in the same layouts,
in place where ATen's cells are: functions such as sigmoid round the ends of rows, which are computed without vectors,
otherwise. Gradients are summed in the order in which autograd meets them.

``cell`` is ``"lstm"``, ``"gru"``, ``"rnn_tanh"`` or ``"rnn_relu"``. Shapes: time T, batch B, hidden H, states P, which
is H but for an LSTM with projections; G * H gates, in ATen's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as torch's own allocations: products may have other bits elsewhere

_GATES: Mapping[str, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def steps(
    x: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, b_hh: Tensor | None, w_hr: Tensor | None, cell: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs ``[T, B, P]``, the last states (the second one empty but for an LSTM), and what backward needs.

    Args:
        x: the products of the input, with their bias, ``[T, B, G * H]``.
        h, c: the first states, ``[B, P]`` and, of an LSTM, ``[B, H]``.
        w_hh, b_hh: ``[G * H, P]`` and ``[G * H]``.
        w_hr: the projection, ``[P, H]``.
        reverse: whether the last time comes first.
    """
    y, last_h, last_c, saved = empty_steps(x, h, c, w_hh, b_hh, w_hr, cell, reverse)
    parts = _parts(saved, h, cell, len(w_hh), projects=w_hr is not None)
    w_hh_t, w_hr_t = w_hh.t(), None if w_hr is None else w_hr.t()
    xs = x.unbind(0)
    for t in _order(len(xs), reverse):
        part = {name: each[t] for name, each in parts.items()}
        product = part.get("gates")
        gates = torch.mm(h, w_hh_t, out=product) if b_hh is None else torch.addmm(b_hh, h, w_hh_t, out=product)
        match cell:
            case "lstm":
                assert c is not None
                i, f, g, o = gates.add_(xs[t]).chunk(4, 1)
                i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
                c = torch.mul(f, c, out=part["c"]).add_(i * g)
                out = torch.mul(o, torch.tanh(c, out=part["tanh_c"]), out=part["out" if w_hr_t is not None else "h"])
                h = out if w_hr_t is None else torch.mm(out, w_hr_t, out=part["h"])
            case "gru":
                (r, z, n), (x_r, x_z, x_n) = gates.chunk(3, 1), xs[t].chunk(3, 1)
                r.add_(x_r).sigmoid_(), z.add_(x_z).sigmoid_()
                part["inner"].copy_(n)
                n = torch.add(x_n, n.mul_(r), out=part["n"]).tanh_()
                h = torch.mul(torch.sub(h, n, out=part["change"]), z, out=part["h"]).add_(n)
            case "rnn_tanh":
                h = torch.tanh(gates.add_(xs[t]), out=part["h"])
            case _:
                h = torch.clamp_min(gates.add_(xs[t]), 0, out=part["h"])
    torch.stack(parts["h"], out=y)
    last_h.copy_(h)
    if c is not None:
        last_c.copy_(c)
    return y, last_h, last_c, saved


def steps_backward(
    grad_y: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, of_w_hh: Tensor | None, of_b_hh: Tensor | None,
    of_w_hr: Tensor | None, h: Tensor, c: Tensor | None, w_hh: Tensor, w_hr: Tensor | None, saved: Tensor, cell: str,
    reverse: bool, has_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of ``x``, ``h``, ``c``, ``w_hh``, ``b_hh`` and ``w_hr``; missing ones are empty.

    ``of_w_hh``, ``of_b_hh``, ``of_w_hr``: sums that those of the weights go on from.
    """
    parts = _parts(saved, h, cell, len(w_hh), projects=w_hr is not None)
    grad_x = h.new_empty(len(saved), len(h), len(w_hh))
    grads_y = None if grad_y is None else grad_y.unbind(0)
    of_h, of_c = [] if grad_h is None else [grad_h], grad_c
    sums = [_Sum(first) for first in (of_w_hh, of_b_hh, of_w_hr)]
    order = list(_order(len(saved), reverse))
    for number in reversed(range(len(order))):
        t = order[number]
        part = {name: each[t] for name, each in parts.items()}
        before = order[number - 1] if number else None
        h_before = h if before is None else parts["h"][before]
        grad = _sum([*([] if grads_y is None else [grads_y[t]]), *of_h], like=h)
        of_h = []
        match cell:
            case "lstm":
                assert c is not None
                c_before = c if before is None else parts["c"][before]
                if w_hr is not None:
                    sums[2].add(grad.t().mm(part["out"]))
                    grad = grad.mm(w_hr)
                i, f, g, o = part["gates"].chunk(4, 1)
                of_o = grad * part["tanh_c"]
                of_tanh = torch.ops.aten.tanh_backward(grad * o, part["tanh_c"])
                of_c = of_tanh if of_c is None else of_c + of_tanh
                of_i, of_g, of_f = of_c * g, of_c * i, of_c * c_before
                of_c = of_c * f
                backward = torch.ops.aten.sigmoid_backward
                of_gates = torch.cat(
                    [backward(of_i, i), backward(of_f, f), torch.ops.aten.tanh_backward(of_g, g), backward(of_o, o)], 1
                )
                grad_x[t].copy_(of_gates)
            case "gru":
                r, z, _ = part["gates"].chunk(3, 1)
                of_change, of_z = grad * z, grad * part["change"]
                of_h.append(of_change)
                of_n = torch.ops.aten.tanh_backward(grad - of_change, part["n"])
                of_r = torch.ops.aten.sigmoid_backward(of_n * part["inner"], r)
                of_z = torch.ops.aten.sigmoid_backward(of_z, z)
                torch.cat([of_r, of_z, of_n], 1, out=grad_x[t])
                of_gates = torch.cat([of_r, of_z, of_n * r], 1)
            case "rnn_tanh":
                of_gates = torch.ops.aten.tanh_backward(grad, part["h"])
                grad_x[t].copy_(of_gates)
            case _:
                of_gates = torch.ops.aten.threshold_backward(grad, part["h"], 0)
                grad_x[t].copy_(of_gates)
        if has_bias:
            sums[1].add(of_gates.sum(0))
        of_h.append(of_gates.mm(w_hh))
        sums[0].add(of_gates.t().mm(h_before))
    nothing = h.new_empty(0)
    first_c = nothing if of_c is None else of_c
    return grad_x, _sum(of_h, like=h), first_c, *(each.value(nothing) for each in sums)


def empty_steps(
    x: Tensor, h: Tensor, c: Tensor | None, w_hh: Tensor, _b_hh: Tensor | None, w_hr: Tensor | None, cell: str,
    _reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty results of ``steps``."""
    layout = _layout(h, cell, len(w_hh), projects=w_hr is not None)
    last_c = x.new_empty(0) if c is None else x.new_empty(c.shape)
    width = sum(_aligned_numel(h, columns) for columns in layout.values())
    return x.new_empty(len(x), *h.shape), x.new_empty(h.shape), last_c, x.new_empty(len(x), width)


def empty_gradients(
    _grad_y: Tensor | None, _grad_h: Tensor | None, _grad_c: Tensor | None, _of_w_hh: Tensor | None,
    _of_b_hh: Tensor | None, _of_w_hr: Tensor | None, h: Tensor, c: Tensor | None, w_hh: Tensor, w_hr: Tensor | None,
    saved: Tensor, _cell: str, _reverse: bool, has_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Empty results of ``steps_backward``."""
    nothing: Sequence[int] = (0,)
    return tuple(
        h.new_empty(shape)
        for shape in (
            (len(saved), len(h), len(w_hh)), h.shape, nothing if c is None else c.shape, w_hh.shape,
            w_hh.shape[:1] if has_bias else nothing, nothing if w_hr is None else w_hr.shape,
        )
    )  # fmt: skip


def _order(num: int, reverse: bool) -> Sequence[int]:
    return range(num - 1, -1, -1) if reverse else range(num)


def _layout(h: Tensor, cell: str, num_gates: int, *, projects: bool) -> dict[str, int]:
    """The saved values of a time step, by name, with their columns; they have as many rows as ``h``."""
    columns = {"h": h.shape[1]}
    hidden = num_gates // _GATES[cell]
    if cell == "lstm":
        columns |= {"gates": num_gates, "c": hidden, "tanh_c": hidden} | ({"out": hidden} if projects else {})
    elif cell == "gru":
        columns |= {"gates": num_gates, "inner": hidden, "n": hidden, "change": hidden}
    return columns


def _parts(saved: Tensor, h: Tensor, cell: str, num_gates: int, *, projects: bool) -> dict[str, tuple[Tensor, ...]]:
    """The saved values, by name: a view for each time step."""
    parts, begin = {}, 0
    for name, columns in _layout(h, cell, num_gates, projects=projects).items():
        parts[name] = saved.narrow(1, begin, len(h) * columns).unflatten(1, (len(h), columns)).unbind(0)
        begin += _aligned_numel(h, columns)
    return parts


def _aligned_numel(h: Tensor, columns: int) -> int:
    """Elements of as many rows as ``h``, rounded up to the alignment."""
    each = _ALIGNMENT // h.element_size()
    return math.ceil(len(h) * columns / each) * each


def _sum(terms: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of the terms, in order; zeros if there are none."""
    if not terms:
        return torch.zeros_like(like)
    total, *others = terms
    for term in others:
        total = total + term
    return total


class _Sum:
    """A sum with memory of its own, of terms with memory of their own."""

    def __init__(self, first: Tensor | None) -> None:
        self._first = first
        self._total: Tensor | None = None

    def add(self, term: Tensor) -> None:
        if self._total is None:
            self._total = term if self._first is None else term.add_(self._first)
        else:
            self._total.add_(term)

    def value(self, nothing: Tensor) -> Tensor:
        return nothing if self._total is None else self._total
