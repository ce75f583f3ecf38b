"""ATen operators of an optimizer's update as code of its kernel: one expression for most.

torch's fused optimizers are written out as their sources define them
(``aten/src/ATen/native/cuda/fused_adam_utils.cuh``, ``FusedSgdKernel.cu``), but for their bias corrections: those are
``-expm1(step * log(beta))``, with the logarithm taken on the host, which keeps float32's precision where ``1 - beta``
taken in float32 would lose it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zerofx.codegen.kernels.update_writer import COMPUTED, Buffer, NoKernelError, Writer
from zerofx.torch_private.operators import OpOverload, base_name, schema_of


def write_operator(writer: Writer, node: fx.Node) -> None:
    """Write the lines of one operator.

    Raises:
        NoKernelError: there are none for it; says what is in the way.
    """
    assert isinstance(node.target, OpOverload)
    schema, name = schema_of(node.target), base_name(node.target)
    if name in _FUSED:
        _FUSED[name](writer, node)
        return
    plain = name if name.startswith("_") else name.rstrip("_")
    if plain not in _EXPRESSIONS or "out" in node.kwargs:
        raise NoKernelError(f"{node.target} has no line of its own")
    arguments = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    expression = _EXPRESSIONS[plain](writer, defaults | arguments)
    if schema.is_mutable:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        writer.write(target, expression)
        writer.buffers[node] = writer.buffers[target]
    else:
        writer.make(node, expression, _dtype_of(plain, node, writer.buffers))


def _dtype_of(name: str, node: fx.Node, buffers: Mapping[fx.Node, Buffer]) -> torch.dtype:
    """The dtype in which ATen would store an operator's value."""
    if name in _COMPARISONS:
        return torch.bool
    dtype = node.kwargs.get("dtype")
    if isinstance(dtype, torch.dtype):
        if dtype not in COMPUTED:
            raise NoKernelError(f"{node.name} is {dtype}")
        return dtype
    read = [buffers[source] for source in node.all_input_nodes if source in buffers]
    sized = [buffer.dtype for buffer in read if not buffer.is_single and buffer.dtype != torch.bool]
    if not sized:
        raise NoKernelError(f"{node.name} is made of no tensor of the bucket's size")
    return functools.reduce(torch.promote_types, sized)


Arguments = Mapping[str, Any]
Expression = Callable[[Writer, Arguments], str]


def _infix(sign: str) -> Expression:
    return lambda w, a: f"{w.read(a['self'])} {sign} {w.read(a['other'])}"


def _add_scaled(sign: str) -> Expression:
    def text(w: Writer, a: Arguments) -> str:
        first, second = w.read(a["self"]), w.read(a["other"])
        alpha = a.get("alpha", 1)
        return f"{first} {sign} {second}" if alpha == 1 else f"{first} {sign} {w.scalar(alpha)} * {second}"

    return text


def _divide(w: Writer, a: Arguments) -> str:
    if a.get("rounding_mode") is not None:
        raise NoKernelError("a quotient is rounded to a whole number")
    return f"tl.div_rn({w.read(a['self'])}, {w.read(a['other'])})"


def _power(w: Writer, a: Arguments) -> str:
    base, exponent = w.read(a["self"]), a["exponent"]
    powers = {
        1: base, 2: f"{base} * {base}", 3: f"{base} * {base} * {base}", 0.5: f"tl.sqrt_rn({base})",
        -1: f"tl.div_rn(1.0, {base})", -0.5: f"tl.div_rn(1.0, tl.sqrt_rn({base}))",
    }  # fmt: skip
    if isinstance(exponent, fx.Node) or exponent not in powers:
        raise NoKernelError(f"a power has the exponent {exponent}")
    return powers[exponent]


def _lerp(w: Writer, a: Arguments) -> str:
    start, end, weight = w.read(a["self"]), w.read(a["end"]), w.read(a["weight"])
    near, far = f"{start} + {weight} * ({end} - {start})", f"{end} - ({end} - {start}) * (1.0 - {weight})"
    if isinstance(a["weight"], fx.Node):
        return f"tl.where(tl.abs({weight}) < 0.5, {near}, {far})"
    return near if abs(a["weight"]) < 0.5 else far


