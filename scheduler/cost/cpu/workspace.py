"""Memory that an operator takes and gives back while it runs, beyond its outputs: what the profiler's allocations show.

Eager kernels on CPU keep such buffers where one would not look: convolutions copy images, filters and results into
another layout; a mean of squares has all of them; a number beside a tensor becomes one. So each call is made and looked
at (``scheduler/cost/cpu/kernel_memory.py``), but for views, which hold nothing, and for what cannot be measured while a
step is planned, or not as well, for which there are rules (torch 2.13), held to the profiler's record by
``tests/train/cost/test_workspace.py``:

- attention that takes long goes other ways than that of shorter sequences, which so tells nothing of it;
- the kernels of zerofx's own for attention and products are compiled after it is decided that a step uses them;
- gradients and parameters on the wire, and the norm of gradients, are flat, of any size that is a number of blocks;
- of a convolution that is too large, it is known which sizes to reduce (``scheduler/cost/cpu/convolutions.py``).

Not covered: oneDNN's scratchpads of some KiB, and CUDA, where cuBLAS and cuDNN keep workspaces of their own.
``is_unknown`` says of which operators on CPU nothing is known: those that are not ATen's, and those that cannot be
called on values that are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.aliasing import is_view, storage_bytes, tensors_of
from zerofx.ir.facts import given, tensor
from zerofx.ir.op_kernels.attention import KERNEL as ATTENTION
from zerofx.ir.op_kernels.attention import backward_scratch_numel, forward_scratch_numel, has_kernel, mask_scratch_numel
from zerofx.ir.op_kernels.norms import square_sum_workspace_bytes
from zerofx.ir.op_kernels.products import KERNEL as PRODUCTS
from zerofx.ir.op_kernels.products import has_kernel as has_product
from zerofx.ir.op_kernels.products import scratch_bytes
from zerofx.ir.op_kernels.quantise import BLOCK, ENCODINGS, unpacked_numel
from zerofx.scheduler.cost.cpu.calls import KernelMemory, call_of
from zerofx.scheduler.cost.cpu.convolutions import compiled_convolution_bytes, convolution_bytes
from zerofx.scheduler.cost.cpu.kernel_memory import call_memory, kernel_memories
from zerofx.torch_private.operators import OpOverload, schema_of

Rule = Callable[[fx.Node], int | None]
_NOTHING = KernelMemory(0, ())


def memories(nodes: Iterable[fx.Node]) -> dict[fx.Node, KernelMemory | None]:
    """What each of some nodes takes; None for an operator on CPU tensors of which it is not known."""
    found: dict[fx.Node, KernelMemory | None] = {}
    asked = []
    for node in nodes:
        rule = _rule(node)
        if rule is not None:
            num_bytes = rule(node) if _is_on_cpu(node) else 0
            found[node] = None if num_bytes is None else KernelMemory(num_bytes, ())
        elif not isinstance(node.target, OpOverload) or node.target in ops.EVENTS or is_view(node):
            found[node] = _NOTHING
        else:
            asked.append(node)
    for node, taken in kernel_memories(asked).items():
        found[node] = _NOTHING if taken is None and not _is_on_cpu(node) else taken
    return found


def _rule(node: fx.Node) -> Rule | None:
    """The rule for an operator; None where there is none, or it is for calls that take longer."""
    target = node.target
    rule = _RULES.get(schema_of(target).name) if isinstance(target, OpOverload) else None
    if rule is None or not isinstance(target, OpOverload) or target.namespace != "aten":
        return rule
    call = call_of(node)
    return None if call is not None and call.is_quick else rule


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that ``node`` holds at its worst moment beyond inputs and outputs; 0 on other devices than CPUs."""
    taken = memories([node])[node]
    return 0 if taken is None else taken.inside


def compiled_workspace_bytes(node: fx.Node, kernels: Collection[str]) -> int:
    """``workspace_bytes`` of an operator that Inductor leaves to a kernel, of ATen's or one of ``kernels``, which are
    zerofx's own (``codegen/kernels/table.py``) in a compiled region."""
    name = schema_of(node.target).name if isinstance(node.target, OpOverload) else ""
    if name in _COMPILED and _is_on_cpu(node):
        kernel, rule = _COMPILED[name]
        found = rule(node) if kernel is None or kernel in kernels else None
        if found is not None:
            return found
    return workspace_bytes(node)


def is_unknown(node: fx.Node) -> bool:
    """Whether an operator on CPU tensors may hold bytes that ``workspace_bytes`` lacks."""
    return memories([node])[node] is None


def _is_on_cpu(node: fx.Node) -> bool:
    values = (*tensors_of(node), *(value for source in node.all_input_nodes for value in tensors_of(source)))
    return bool(values) and all(value.device.type == "cpu" for value in values)


def _compiled_product(node: fx.Node) -> int | None:
    """Where it is taken from ATen."""
    *bias, left, right = (given(node, index) for index in range(len(node.args)))
    is_taken = has_product(left, right, bias[0] if bias else None, into="out" in node.kwargs)
    return scratch_bytes(left) if is_taken else None


