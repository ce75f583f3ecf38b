"""Memory that an operator takes and gives back while it runs, beyond its outputs: what the profiler's allocations show.

Eager kernels on CPU keep such buffers where one would not look: convolutions copy images, filters and results into
another layout; attention has a tile of scores for each thread; operators of mixed dtypes convert their inputs first.
What is known of an operator is, in this order: a rule; that it holds nothing; that it is pointwise, which holds inputs
that it converts; or else what its kernel is seen to take when it is called (``scheduler/kernel_memory.py``). Rules were
found by comparing the allocations that ``torch.profiler`` records inside one operator with the bytes of its outputs
(torch 2.13), and are held to that, as is the list of what holds nothing, by ``tests/scheduler/test_workspace.py``.

Not covered: oneDNN's scratchpads of some KiB, and CUDA, where cuBLAS and cuDNN keep workspaces of their own.
``is_unknown`` says of which operators on CPU nothing is known: those that are not ATen's, and those that cannot be
called on values that are made up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from zerofx.attention import KERNEL as ATTENTION
from zerofx.attention import backward_scratch_numel, forward_scratch_numel, has_kernel, mask_scratch_numel
from zerofx.node_facts import given, ints, tensor
from zerofx.norms import square_sum_workspace_bytes
from zerofx.products import KERNEL as PRODUCTS
from zerofx.products import has_kernel as has_product
from zerofx.products import scratch_bytes
from zerofx.quantise import BLOCK, ENCODINGS, unpacked_numel
from zerofx.scheduler.convolutions import compiled_convolution_bytes, convolution_bytes
from zerofx.scheduler.kernel_memory import measured_bytes, measured_call_bytes
from zerofx.scheduler.storage import mutated_inputs, storage_bytes, tensors_of

Rule = Callable[[fx.Node], int | None]


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that ``node`` holds at its worst moment beyond inputs and outputs; 0 on other devices than CPUs."""
    return _known_bytes(node) or 0


def compiled_workspace_bytes(node: fx.Node, kernels: Collection[str]) -> int:
    """``workspace_bytes`` in a compiled region, where Inductor generates code for most operators, and ``kernels`` of
    zerofx's own (``codegen/kernels/table.py``) are in use for some of ATen's."""
    name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
    if name in _COMPILED and _is_on_cpu(node):
        kernel, rule = _COMPILED[name]
        found = rule(node) if kernel is None or kernel in kernels else None
        if found is not None:
            return found
    return workspace_bytes(node) if _is_left_to_aten(node) else 0


def is_unknown(node: fx.Node) -> bool:
    """Whether an operator on CPU tensors may hold bytes that ``workspace_bytes`` lacks."""
    return _known_bytes(node) is None


def _known_bytes(node: fx.Node) -> int | None:
    target = node.target
    if not isinstance(target, OpOverload):
        return 0
    rule = _rule(target)
    if rule is _nothing or not _is_on_cpu(node):
        return 0
    found = rule(node)
    return measured_bytes(node) if found is None else found


def _is_on_cpu(node: fx.Node) -> bool:
    values = (*tensors_of(node), *(value for source in node.all_input_nodes for value in tensors_of(source)))
    return bool(values) and all(value.device.type == "cpu" for value in values)


@functools.cache
def _rule(target: OpOverload) -> Rule:
    """What is known of an operator: a rule gives None for a call that it does not cover."""
    name = target._schema.name
    if name in _RULES:
        return _RULES[name]
    space, _, own = name.partition("::")
    is_view = any(result.alias_info and not result.alias_info.is_write for result in target._schema.returns)
    if is_view or space == "zerofx" or (space == "aten" and own.removesuffix("_") in _HOLDS_NOTHING):
        return _nothing
    if space == "aten" and own.removesuffix("_") in _HOLDS_NOTHING_DENSE:
        return _nothing_if_dense
    return _converted if torch.Tag.pointwise in target.tags else _not_known


def _nothing(_node: fx.Node) -> int:
    return 0


def _nothing_if_dense(node: fx.Node) -> int | None:
    return 0 if _reads_dense(node) else None


def _reads_dense(node: fx.Node) -> bool:
    return all(tensor.is_contiguous() for source in node.all_input_nodes for tensor in tensors_of(source))


def _not_known(_node: fx.Node) -> None:
    return None


