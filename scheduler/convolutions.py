"""Memory that a CPU's convolutions take and give back while they run.

oneDNN copies images, filters and results into its own blocked layout; ATen unfolds images. The rules were found by
comparing the allocations that ``torch.profiler`` records with the bytes of the outputs (torch 2.13, x86 with AVX2 or
AVX-512), and are held to that by ``tests/scheduler/test_workspace.py``. Transposed convolutions, groups of several
channels, and groups in other than two dimensions have none, nor has half precision: they are measured
(``scheduler/kernel_memory.py``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from zerofx.node_facts import given, ints
from zerofx.scheduler.storage import storage_bytes, tensors_of


def compiled_convolution_bytes(node: fx.Node) -> int | None:
    """Of either operator in a compiled region, at least: Inductor may copy channels-last images, channel by channel.

    Whether it does is known once the region is compiled. None where there is no rule.
    """
    is_backward = node.target is torch.ops.aten.convolution_backward.default
    rule = convolution_backward_bytes if is_backward else convolution_bytes
    images, found = given(node, 1 if is_backward else 0), rule(node)
    if found is None or not _channels_last(images):
        return found
    copied = rule(node, copied=True)
    return found if copied is None else min(found, storage_bytes(images) + copied)


def convolution_bytes(node: fx.Node, *, copied: bool = False) -> int | None:
    """Of ``aten.convolution``; None where there is no rule. ``copied``: with its images channel by channel."""
    if node.args[6] or _is_grouped(given(node, 1), node.args[8]) or is_half(given(node, 0)):
        return None
    images, filters, result = given(node, 0), given(node, 1), tensors_of(node)[0]
    groups = node.args[8]
    assert isinstance(groups, int)
    if not _by_onednn(node, images, filters, groups, node.args[3], node.args[5]):
        return _columns(images, filters, result)
    if _channels_last(images) and not copied:
        return (
            storage_bytes(filters) if _is_depthwise(filters, groups) else _filters_last(filters, groups, inputs=False)
        )
    is_pointwise = all(size == 1 for size in filters.shape[2:])
    flat = groups == 1 and images.shape[1] < _block() and not is_pointwise
    inside = 0 if flat else _blocked(images)
    outside = _blocked(result)
    copies = outside + storage_bytes(result)
    return max(inside + _blocked_filters(filters, groups, flat) + outside, copies) - storage_bytes(result)


def convolution_backward_bytes(node: fx.Node, *, copied: bool = False) -> int | None:
    """The gradient of the images, then that of the filters, each between copies in oneDNN's layout; None where there is
    no rule. ``copied``: with its images channel by channel."""
    if node.args[7] or _is_grouped(given(node, 2), node.args[9]) or (node.args[9] != 1 and given(node, 1).dim() != 4):
        return None
    if is_half(given(node, 1)):
        return None
    grad, images, filters = given(node, 0), given(node, 1), given(node, 2)
    groups, mask = node.args[9], node.args[10]
    assert isinstance(groups, int) and isinstance(mask, list | tuple)
    of_images, of_filters = (
        storage_bytes(value) if wanted else 0 for value, wanted in zip((images, filters), mask, strict=False)
    )
    if not _by_onednn(node, images, filters, groups, node.args[4], node.args[6]):
        return _columns(images, filters, grad)
    if _channels_last(images) and not copied:
        is_wide = images.shape[1] >= _block() or all(size == 1 for size in filters.shape[2:])
        inner = _filters_last(filters, groups, inputs=True) if mask[0] and not _is_depthwise(filters, groups) else 0
        return max(inner - of_filters, _filters_last(filters, groups, inputs=is_wide) + of_filters if mask[1] else 0)
    peaks = [of_images + of_filters]
    if mask[0]:
        inside = _blocked(images)
        peaks.append(_blocked(grad) + _blocked_filters(filters, groups, flat=False) + inside)
        strided = any(step != 1 for step in ints(node.args[4])) or images.dtype != torch.float32
        peaks.append(inside + of_images * (2 if strided else 1))
    if mask[1]:
        flat = groups == 1 and images.shape[1] <= 3
        block = _NARROW if groups == 1 and 3 < images.shape[1] < _block() else _block()
        taken = 0 if flat else _blocked(images, block)
        inside = _blocked_filters(filters, groups, flat, block)
        peaks += [of_images + _blocked(grad, block) + taken + inside, of_images + inside + of_filters]
    return max(peaks) - of_images - of_filters


def is_half(value: Tensor) -> bool:
    """Whether oneDNN packs it, if its kernels for half precision take it: how is the processor's."""
    return value.dtype in (torch.bfloat16, torch.float16)


