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

LR, BETA1, BETA2, DECAY, EPS = 1e-3, 0.9, 0.95, 0.1, 1e-8
IGNORED = -100
_aten = torch.ops.aten


def groups(
    numel: int, num_rows: int, dim: int, num_classes: int, device: torch.device
) -> dict[str, tuple[Callable[[], Group], ...]]:
    """Of buckets of ``numel`` elements, and of an output layer, by name; each with its tensors once it is called."""
    return {
        "update": (partial(update_group, numel, device),),
        "loss": (partial(loss_group, num_rows, dim, num_classes, device),),
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
    grad_x, grad_weight = torch.zeros(x.shape, device=x.device), torch.empty_like(weight)
    for start, part in runs:
        grad = x @ part.t()
        ops.softmax_gradient(grad, target, start, log_sums, 1 / count, IGNORED)
        grad_x += grad @ part
        torch.mm(grad.t(), x, out=grad_weight[start : start + len(part)])
    return loss, grad_x.to(x.dtype), grad_weight


def row_tile(x: Tensor, weight: Tensor, target: Tensor, count: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """The sum of the loss of some rows, their gradient, and the weight's summed up to them in float32."""
    softmax = _aten._log_softmax.default((x @ weight.t()).float(), 1, False)
    loss = F.nll_loss(softmax, target, ignore_index=IGNORED, reduction="sum")
    grad = _aten.nll_loss_backward.default(torch.ones_like(count), softmax, target, None, 1, IGNORED, count)
    grad = _aten._log_softmax_backward_data.default(grad, softmax, 1, torch.float32).to(x.dtype)
    return loss, grad @ weight, total + grad.t() @ x


def loss_by_rows(
    x: Tensor, weight: Tensor, target: Tensor, num_tiles: int, tile: Callable[..., tuple[Tensor, ...]] = row_tile
) -> tuple[Tensor, ...]:
    """The same by tiles of rows, as ``passes/tile.py`` writes them; ``tile`` is what a region is compiled to."""
    x, weight = x.detach(), weight.detach()
    count = (target != IGNORED).sum(dtype=torch.float32)
    total = torch.zeros(weight.shape, device=x.device)
    losses, grads = [], []
    for rows, targets in zip(x.chunk(num_tiles), target.chunk(num_tiles), strict=True):
        loss, grad, total = tile(rows, weight, targets, count, total)
        losses.append(loss)
        grads.append(grad)
    return torch.stack(losses).sum() / count, torch.cat(grads), total.to(weight.dtype)


def loss_inputs(num_rows: int, dim: int, num_classes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weight and targets of an output layer."""
    x = torch.randn(num_rows, dim, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(num_classes, dim, device=device) / dim**0.5).bfloat16().requires_grad_()
    return x, weight, torch.randint(num_classes, (num_rows,), device=device)


def loss_group(num_rows: int, dim: int, num_classes: int, device: torch.device) -> Group:
    """A loss with whole logits under Inductor, by torch's chunks, by tiles of rows under Inductor, and of classes."""
    inputs = loss_inputs(num_rows, dim, num_classes, device)
    compiled = torch.compile(loss_whole)
    contenders: dict[str, Callable[[], object]] = {"torch.compile": lambda: compiled(*inputs)}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        contenders["torch, chunked"] = lambda: loss_chunked(*inputs)
    compiled_tile = torch.compile(row_tile)
    for num_tiles in (4, 8, 32):
        by_rows = partial(loss_by_rows, *inputs, num_tiles, compiled_tile)
        contenders[f"{num_tiles} tiles of rows"] = by_rows
    for num_tiles in (8, 32):
        contenders[f"{num_tiles} tiles of classes"] = partial(loss_by_classes, *inputs, num_tiles)
    return Group("loss", contenders)