def _is_left_to_aten(node: fx.Node) -> bool:
    """Whether Inductor calls ATen for an operator that has a workspace, rather than generate code of its own."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return target._schema.name in _LEFT_TO_ATEN or _rule(target) in (_not_known, _product)


def _converted(node: fx.Node) -> int | None:
    """Pointwise operators convert inputs of another dtype than they compute in, those with a dimension as a whole."""
    target = node.target
    assert isinstance(target, OpOverload)
    inputs = [value for source in node.all_input_nodes for value in tensors_of(source)]
    if any(value.dtype.is_complex for value in (*inputs, *tensors_of(node))):
        return None
    sized = [value for value in inputs if value.dim() > 0]
    if target._schema.name in _CONDITIONED:
        sized = [value for value in sized if value.dtype != torch.bool]
    if not sized:
        return 0
    common = sized[0].dtype
    for value in sized[1:]:
        common = torch.promote_types(common, value.dtype)
    made = tensors_of(node)
    if made and made[0].dtype.is_floating_point and not common.is_floating_point:
        common = made[0].dtype
    written = {value for source in mutated_inputs(node) for value in tensors_of(source)}
    return sum(value.numel() * common.itemsize for value in sized if value.dtype != common and value not in written)


def _product(node: fx.Node) -> int | None:
    """Matrix products copy what a BLAS cannot read: a matrix neither of whose dimensions is dense. In half precision
    oneDNN packs operands too."""
    matrices = [value for source in node.all_input_nodes for value in tensors_of(source) if value.dim() >= 2]
    return 0 if all(_is_matrix(value) and not _is_half(value) for value in matrices) else None


def _product_into(node: fx.Node) -> int:
    """What ATen's product takes that is written over the first argument."""
    into, left, right = (given(node, index) for index in range(3))
    if not _is_half(left):
        return 0
    return measured_call_bytes(torch.ops.aten.mm.out, [left, right], {"out": into}, (into,)) or 0


def _is_half(value: Tensor) -> bool:
    """Whether oneDNN packs it, if its kernels for half precision take it: how is the processor's."""
    return value.dtype in (torch.bfloat16, torch.float16)


def _is_matrix(value: Tensor) -> bool:
    (rows, columns), (down, across) = value.shape[-2:], value.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _compiled_product(node: fx.Node) -> int | None:
    """Where it is taken from ATen."""
    *bias, left, right = (given(node, index) for index in range(len(node.args)))
    is_taken = has_product(left, right, bias[0] if bias else None, into="out" in node.kwargs)
    return scratch_bytes(left) if is_taken else None


def _reduction(node: fx.Node) -> int:
    """Sums convert an input of another dtype than the result's first; a mean in half precision is taken in float32."""
    value, result = given(node, 0), tensors_of(node)[0]
    if node.target is torch.ops.aten.mean.dim and result.dtype in (torch.bfloat16, torch.float16):
        return (value.numel() + result.numel()) * 4
    return value.numel() * result.dtype.itemsize if value.dtype != result.dtype else 0


def _dropout(node: fx.Node) -> int:
    """The mask is drawn in the input's dtype and then stored as booleans."""
    return storage_bytes(given(node, 0))


def _softmax_chunk(node: fx.Node) -> int:
    """A copy of the logits in float32; of each row the maximum, a shift, the target's place and logit, and the sum."""
    logits = given(node, 0)
    return logits.numel() * 4 + logits.shape[0] * 25


def _softmax_gradient(node: fx.Node) -> int:
    """A copy of the logits in float32, and of each row the target's place."""
    logits = given(node, 0)
    return logits.numel() * 4 + logits.shape[0] * 17


def _softmax(node: fx.Node) -> int | None:
    """Nothing for dense values along the last dimension."""
    value, dim = given(node, 0), node.args[2 if "backward" in str(node.target) else 1]
    return 0 if _reads_dense(node) and dim in (-1, value.dim() - 1) else None


def _logsumexp(node: fx.Node) -> int:
    """Exponentials, and the maximum of each row."""
    return storage_bytes(given(node, 0)) + storage_bytes(tensors_of(node)[0])


def _rms_norm(node: fx.Node) -> int:
    """Composed of other operators, in float32."""
    value = given(node, 0)
    return value.numel() * 4 + (0 if value.dtype == torch.float32 else value.numel() * 6)