def _by_onednn(node: fx.Node, images: Tensor, filters: Tensor, groups: int, stride: object, dilation: object) -> bool:
    """Whether ATen hands a convolution to oneDNN (``use_mkldnn`` in aten/src/ATen/native/Convolution.cpp)."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled or images.dtype != torch.float32:
        return False
    is_pointwise = all(size == 1 for size in filters.shape[2:])
    plain = all(step == 1 for step in (*ints(stride), *ints(dilation)))
    worth_threads = not plain or images.shape[0] >= 16 or not is_pointwise or torch.get_num_threads() > 1
    large = images.shape[0] > 1 or images.numel() > 20480 or all(size > 3 for size in filters.shape[2:])
    return worth_threads and (groups > 1 or large)


def _columns(images: Tensor, filters: Tensor, result: Tensor) -> int:
    """ATen's own convolution unfolds the images, unless its filters are points."""
    if all(size == 1 for size in filters.shape[2:]):
        return 0
    patch = filters.shape[1] * math.prod(filters.shape[2:])
    return images.shape[0] * patch * math.prod(result.shape[2:]) * images.element_size()


# Filters of fewer inputs than a block have their gradient computed by oneDNN's kernel for AVX2, in blocks of this many.
_NARROW = 8


def _block() -> int:
    """Channels in a block of oneDNN's layout: one vector of float32."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _blocked(images: Tensor, block: int = 0) -> int:
    """Bytes of ``[batch, channels, ...]`` with the channels rounded up to whole blocks, unless there is only one."""
    if images.dtype != torch.float32 or images.shape[1] == 1:
        return storage_bytes(images)
    channels = _rounded(images.shape[1], block)
    return images.shape[0] * channels * math.prod(images.shape[2:]) * images.element_size()


def _blocked_filters(filters: Tensor, groups: int, flat: bool, block: int = 0) -> int:
    """Bytes of filters ``[outputs, inputs, ...]`` in blocks; ``flat``: of few inputs, which are left as they are."""
    if groups > 1 or filters.dtype != torch.float32:
        return storage_bytes(filters)
    inputs = filters.shape[1] if flat else _rounded(filters.shape[1], block)
    return _rounded(filters.shape[0], block) * inputs * math.prod(filters.shape[2:]) * filters.element_size()


def _is_grouped(filters: Tensor, groups: object) -> bool:
    """Whether there are groups of more than one channel, or of single points."""
    return groups != 1 and (filters.shape[1] != 1 or all(size == 1 for size in filters.shape[2:]))


def _is_depthwise(filters: Tensor, groups: int) -> bool:
    return groups > 1 and filters.shape[1] == 1


def _filters_last(filters: Tensor, groups: int, *, inputs: bool) -> int:
    """Bytes of the filters of channels-last images: a group's outputs in blocks, its ``inputs`` too where asked."""
    if filters.dtype != torch.float32:
        return storage_bytes(filters)
    taken = _rounded(filters.shape[1]) if inputs or groups > 1 else filters.shape[1]
    return groups * _rounded(filters.shape[0] // groups) * taken * math.prod(filters.shape[2:]) * 4


def _rounded(channels: int, block: int = 0) -> int:
    block = block or _block()
    return -(-channels // block) * block


def _channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last)