def _clamp(w: Writer, a: Arguments) -> str:
    text = w.read(a["self"])
    for bound, name in ((a.get("min"), "maximum"), (a.get("max"), "minimum")):
        if bound is not None:
            text = f"tl.{name}({text}, {w.read(bound)}, propagate_nan=tl.PropagateNan.ALL)"
    return text


def _larger(name: str) -> Expression:
    return lambda w, a: f"tl.{name}({w.read(a['self'])}, {w.read(a['other'])}, propagate_nan=tl.PropagateNan.ALL)"


def _sign(w: Writer, a: Arguments) -> str:
    value = w.read(a["self"])
    return f"tl.where({value} > 0.0, 1.0, tl.where({value} < 0.0, -1.0, 0.0))"


def _fill(value: Callable[[Arguments], Any]) -> Expression:
    """All elements the same; the sum with zeros of the bucket's size is what makes it a block."""
    return lambda w, a: f"tl.zeros_like(at).to(tl.float32) + {w.read(value(a))}"


_COMPARISONS = {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}
_EXPRESSIONS: Mapping[str, Expression] = {
    **{name: _infix(sign) for name, sign in (("mul", "*"), *_COMPARISONS.items())},
    "add": _add_scaled("+"),
    "sub": _add_scaled("-"),
    "div": _divide,
    "pow": _power,
    "lerp": _lerp,
    "maximum": _larger("maximum"),
    "minimum": _larger("minimum"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "sign": _sign,
    "neg": lambda w, a: f"-{w.read(a['self'])}",
    "abs": lambda w, a: f"tl.abs({w.read(a['self'])})",
    "square": lambda w, a: f"{w.read(a['self'])} * {w.read(a['self'])}",
    "sqrt": lambda w, a: f"tl.sqrt_rn({w.read(a['self'])})",
    "rsqrt": lambda w, a: f"tl.div_rn(1.0, tl.sqrt_rn({w.read(a['self'])}))",
    "reciprocal": lambda w, a: f"tl.div_rn(1.0, {w.read(a['self'])})",
    "addcmul": lambda w, a: (
        f"{w.read(a['self'])} + {w.scalar(a['value'])} * {w.read(a['tensor1'])} * {w.read(a['tensor2'])}"
    ),
    "addcdiv": lambda w, a: (
        f"{w.read(a['self'])} + {w.scalar(a['value'])} * tl.div_rn({w.read(a['tensor1'])}, {w.read(a['tensor2'])})"
    ),
    "where": lambda w, a: f"tl.where({w.read(a['condition'])}, {w.read(a['self'])}, {w.read(a['other'])})",
    "masked_fill": lambda w, a: f"tl.where({w.read(a['mask'])}, {w.read(a['value'])}, {w.read(a['self'])})",
    "copy": lambda w, a: w.read(a["src"]),
    "clone": lambda w, a: w.read(a["self"]),
    "_to_copy": lambda w, a: w.read(a["self"]),
    "fill": _fill(lambda a: a["value"]),
    "full_like": _fill(lambda a: a["fill_value"]),
    "zero": _fill(lambda a: 0.0),
    "zeros_like": _fill(lambda a: 0.0),
    "ones_like": _fill(lambda a: 1.0),
}  # fmt: skip


def _single_tensor(argument: Any) -> fx.Node:
    """The one tensor of a list: a bucket is one."""
    if not isinstance(argument, Sequence) or len(argument) != 1 or not isinstance(argument[0], fx.Node):
        raise NoKernelError("a fused optimizer is given other than one tensor of each kind")
    return argument[0]


def _expm1(w: Writer, x: str) -> str:
    """``exp(x) - 1`` for x <= 0: by its series where the difference would cancel, cut where terms are below 1e-8."""
    series = "1.0"
    for n in range(9, 1, -1):
        series = f"(1.0 + {x} / {n}.0 * {series})"
    return w.line(f"tl.where({x} > -0.5, {x} * {series}, tl.exp({x}) - 1.0)")


def _gradient(w: Writer, node: fx.Node, grad: fx.Node) -> str:
    if node.kwargs.get("grad_scale") is not None or node.kwargs.get("found_inf") is not None:
        raise NoKernelError("a fused optimizer unscales gradients")
    return w.line(f"-{w.read(grad)}") if node.kwargs.get("maximize") else w.read(grad)


def _adam(w: Writer, node: fx.Node, *, decoupled: bool) -> None:
    param, grad_of, exp_avg, exp_avg_sq = map(_single_tensor, node.args[:4])
    step = w.read(_single_tensor(node.args[5]))
    known = node.kwargs
    lr, decay, eps = (w.scalar(known[name]) for name in ("lr", "weight_decay", "eps"))
    grad, value = _gradient(w, node, grad_of), w.read(param)
    if decoupled:
        value = w.line(f"{value} - {lr} * {decay} * {value}")
    else:
        grad = w.line(f"{grad} + {decay} * {value}")
    beta1, beta2 = known["beta1"], known["beta2"]
    first = w.line(f"{w.scalar(beta1)} * {w.read(exp_avg)} + {w.scalar(beta1, 'complement')} * {grad}")
    second = w.line(f"{w.scalar(beta2)} * {w.read(exp_avg_sq)} + {w.scalar(beta2, 'complement')} * {grad} * {grad}")
    largest = second
    if known["amsgrad"]:
        largest = w.line(
            f"tl.maximum({w.read(_single_tensor(node.args[4]))}, {second}, propagate_nan=tl.PropagateNan.ALL)"
        )
        w.write(_single_tensor(node.args[4]), largest)
    correction1, correction2 = (
        _expm1(w, w.line(f"{step} * {w.scalar(beta, 'log')}")) for beta in (beta1, beta2)
    )  # fmt: skip
    root = w.line(f"tl.div_rn(tl.sqrt_rn({largest}), tl.sqrt_rn(-{correction2})) + {eps}")
    w.write(param, f"{value} - tl.div_rn({lr}, -{correction1}) * tl.div_rn({first}, {root})")
    w.write(exp_avg, first)
    w.write(exp_avg_sq, second)


def _sgd(w: Writer, node: fx.Node) -> None:
    param, grad_of = map(_single_tensor, node.args[:2])
    known = node.kwargs
    value = w.read(param)
    grad = w.line(f"{_gradient(w, node, grad_of)} + {w.scalar(known['weight_decay'])} * {value}")
    if node.args[2]:
        buffer, momentum = _single_tensor(node.args[2]), w.scalar(known["momentum"])
        if known["is_first_step"]:
            momentum_value = grad
        else:
            momentum_value = w.line(
                f"{momentum} * {w.read(buffer)} + {w.scalar(known['dampening'], 'complement')} * {grad}"
            )
        w.write(buffer, momentum_value)
        grad = w.line(f"{grad} + {momentum} * {momentum_value}") if known["nesterov"] else momentum_value
    w.write(param, f"{value} - {w.scalar(known['lr'])} * {grad}")


def _adagrad(w: Writer, node: fx.Node) -> None:
    param, grad_of, total = map(_single_tensor, node.args[:3])
    step = w.read(_single_tensor(node.args[3]))
    known = node.kwargs
    value = w.read(param)
    grad = w.line(f"{_gradient(w, node, grad_of)} + {w.scalar(known['weight_decay'])} * {value}")
    w.write(total, f"{w.read(total)} + {grad} * {grad}")
    rate = w.line(f"tl.div_rn({w.scalar(known['lr'])}, 1.0 + ({step} - 1.0) * {w.scalar(known['lr_decay'])})")
    root = w.line(f"tl.sqrt_rn({w.read(total)}) + {w.scalar(known['eps'])}")
    w.write(param, f"{value} - {rate} * tl.div_rn({grad}, {root})")


_FUSED: Mapping[str, Callable[[Writer, fx.Node], None]] = {
    "_fused_adam_": lambda w, node: _adam(w, node, decoupled=False),
    "_fused_adamw_": lambda w, node: _adam(w, node, decoupled=True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}