def _quantisation(node: fx.Node) -> int:
    """``zerofx/ir/op_kernels/quantise.py`` takes one part at a time: quotients, beside the values in float32 or what
    they are rounded
    to, scales, and what these are made of."""
    values, num_parts, encoding = given(node, 0), node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    numel, dtype = values.numel() // num_parts, ENCODINGS[encoding].dtype
    beside = dtype.itemsize if dtype.is_floating_point and values.dtype == torch.float32 else 4
    return numel * (4 + beside) + numel // BLOCK * (4 + values.element_size()) + _offset_bytes(encoding)


def _dequantisation(node: fx.Node) -> int:
    """Codes and values of one part in float32."""
    num_parts, encoding = node.args[1], node.args[2]
    assert isinstance(num_parts, int) and isinstance(encoding, str)
    return unpacked_numel(given(node, 0).numel() // num_parts, encoding) * 8 + _offset_bytes(encoding)


def _offset_bytes(encoding: str) -> int:
    """Of the number that is added to 4-bit codes, as a tensor in float64 and in float32."""
    return 12 if ENCODINGS[encoding].bits == 4 else 0


def _dequantised_sum(node: fx.Node) -> int:
    """The same beside the sum in float32; the result is made when they are gone."""
    result = tensors_of(node)[0]
    return _dequantisation(node) + result.numel() * 4 - storage_bytes(result)


def _square_sum(node: fx.Node) -> int:
    values = given(node, 0)
    return square_sum_workspace_bytes(values.numel(), values.dtype)


# aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: tiles of queries by number of queries, and of keys.
_KEY_TILE = 512


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    num_queries = query.shape[2]
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(_KEY_TILE, key.shape[2])


def _attention(node: fx.Node) -> int:
    """Scores, running maximum and sum, and the result of one tile of queries, in float32 for each thread."""
    query, key = given(node, 0), given(node, 1)
    rows, columns = _tile(query, key)
    scores = rows * columns
    each = 4 * (scores + 2 * rows + rows * query.shape[3]) + (2 * scores if query.dtype != torch.float32 else 0)
    return torch.get_num_threads() * each


def _attention_backward(node: fx.Node) -> int:
    """Scores and their gradients for each thread; a gradient that is laid out unlike the result is copied."""
    grad, query, key, result = given(node, 0), given(node, 1), given(node, 2), given(node, 4)
    layouts = [[s for s, size in zip(one.stride(), one.shape, strict=True) if size != 1] for one in (grad, result)]
    copied = storage_bytes(result) if layouts[0] != layouts[1] else 0
    if query.dtype != torch.float32:
        one_head = _backward_of_one_head(node)
        if one_head is not None:
            return one_head + copied
    rows, columns = _tile(query, key)
    return torch.get_num_threads() * 2 * rows * columns * (4 if query.dtype == torch.float32 else 6) + 4 * rows + copied


def _backward_of_one_head(node: fx.Node) -> int | None:
    """What threads have of their own: in half precision also what oneDNN packs, if the processor lets it."""
    assert isinstance(node.target, OpOverload)
    args = fx.map_arg(node.args, lambda source: _one_head(source.meta["val"]))
    found = call_memory(node.target, list(args), list(map(_one_head, tensors_of(node))))
    return None if found is None else found.inside


def _one_head(value: Tensor) -> Tensor:
    return value.new_empty((1, 1, *value.shape[2:]))


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
    scratch = torch.get_num_threads() * 4 * forward_scratch_numel(query.shape[3])
    return scratch + _mask_ends(mask, key) + _sizes_bytes(5)


def _backward_bytes(grad: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """A gradient whose rows are not in one piece is copied."""
    copied = storage_bytes(grad) if grad.stride(3) != 1 else 0
    scratch = torch.get_num_threads() * 4 * backward_scratch_numel(grad.shape[3])
    return scratch + copied + _mask_ends(mask, key) + _sizes_bytes(9)


def _sizes_bytes(num_tensors: int) -> int:
    """What the kernel is told: 15 sizes and strides, and three strides of each tensor but the mask."""
    return 8 * (15 + 3 * num_tensors)


def _mask_ends(mask: Tensor | None, key: Tensor) -> int:
    return 0 if mask is None else 4 * mask_scratch_numel(mask, key.shape[2])


def _given_or_none(argument: object) -> Tensor | None:
    return tensor(argument) if isinstance(argument, fx.Node) else None


def _number(node: fx.Node, index: int) -> float:
    """The argument at ``index``, of operators whose numbers are zero where they are not given."""
    found = node.args[index] if len(node.args) > index else 0.0
    assert isinstance(found, int | float)
    return found


_RULES: dict[str, Rule] = {
    "aten::convolution": convolution_bytes,
    "aten::convolution_backward": convolution_bytes,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "zerofx::attention": _own_attention,
    "zerofx::attention_backward": _own_attention_backward,
    "zerofx::product": lambda node: scratch_bytes(given(node, 0)),
    "zerofx::product_into": lambda node: scratch_bytes(given(node, 1)),
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
