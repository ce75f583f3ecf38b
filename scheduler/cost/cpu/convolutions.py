"""Memory that a CPU's convolutions take and give back while they run.

oneDNN copies images, filters and results into layouts of its own, with channels rounded up to whole blocks; which, it
decides from shapes, strides and the processor. So each convolution is measured
(``scheduler/cost/cpu/kernel_memory.py``). One that is too large to be called while a step is planned is measured on two
smaller batches: what it takes for filters stays, and what it takes for images grows with their number and their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.aliasing import storage_bytes, tensors_in, tensors_of
from zerofx.scheduler.cost.cpu.kernel_memory import call_memory
from zerofx.torch_private.tensors import suggest_memory_format

_convolution = torch.ops.aten.convolution.default
_backward = torch.ops.aten.convolution_backward.default
_FEWEST_ROWS = 8  # of an image that is made smaller
_ALIKE = 16  # images from which on ATen hands all convolutions to oneDNN, on one thread


def convolution_bytes(node: fx.Node) -> int | None:
    """Of ``aten.convolution`` or ``aten.convolution_backward``; None where it cannot be found."""
    return _measured(node.target, _arguments(node), tensors_of(node))


def compiled_convolution_bytes(node: fx.Node) -> int | None:
    """Of either operator in a compiled region, at least: Inductor may copy channels-last images, channel by channel.

    Whether it does is known once the region is compiled. None where nothing is known.
    """
    args, made = _arguments(node), tensors_of(node)
    found = _measured(node.target, args, made)
    images = args[1] if node.target is _backward else args[0]
    if found is None or suggest_memory_format(images) is torch.contiguous_format:
        return found
    for index in (0, 1) if node.target is _backward else (0,):
        args[index] = torch.empty_like(args[index], memory_format=torch.contiguous_format)
    copied = _measured(node.target, args, made)
    return found if copied is None else min(found, storage_bytes(images) + copied)


def _arguments(node: fx.Node) -> list[Any]:
    return list(fx.map_arg(node.args, lambda source: source.meta["val"]))


def _measured(target: Any, args: list[Any], made: tuple[Tensor, ...]) -> int | None:
    whole = call_memory(target, args, made)
    if whole is not None:
        return whole.inside
    images = args[1] if target is _backward else args[0]
    found: list[tuple[int, int]] = []  # rows of all images, bytes
    for batch, rows in _smaller(images.shape[0], images.shape[2]):
        cut = _narrowed(target, args, batch, rows)
        held = call_memory(target, cut, tuple(tensors_in(target(*cut))))
        if held is not None:
            found.append((batch * rows, held.inside))
        if len(found) == 2:
            (many, more), (few, less) = found
            num_rows = int(images.shape[0] * images.shape[2])
            return more + (num_rows - many) * max(0, more - less) // (many - few)
    return None


def _smaller(batch: int, rows: int) -> Iterator[tuple[int, int]]:
    """Fewer images, of fewer rows: half as many in each. That other kernels take them is put off; a single image is
    dense where several of them are not."""
    for fewest_images, fewest_rows in ((_ALIKE, rows), (_ALIKE, _FEWEST_ROWS), (2, _FEWEST_ROWS)):
        while batch >= 2 * fewest_images:
            batch //= 2
            yield batch, rows
        while rows >= 2 * fewest_rows:
            rows //= 2
            yield batch, rows


def _narrowed(target: Any, args: list[Any], batch: int, rows: int) -> list[Any]:
    """The arguments with fewer images, of fewer rows."""
    if target is not _backward:
        return [_cut(args[0], batch, rows), *args[1:]]
    grad, images, filters, _, *how, _mask = args
    images = _cut(images, batch, rows)
    return [_cut(grad, batch, _convolution(images, filters, None, *how).shape[2]), images, *args[2:]]


def _cut(value: Tensor, batch: int, rows: int) -> Tensor:
    """One that lies in memory as ``value`` does: what is dense stays so."""
    shape, stride = list(value.shape), list(value.stride())
    for dim, size in ((0, batch), (2, rows)):
        outer = [other for other in range(value.dim()) if stride[other] > stride[dim] > 0]
        for other in outer:
            stride[other] = stride[other] * size // shape[dim]
        shape[dim] = size
    return value.new_empty_strided(shape, stride)
