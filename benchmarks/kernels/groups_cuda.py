"""Kernels for CUDA, compared with ATen's operators and the same arithmetic under ``torch.compile``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.groups import Group
from zerofx.ir import ops
from zerofx.ir.op_kernels import norms, quantise

LR, BETA1, BETA2, DECAY, EPS = 1e-3, 0.9, 0.95, 0.1, 1e-8
NUM_PARTS = 8
IGNORED = -100
_aten = torch.ops.aten


def groups(
    numel: int, num_rows: int, dim: int, num_classes: int, device: torch.device
) -> dict[str, tuple[Callable[[], Group], ...]]:
    """Of buckets of ``numel`` elements, and of an output layer, by name; each with its tensors once it is called."""
    return {
        "update": (partial(update_group, numel, device),),
        "loss": (partial(loss_group, num_rows, dim, num_classes, device),),
        "norms": (partial(norms_group, numel, device),),
        "quantise": (partial(quantise_group, numel, device),),
        "sum": (partial(sum_group, numel, device),),
    }


def adamw_region(inputs: list[Any]) -> tuple[()]:
    """The update as the emitted step has it, on ATen's kernels."""
    master, grad, first, second, step, low, hyper = inputs
    inputs.clear()
    _aten.div_.Tensor(grad, 2)
    cast = _aten._to_copy.default(grad, dtype=torch.float32)
    _aten._foreach_add_.Scalar([step], 1)
    _aten._fused_adamw_.default(
        [master], [cast], [first], [second], [], [step], lr=hyper[0], beta1=hyper[1], beta2=hyper[2],
        weight_decay=hyper[3], eps=hyper[4], amsgrad=False, maximize=False,
    )  # fmt: skip
    _aten.copy_.default(low, master)
    return ()


def adamw_written_out(master: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor, low: Tensor) -> None:
    """The same arithmetic as operators that a compiler can fuse."""
    scaled = grad.div(2).float()
    step.add_(1)
    master.mul_(1 - LR * DECAY)
    first.lerp_(scaled, 1 - BETA1)
    second.mul_(BETA2).addcmul_(scaled, scaled, value=1 - BETA2)
    root = second.sqrt() / (1 - BETA2**step).sqrt() + EPS
    master.sub_(LR / (1 - BETA1**step) * first / root)
    low.copy_(master)


def update_inputs(numel: int, device: torch.device) -> list[Tensor]:
    """Master, gradient, moments, step and parameters of a bucket."""
    grad = torch.randn(numel, device=device).bfloat16()
    first, second = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    master = torch.randn(numel, device=device)
    return [master, grad, first, second, torch.zeros((), device=device), master.bfloat16()]


def update_group(numel: int, device: torch.device) -> Group:
    """An update by ATen, by Inductor and by the kernel."""
    from zerofx.codegen.kernels.update import make_update_kernel

    tensors, hyper = update_inputs(numel, device), (LR, BETA1, BETA2, DECAY, EPS)
    kernel = make_update_kernel(adamw_region, [*tensors, hyper], dying={1})
    compiled = torch.compile(adamw_written_out, fullgraph=True)
    contenders = {
        "torch": lambda: adamw_region([*tensors, hyper]),
        "torch.compile": lambda: compiled(*tensors),
        "kernel": lambda: kernel([*tensors, hyper]),
    }
    return Group("update", contenders, 28 * numel)


def quantise_group(numel: int, device: torch.device) -> Group:
    """Rounding to 8 bits by ATen, by Inductor and by the kernel."""
    values = torch.randn(numel, device=device).bfloat16()
    compiled = torch.compile(quantise.quantise_at_once, fullgraph=True)
    contenders = {
        "torch": lambda: quantise.quantise(values, NUM_PARTS, "int8"),
        "torch.compile": lambda: compiled(values, NUM_PARTS, "int8"),
        "kernel": lambda: torch.ops.zerofx.launch_quantise(values, NUM_PARTS, "int8"),
    }
    return Group("quantise", contenders, 2 * numel + quantise.packed_bytes(numel, "int8"))