def _layer_norm_backward(node: fx.Node) -> int:
    """Sums for weight and bias, a row of each for every thread."""
    return 2 * torch.get_num_threads() * math.prod(ints(node.args[2])) * 4


def _quantisation(node: fx.Node) -> int:
    """``zerofx/quantise.py`` takes one part at a time: quotients, beside the values in float32 or what they are rounded
    to, scales, and what these are made of."""
    values, num_parts, encoding = given(node, 0), node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    numel, dtype = values.numel() // num_parts, ENCODINGS[encoding].dtype
    beside = dtype.itemsize if dtype.is_floating_point and values.dtype == torch.float32 else 4
    return numel * (4 + beside) + numel // BLOCK * (4 + values.element_size())


def _dequantisation(node: fx.Node) -> int:
    """Codes and values of one part in float32."""
    num_parts, encoding = node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    return unpacked_numel(given(node, 0).numel() // num_parts, encoding) * 8


def _dequantised_sum(node: fx.Node) -> int:
    """The same beside the sum in float32; the result is made when they are gone."""
    result = tensors_of(node)[0]
    return _dequantisation(node) + result.numel() * 4 - storage_bytes(result)


def _square_sum(node: fx.Node) -> int:
    values = given(node, 0)
    return square_sum_workspace_bytes(values.numel(), values.dtype)


# aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: tiles of queries by number of queries, and of keys.
_KEY_TILE = 512


def _query_tile(num_queries: int) -> int:
    return 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32


def _attention(node: fx.Node) -> int:
    """Scores, running maximum and sum, and the result of one tile of queries, in float32 for each thread."""
    query, key = given(node, 0), given(node, 1)
    rows, columns = _query_tile(query.shape[2]), min(_KEY_TILE, key.shape[2])
    scores = rows * columns
    each = 4 * (scores + 2 * rows + rows * query.shape[3]) + (2 * scores if query.dtype != torch.float32 else 0)
    return torch.get_num_threads() * each


def _attention_backward(node: fx.Node) -> int:
    """Scores and their gradients for each thread; a gradient that is laid out unlike the result is copied."""
    grad, query, key, result = given(node, 0), given(node, 1), given(node, 2), given(node, 4)
    rows, columns = _query_tile(query.shape[2]), min(_KEY_TILE, key.shape[2])
    each = 2 * rows * columns * (4 if query.dtype == torch.float32 else 6)
    copied = storage_bytes(result) if grad.stride() != result.stride() else 0
    return torch.get_num_threads() * each + 4 * rows + copied


def _own_attention(node: fx.Node) -> int:
    return _forward_bytes(given(node, 0), given(node, 1), _given_or_none(node.args[3]))


def _own_attention_backward(node: fx.Node) -> int:
    return _backward_bytes(given(node, 0), given(node, 2), _given_or_none(node.args[6]))


def _compiled_attention(node: fx.Node) -> int | None:
    query, key, value = (given(node, index) for index in range(3))
    mask = _given_or_none(node.kwargs.get("attn_mask"))
    return _forward_bytes(query, key, mask) if has_kernel(query, key, value, mask, _number(node, 3)) else None


def _compiled_attention_backward(node: fx.Node) -> int | None:
    grad, query, key, value = (given(node, index) for index in range(4))
    mask = _given_or_none(node.kwargs.get("attn_mask"))
    return _backward_bytes(grad, key, mask) if has_kernel(query, key, value, mask, _number(node, 6)) else None


def _forward_bytes(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    return torch.get_num_threads() * 4 * forward_scratch_numel(query.shape[3]) + _mask_ends(mask, key)


def _backward_bytes(grad: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """A gradient whose rows are not in one piece is copied."""
    copied = storage_bytes(grad) if grad.stride(3) != 1 else 0
    return torch.get_num_threads() * 4 * backward_scratch_numel(grad.shape[3]) + copied + _mask_ends(mask, key)


def _mask_ends(mask: Tensor | None, key: Tensor) -> int:
    return 0 if mask is None else 4 * mask_scratch_numel(mask, key.shape[2])


def _given_or_none(argument: object) -> Tensor | None:
    return tensor(argument) if isinstance(argument, fx.Node) else None


def _number(node: fx.Node, index: int) -> float:
    """The argument at ``index``, of operators whose numbers are zero where they are not given."""
    found = node.args[index] if len(node.args) > index else 0.0
    assert isinstance(found, int | float)
    return found


def _masked_sum(node: fx.Node) -> int:
    """All rows, where the mask names all, and their places until they are taken."""
    values, mask, result = given(node, 0), given(node, 1), tensors_of(node)[0]
    return values.numel() * values.itemsize + max(0, 8 * mask.dim() * mask.numel() - result.nbytes)


def _batch_norm(node: fx.Node) -> int:
    """Sums of each channel."""
    return 3 * given(node, 0).shape[1] * 4


def _batch_norm_backward(node: fx.Node) -> int | None:
    """As much as the images."""
    return storage_bytes(given(node, 1)) if given(node, 1).is_contiguous() else None


_RULES: dict[str, Rule] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product,
    "aten::baddbmm": _product,
    "aten::convolution": convolution_bytes,
    "aten::convolution_backward": convolution_bytes,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_dropout": _dropout,
    "aten::_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::_log_softmax_backward_data": _softmax,
    "aten::logsumexp": _logsumexp,
    "aten::_native_batch_norm_legit": _batch_norm,
    "aten::_native_batch_norm_legit_functional": _batch_norm,
    "aten::native_batch_norm": _batch_norm,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::mean": _reduction,
    "aten::sum": _reduction,
    "aten::cumsum": _reduction,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "zerofx::attention": _own_attention,
    "zerofx::attention_backward": _own_attention_backward,
    "zerofx::masked_sum": _masked_sum,
    "zerofx::mm_into": _product_into,
    "zerofx::product": lambda node: scratch_bytes(given(node, 0)),
    "zerofx::product_into": lambda node: scratch_bytes(given(node, 1)),
    "zerofx::softmax_chunk": _softmax_chunk,
    "zerofx::softmax_gradient": _softmax_gradient,
    "zerofx::quantise": _quantisation,
    "zerofx::dequantise": _dequantisation,
    "zerofx::dequantise_sum": _dequantised_sum,
    "zerofx::square_sum": _square_sum,
}

# By which of zerofx's kernels, if it is one's.
_COMPILED: dict[str, tuple[str | None, Rule]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (ATTENTION, _compiled_attention),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (ATTENTION, _compiled_attention_backward),
    "aten::mm": (PRODUCTS, _compiled_product),
    "aten::addmm": (PRODUCTS, _compiled_product),
    "aten::convolution": (None, compiled_convolution_bytes),
    "aten::convolution_backward": (None, compiled_convolution_bytes),
}

# Pointwise operators whose booleans say which value to take, and are not converted.
_CONDITIONED = frozenset({"aten::where", "aten::masked_fill", "aten::masked_fill_"})

# Operators, in place or not, that hold no more than some hundred bytes, whatever the shapes, strides and dtypes.
# fmt: off
_HOLDS_NOTHING = frozenset({
    "_assert_async", "_foreach_add", "_foreach_addcdiv", "_foreach_addcmul", "_foreach_copy", "_foreach_div",
    "_foreach_lerp", "_foreach_mul", "_foreach_sqrt", "_foreach_zero", "_fused_adagrad", "_fused_adam", "_fused_adamw",
    "_fused_sgd", "_to_copy", "_unsafe_view", "all", "amax", "amin", "any", "arange", "argmax", "argmin", "bernoulli",
    "cat", "clone", "constant_pad_nd", "copy", "embedding", "empty", "empty_like", "empty_permuted", "empty_strided",
    "eye", "fill", "flip", "full", "full_like", "index", "index_select", "linspace", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "ones", "ones_like", "rand", "rand_like", "randn", "randn_like", "repeat",
    "roll", "scalar_tensor", "stack", "topk", "tril", "triu", "zero", "zeros", "zeros_like",
})
# Those of which that is true where all they read is dense.
_HOLDS_NOTHING_DENSE = frozenset({
    "_adaptive_avg_pool2d", "avg_pool2d", "avg_pool2d_backward", "embedding_dense_backward", "index_add",
    "max", "max_pool2d_with_indices", "min", "native_group_norm", "native_layer_norm", "nll_loss_backward",
    "nll_loss_forward", "select_backward", "select_scatter", "slice_backward",
    "slice_scatter",
})
# fmt: on

_LEFT_TO_ATEN = frozenset(
    {
        "aten::convolution",
        "aten::convolution_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "zerofx::masked_sum",
    }
)
