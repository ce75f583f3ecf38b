"""Memory that an operator takes and gives back while it runs, beyond its outputs: what the profiler's allocations show.

Eager kernels on CPU keep such buffers where one would not look: oneDNN copies images, filters and results of a
convolution into its own blocked layout; attention has a tile of scores for each thread; operators of mixed dtypes
convert their inputs first. Each rule below was found by comparing the allocations that ``torch.profiler`` records
inside one operator with the bytes of its outputs (torch 2.13, x86 with AVX2 or AVX-512), and is held to that by
``tests/scheduler/test_workspace.py``.

Not covered: buffers of less than some 100 KiB (index lists, oneDNN's scratchpads), convolutions in a few groups of many
channels, points on groups (which ATen takes apart on one thread), the packing of half-precision matrix
products on CPU (about one operand), and CUDA, where cuBLAS and cuDNN keep workspaces of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from zerofx.attention import backward_scratch_numel, forward_scratch_numel
from zerofx.norms import square_sum_workspace_bytes
from zerofx.quantise import BLOCK, ENCODINGS, unpacked_numel
from zerofx.scheduler.storage import mutated_inputs, storage_bytes, tensors_of


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that ``node`` holds at its worst moment beyond inputs and outputs; 0 where no rule says otherwise."""
    if not isinstance(node.target, OpOverload):
        return 0
    rule = _rule(node.target)
    if rule is None:
        return 0
    values = (*tensors_of(node), *(value for source in node.all_input_nodes for value in tensors_of(source)))
    if not values or any(value.device.type != "cpu" for value in values):
        return 0
    return rule(node)


@functools.cache
def _rule(target: OpOverload) -> Callable[[fx.Node], int] | None:
    return _RULES.get(target._schema.name, _converted if torch.Tag.pointwise in target.tags else None)


def is_left_to_aten(node: fx.Node) -> bool:
    """Whether Inductor calls ATen for an operator that has a workspace, rather than generate code of its own."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in _LEFT_TO_ATEN


def _value(node: fx.Node, index: int) -> Tensor:
    source = node.args[index]
    assert isinstance(source, fx.Node)
    found = source.meta["val"]
    assert isinstance(found, Tensor)
    return found


def _converted(node: fx.Node) -> int:
    """Pointwise operators convert inputs of another dtype than they compute in, those with a dimension as a whole."""
    inputs = [value for source in node.all_input_nodes for value in tensors_of(source)]
    sized = [value for value in inputs if value.dim() > 0 and value.dtype != torch.bool]
    if not sized or node.target is torch.ops.aten._to_copy.default or node.target is torch.ops.aten.copy_.default:
        return 0
    common = sized[0].dtype
    for value in sized[1:]:
        common = torch.promote_types(common, value.dtype)
    written = {value for source in mutated_inputs(node) for value in tensors_of(source)}
    return sum(value.numel() * common.itemsize for value in sized if value.dtype != common and value not in written)


def _reduction(node: fx.Node) -> int:
    """Sums convert an input of another dtype than the result's first; a mean in half precision is taken in float32."""
    value, result = _value(node, 0), tensors_of(node)[0]
    if node.target is torch.ops.aten.mean.dim and result.dtype in (torch.bfloat16, torch.float16):
        return (value.numel() + result.numel()) * 4
    return value.numel() * result.dtype.itemsize if value.dtype != result.dtype else 0


def _dropout(node: fx.Node) -> int:
    """The mask is drawn in the input's dtype and then stored as booleans."""
    return storage_bytes(_value(node, 0))


def _softmax_chunk(node: fx.Node) -> int:
    """A copy of the logits in float32; of each row the maximum, a shift, the target's place and logit, and the sum."""
    logits = _value(node, 0)
    return logits.numel() * 4 + logits.shape[0] * 25


def _softmax_gradient(node: fx.Node) -> int:
    """A copy of the logits in float32, and of each row the target's place."""
    logits = _value(node, 0)
    return logits.numel() * 4 + logits.shape[0] * 17


def _one_more_input(node: fx.Node) -> int:
    return storage_bytes(_value(node, 0))


def _rms_norm(node: fx.Node) -> int:
    """Composed of other operators, in float32."""
    value = _value(node, 0)
    return value.numel() * 4 + (0 if value.dtype == torch.float32 else value.numel() * 6)


def _layer_norm_backward(node: fx.Node) -> int:
    """Sums for weight and bias, a row of each for every thread."""
    return 2 * torch.get_num_threads() * math.prod(_ints(node.args[2])) * 4


def _quantisation(node: fx.Node) -> int:
    """``zerofx/quantise.py`` takes one part at a time: quotients, beside the values in float32 or what they are rounded
    to, scales, and what these are made of."""
    values, num_parts, encoding = _value(node, 0), node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    numel, dtype = values.numel() // num_parts, ENCODINGS[encoding].dtype
    beside = dtype.itemsize if dtype.is_floating_point and values.dtype == torch.float32 else 4
    return numel * (4 + beside) + numel // BLOCK * (4 + values.element_size())