def sum_group(numel: int, device: torch.device) -> Group:
    """The sum of parts in 8 bits by ATen, by Inductor and by the kernel."""
    packed = quantise.quantise(torch.randn(numel, device=device), NUM_PARTS, "int8")
    compiled = torch.compile(quantise.dequantise_sum_at_once, fullgraph=True)
    args = (packed, NUM_PARTS, "int8", torch.bfloat16)
    contenders = {
        "torch": lambda: quantise.dequantise_sum(*args),
        "torch.compile": lambda: compiled(*args),
        "kernel": lambda: torch.ops.zerofx.launch_dequantise_sum(*args),
    }
    return Group("sum", contenders, packed.numel() + 2 * numel // NUM_PARTS)


def norms_group(numel: int, device: torch.device) -> Group:
    """The sum of squares by torch's norms, by Inductor and by the kernel."""
    values = torch.randn(numel, device=device).bfloat16()
    compiled = torch.compile(squares_written_out, fullgraph=True)
    contenders = {
        "torch": lambda: norms.square_sum(values),
        "torch.compile": lambda: compiled(values),
        "kernel": lambda: torch.ops.zerofx.launch_square_sum(values),
    }
    return Group("norms", contenders, 2 * numel)


def squares_written_out(values: Tensor) -> Tensor:
    """Squares of whole rows as operators that a compiler can fuse."""
    return values.view(-1, norms.ROW).float().square().sum(1).double().sum(0, keepdim=True)


def loss_whole(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Loss and both gradients, with whole logits."""
    loss = F.cross_entropy(F.linear(x, weight).float(), target)
    return (loss, *torch.autograd.grad(loss, (x, weight)))


def loss_chunked(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The same by torch's own chunks."""
    loss = F.linear_cross_entropy(x, weight, target, options=torch.nn.LinearCrossEntropyOptions())
    return (loss, *torch.autograd.grad(loss, (x, weight)))


def loss_by_classes(x: Tensor, weight: Tensor, target: Tensor, num_tiles: int) -> tuple[Tensor, ...]:
    """The same by tiles of classes, as ``passes/lib/tile_classes.py`` writes them."""
    x, weight = x.detach(), weight.detach()
    bounds = [weight.shape[0] * n // num_tiles for n in range(num_tiles + 1)]
    runs = [(start, weight[start:end]) for start, end in itertools.pairwise(bounds)]
    is_counted, stats = target != IGNORED, None
    for start, part in runs:
        stats = ops.softmax_chunk(x @ part.t(), target, start, stats)
    assert stats is not None
    log_sums = stats[1].log() + stats[0]
    count = is_counted.sum(dtype=torch.float32)
    loss = torch.where(is_counted, log_sums - stats[2], 0.0).sum() / count
    grad_x = torch.zeros(x.shape, device=x.device)
    parts = []
    for start, part in runs:
        grad = x @ part.t()
        ops.softmax_gradient(grad, target, start, log_sums, 1 / count, IGNORED)
        grad_x += grad @ part
        parts.append(grad.t() @ x)
    return loss, grad_x.to(x.dtype), torch.cat(parts)


def loss_inputs(num_rows: int, dim: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and targets of an output layer."""
    x = torch.randn(num_rows, dim, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(num_classes, dim, device=device) / dim**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(num_classes, (num_rows,), device=device)


def loss_group(num_rows: int, dim: int, num_classes: int, device: torch.device) -> Group:
    """A loss with whole logits under Inductor, by torch's chunks, and by tiles of classes."""
    inputs = loss_inputs(num_rows, dim, num_classes, device)
    compiled = torch.compile(loss_whole)
    contenders: dict[str, Callable[[], object]] = {"torch.compile": lambda: compiled(*inputs)}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        contenders["torch, chunked"] = lambda: loss_chunked(*inputs)
    for num_tiles in (8, 32):
        contenders[f"{num_tiles} tiles of classes"] = partial(loss_by_classes, *inputs, num_tiles)
    return Group("loss", contenders)
