"""What random graphs compute element by element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.nets.cases.random_graphs import Drawing, Operator


def _binary(d: Drawing) -> Tensor:
    x = d.any(1)
    result: Tensor = d.pick(torch.add, torch.sub, torch.rsub)(x, d.like(x), alpha=d.number())
    return result


def _with_scalar(d: Drawing) -> Tensor:
    x, s = d.any(1), d.number()
    return d.draw(
        lambda: x + s, lambda: x - s, lambda: s - x, lambda: x * s, lambda: x / (s or 2.0),
        lambda: torch.add(x, s, alpha=2),
        lambda: torch.rsub(x, s, alpha=d.number()), lambda: torch.sub(x, s, alpha=d.number()),
    )  # fmt: skip


def _three_way(d: Drawing) -> Tensor:
    x, value = d.any(1), d.number()
    if d.flag():
        return torch.addcmul(x, d.like(x), d.like(x), value=value)
    return torch.addcdiv(x, d.like(x), d.positive(*x.shape), value=value)


def _three_way_in_place(d: Drawing) -> Tensor:
    x, value = d.any(1), d.number()
    if d.flag():
        return x.clone().addcmul_(d.like(x), d.like(x), value=value)
    return x.clone().addcdiv_(d.like(x), d.positive(*x.shape), value=value)


def _lerp(d: Drawing) -> Tensor:
    x = d.any(1)
    return torch.lerp(x, d.like(x), d.number() if d.flag() else d.like(x))


def _power(d: Drawing) -> Tensor:
    base = d.positive(d.rows, d.columns) if d.flag() else d.any(1).abs() + 0.5
    exponent = d.pick(0.5, 2, 3, -1, -0.5, 1, 0, 2.5, 4, -2)
    if d.flag():
        return torch.pow(base, exponent)
    return torch.pow(d.positive_number(), d.any(1).tanh())


def _power_of_tensor(d: Drawing) -> Tensor:
    return torch.pow(d.positive(d.rows, d.columns), d.tensor(d.rows, d.columns).tanh())


def _clamp(d: Drawing) -> Tensor:
    x, low = d.any(1), d.pick(-0.5, 0, -0.1, -1)
    high = low + d.positive_number()
    return d.draw(
        lambda: x.clamp(low, high), lambda: x.clamp(min=low), lambda: x.clamp(max=high),
        lambda: F.hardtanh(x, low, high),
        lambda: torch.clamp_min(x, low),
    )  # fmt: skip


def _clamp_by_tensors(d: Drawing) -> Tensor:
    x = d.any(1)
    low = d.like(x)
    return torch.clamp(x, low, low + d.positive_number())


def _activation(d: Drawing) -> Tensor:
    x, s, p = d.any(1), d.number(), d.positive_number()
    return d.draw(
        lambda: F.elu(x, alpha=p),
        lambda: F.celu(x, alpha=p),
        lambda: F.selu(x),
        lambda: F.softplus(x, beta=p, threshold=d.pick(1, 20)),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: F.gelu(x),
        lambda: F.silu(x),
        lambda: F.mish(x),
        lambda: F.logsigmoid(x),
        lambda: F.softsign(x),
        lambda: F.tanhshrink(x),
        lambda: torch.nan_to_num(x, nan=s, posinf=s, neginf=s),
        lambda: torch.special.entr(x.abs() + 0.5),
        lambda: torch.logit(x.sigmoid(), eps=d.pick(None, 0.01)),
        lambda: torch.aminmax(x)[1] * x,
    )


def _kinked_activation(d: Drawing) -> Tensor:
    x, s, p = d.any(1), d.number(), d.positive_number()
    return d.draw(
        lambda: F.leaky_relu(x, negative_slope=s),
        lambda: F.relu(x),
        lambda: F.relu6(x * 3),
        lambda: F.hardswish(x * p),
        # ATen's gradient has 1/6 in float32, whatever the dtype.
        lambda: F.relu6(x * p + 3) / 6 if d.is_wide else F.hardsigmoid(x * p),
        lambda: F.softshrink(x, lambd=p),
        lambda: F.hardshrink(x, lambd=p),
        lambda: F.threshold(x, s, d.number()),
        lambda: F.prelu(x, d.tensor(1)),
        lambda: x.abs(),
        lambda: torch.nn.functional.rrelu(x, s, s, training=False),
    )


def _unary(d: Drawing) -> Tensor:
    x = d.any(1)
    result: Tensor = d.pick(
        torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.atan, torch.erf, torch.asinh, torch.neg, torch.square,
        lambda y: torch.exp(y.tanh()), lambda y: torch.expm1(y.tanh()), lambda y: torch.log(y.abs() + 1),
        lambda y: torch.log1p(y.square()), lambda y: torch.sqrt(y.square() + 0.5),
        lambda y: torch.rsqrt(y.square() + 0.5),
        lambda y: torch.reciprocal(y.square() + 0.5), lambda y: torch.sinc(y), lambda y: torch.lgamma(y.square() + 1.5),
        lambda y: torch.digamma(y.square() + 1.5), lambda y: torch.erfinv(y.tanh() * 0.9),
        lambda y: torch.exp2(y.tanh()),
        lambda y: torch.log2(y.square() + 1), lambda y: torch.log10(y.square() + 1), lambda y: torch.tan(y.tanh()),
        lambda y: torch.sinh(y.tanh()), lambda y: torch.acosh(y.square() + 1.5), lambda y: torch.special.i0e(y),
    )(x)  # fmt: skip
    return result


def _two_operands(d: Drawing) -> Tensor:
    x = d.any(1)
    y = d.like(x)
    return d.draw(
        lambda: x * y, lambda: x / (y.abs() + 0.5), lambda: torch.hypot(x, y + 2),
        lambda: torch.atan2(x, y.abs() + 1),
        lambda: torch.logaddexp(x, y), lambda: torch.logaddexp2(x, y), lambda: torch.xlogy(x, y.abs() + 0.5),
        lambda: torch.copysign(x.abs() + 1, d.operand(*x.shape)), lambda: torch.special.xlog1py(x, y.abs()),
        lambda: torch.float_power(x.abs() + 1, 1.5).to(x.dtype), lambda: torch.true_divide(x, y.square() + 1),
    )  # fmt: skip


def _extreme(d: Drawing) -> Tensor:
    x = d.any(1)
    result: Tensor = d.pick(torch.maximum, torch.minimum, torch.fmax, torch.fmin)(x, d.operand(*x.shape))
    return result


def _remainder(d: Drawing) -> Tensor:
    x, by = d.operand(d.rows, d.columns), d.pick(0.3, -0.7, 0.9, 2)
    return d.draw(
        lambda: torch.remainder(x, by), lambda: torch.fmod(x, by),
        lambda: d.pick(torch.remainder, torch.fmod)(x, d.positive(d.rows, d.columns) + 0.1),
        lambda: torch.div(d.constant_operand(), by, rounding_mode=d.pick("floor", "trunc")) * x,
    )  # fmt: skip


def _whole_numbers(d: Drawing) -> Tensor:
    i = d.indices((d.rows, d.columns), 9) - 4
    by = d.pick(2, 3, -3)
    whole = d.draw(
        lambda: i // by, lambda: i % by, lambda: torch.fmod(i, by), lambda: torch.div(i, by, rounding_mode="trunc"),
        lambda: torch.add(i, d.indices((d.columns,), 5), alpha=d.pick(2, -3, 1)), lambda: i.clamp(-2, 3),
        lambda: torch.bitwise_and(i, 3), lambda: i << 1, lambda: torch.pow(i, 2), lambda: i.cumsum(d.dim(i)),
        lambda: i.sum(d.dim(i), keepdim=True, dtype=d.pick(None, torch.int32)), lambda: i.to(torch.int8) * 2,
        lambda: torch.rsub(i, 3, alpha=2), lambda: i.argmax(0, keepdim=True), lambda: i / by, lambda: i.prod(0),
        lambda: i.to(torch.float64).mean(d.dim(i), keepdim=True), lambda: i.abs().clamp(max=d.pick(3, 100)),
        lambda: torch.floor_divide(i, d.indices((d.columns,), 5) + 1), lambda: i.sign() * i, lambda: ~i,
    )  # fmt: skip
    return d.tensor(d.rows, d.columns) * whole.to(d.dtype)


def _filled(d: Drawing) -> Tensor:
    value, shape = d.pick(2.7, 1, 0, -1.5, True), (d.rows, d.columns)
    dtype = d.pick(torch.int64, torch.int32, torch.bool, d.dtype, torch.float64)
    filled = (
        torch.full(shape, value, dtype=dtype) if d.flag() else torch.full_like(d.operand(*shape), value, dtype=dtype)
    )
    numbers = d.draw(
        lambda: filled,
        lambda: filled.cumsum(d.pick(0, 1, -1), dtype=d.pick(None, torch.float64, torch.int32, d.dtype)),
        lambda: torch.linspace(d.number(), 5, d.columns, dtype=torch.float64) + torch.arange(1, 1 + 2 * d.columns, 2),
        lambda: torch.eye(*shape),
    )  # fmt: skip
    return d.tensor(*shape) * numbers.to(d.dtype)


def _cast(d: Drawing) -> Tensor:
    x = d.any(1)
    wide = d.pick(torch.float64, torch.float64 if d.is_wide or d.dtype == torch.float64 else torch.float32)
    s = d.number()
    return d.draw(
        lambda: torch.add(x.to(wide), d.like(x), alpha=s).to(d.dtype), lambda: (x.to(wide) * s).to(d.dtype),
        lambda: torch.mul(x, d.operand().to(torch.float64)).to(d.dtype),
        lambda: torch.add(d.like(x), x.to(wide), alpha=s).to(d.dtype),
        lambda: torch.add(d.indices((x.shape[-1],), 5), x, alpha=s),
        lambda: (x.to(wide).sum(-1, keepdim=True) * x).to(d.dtype),
    )  # fmt: skip


OPERATORS: dict[str, Operator] = {
    "add, sub, rsub": _binary,
    "scalars": _with_scalar,
    "addcmul, addcdiv": _three_way,
    "addcmul_, addcdiv_": _three_way_in_place,
    "lerp": _lerp,
    "pow of scalars": _power,
    "pow of tensors": _power_of_tensor,
    "clamp": _clamp,
    "clamp by tensors": _clamp_by_tensors,
    "activations": _activation,
    "activations with kinks": _kinked_activation,
    "one operand": _unary,
    "two operands": _two_operands,
    "maximum, minimum": _extreme,
    "remainder": _remainder,
    "whole numbers": _whole_numbers,
    "filled": _filled,
    "casts": _cast,
}