def _dequantisation(node: fx.Node) -> int:
    """Codes and values of one part in float32."""
    num_parts, encoding = node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    return unpacked_numel(_value(node, 0).numel() // num_parts, encoding) * 8


def _dequantised_sum(node: fx.Node) -> int:
    """The same beside the sum in float32; the result is made when they are gone."""
    result = tensors_of(node)[0]
    return _dequantisation(node) + result.numel() * 4 - storage_bytes(result)


def _square_sum(node: fx.Node) -> int:
    values = _value(node, 0)
    return square_sum_workspace_bytes(values.numel(), values.dtype)


# aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: tiles of queries by number of queries, and of keys.
_KEY_TILE = 512


def _query_tile(num_queries: int) -> int:
    return 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32


def _attention(node: fx.Node) -> int:
    """Scores, running maximum and sum, and the result of one tile of queries, in float32 for each thread."""
    query, key = _value(node, 0), _value(node, 1)
    rows, columns = _query_tile(query.shape[2]), min(_KEY_TILE, key.shape[2])
    scores = rows * columns
    each = 4 * (scores + 2 * rows + rows * query.shape[3]) + (2 * scores if query.dtype != torch.float32 else 0)
    return torch.get_num_threads() * each


def _attention_backward(node: fx.Node) -> int:
    """Scores and their gradients for each thread; a gradient that is laid out unlike the result is copied."""
    grad, query, key, result = _value(node, 0), _value(node, 1), _value(node, 2), _value(node, 4)
    rows, columns = _query_tile(query.shape[2]), min(_KEY_TILE, key.shape[2])
    each = 2 * rows * columns * (4 if query.dtype == torch.float32 else 6)
    copied = storage_bytes(result) if grad.stride() != result.stride() else 0
    return torch.get_num_threads() * each + 4 * rows + copied


def _own_attention(node: fx.Node) -> int:
    return torch.get_num_threads() * 4 * forward_scratch_numel(_value(node, 0).shape[3])


def _own_attention_backward(node: fx.Node) -> int:
    """A gradient whose rows are not in one piece is copied."""
    grad = _value(node, 0)
    copied = storage_bytes(grad) if grad.stride(3) != 1 else 0
    return torch.get_num_threads() * 4 * backward_scratch_numel(grad.shape[3]) + copied


def _convolution(node: fx.Node) -> int:
    images, filters, result = _value(node, 0), _value(node, 1), tensors_of(node)[0]
    groups = node.args[8]
    assert isinstance(groups, int)
    if not _by_onednn(node, images, filters, groups, node.args[3], node.args[5]):
        return _columns(images, filters, result)
    if _channels_last(images):
        return (
            storage_bytes(filters) if _is_depthwise(filters, groups) else _filters_last(filters, groups, inputs=False)
        )
    is_pointwise = all(size == 1 for size in filters.shape[2:])
    flat = groups == 1 and images.shape[1] < _block() and not is_pointwise
    inside = 0 if flat else _blocked(images)
    outside = _blocked(result)
    # Half precision is computed channels-last, which is copied twice on its way back.
    copies = outside + storage_bytes(result) * (2 if images.dtype != torch.float32 else 1)
    return max(inside + _blocked_filters(filters, groups, flat) + outside, copies) - storage_bytes(result)


def _convolution_backward(node: fx.Node) -> int:
    """The gradient of the images, then that of the filters, each between copies in oneDNN's layout."""
    grad, images, filters = _value(node, 0), _value(node, 1), _value(node, 2)
    groups, mask = node.args[9], node.args[10]
    assert isinstance(groups, int) and isinstance(mask, list | tuple)
    of_images, of_filters = (
        storage_bytes(value) if wanted else 0 for value, wanted in zip((images, filters), mask, strict=False)
    )
    if not _by_onednn(node, images, filters, groups, node.args[4], node.args[6]):
        return _columns(images, filters, grad)
    if _channels_last(images):
        is_wide = images.shape[1] >= _block() or all(size == 1 for size in filters.shape[2:])
        copied = _filters_last(filters, groups, inputs=True) if mask[0] and not _is_depthwise(filters, groups) else 0
        return max(copied - of_filters, _filters_last(filters, groups, inputs=is_wide) + of_filters if mask[1] else 0)
    peaks = [of_images + of_filters]
    if mask[0]:
        inside = _blocked(images)
        peaks.append(_blocked(grad) + _blocked_filters(filters, groups, flat=False) + inside)
        strided = any(step != 1 for step in _ints(node.args[4])) or images.dtype != torch.float32
        peaks.append(inside + of_images * (2 if strided else 1))
    if mask[1]:
        flat = groups == 1 and images.shape[1] <= 3
        block = _NARROW if groups == 1 and 3 < images.shape[1] < _block() else _block()
        taken = 0 if flat else _blocked(images, block)
        inside = _blocked_filters(filters, groups, flat, block)
        peaks += [of_images + _blocked(grad, block) + taken + inside, of_images + inside + of_filters]
    return max(peaks) - of_images - of_filters


def _by_onednn(node: fx.Node, images: Tensor, filters: Tensor, groups: int, stride: object, dilation: object) -> bool:
    """Whether ATen hands a convolution to oneDNN (``use_mkldnn`` in aten/src/ATen/native/Convolution.cpp)."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if images.dtype != torch.float32:
        return True
    is_pointwise = all(size == 1 for size in filters.shape[2:])
    plain = all(step == 1 for step in (*_ints(stride), *_ints(dilation)))
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


def _ints(values: object) -> tuple[int, ...]:
    assert isinstance(values, list | tuple)
    return tuple(int(value) for value in values)


_RULES: dict[str, Callable[[fx.Node], int]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm_backward": _one_more_input,
    "aten::native_dropout": _dropout,
    "aten::logsumexp": _one_more_input,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::mean": _reduction,
    "aten::sum": _reduction,
    "aten::cumsum": _reduction,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "zerofx::attention": _own_attention,
    "zerofx::attention_backward": _own_attention_backward,
    "zerofx::softmax_chunk": _softmax_chunk,
    "zerofx::softmax_gradient": _softmax_gradient,
    "zerofx::quantise": _quantisation,
    "zerofx::dequantise": _dequantisation,
    "zerofx::dequantise_sum": _dequantised_sum,
    "zerofx::square_sum": _square_sum,
}

_LEFT_TO_ATEN = frozenset(
    {
        "aten::convolution",
        "aten::convolution_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
)
