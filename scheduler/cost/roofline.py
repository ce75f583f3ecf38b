"""What one node of the graph costs on a machine: FLOPs, bytes read and written, seconds.

Time is a roofline: the longer of arithmetic at the machine's rate for that kind of work and memory traffic at its
bandwidth, plus the launch of a kernel. FLOPs come from `torch.utils.flop_counter.flop_registry` where it knows the
operator, so they equal what `FlopCounterMode` counts; the rules below are for the operators that it does not know.

Not covered: fusion (a region of pointwise nodes costs the sum of its parts here), causal attention (counted as full,
as the registry does), and collectives, whose time depends on the group: see `machine.collective_seconds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerofx.errors import InvalidGraphError
from zerofx.ir.aliasing import aliased_input, is_view, mutated_inputs, storage_bytes, storage_source, tensors_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.torch_private.operators import OpOverload, schema_of

_aten = torch.ops.aten

# Attention kernels that the registry lacks, and the one of the same arguments that it has.
_SAME_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _aten._scaled_dot_product_flash_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _aten._scaled_dot_product_flash_attention_backward,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": (
        _aten._scaled_dot_product_flash_attention_backward
    ),
    "aten::_int_mm": _aten.mm,
}

# FLOPs per element of the largest operand, counting an exponential, a square root or a division as one. Sums over an
# axis count once per element. Operators not named here, if not tagged pointwise or copies, count one per element.
_PER_ELEMENT = {
    "aten::_softmax": 5,  # max, subtract, exp, sum, divide
    "aten::_log_softmax": 5,  # max, subtract, exp, sum, subtract
    "aten::_softmax_backward_data": 4,  # multiply, sum, multiply, subtract
    "aten::_log_softmax_backward_data": 4,  # sum, exp, multiply, subtract
    "aten::native_layer_norm": 8,  # mean; subtract, square, sum; subtract, multiply; affine multiply, add
    "aten::native_layer_norm_backward": 14,  # normalise again (2), weight (3) and bias (1) sums, input (8)
    "aten::native_group_norm": 8,
    "aten::native_group_norm_backward": 14,
    "aten::native_batch_norm": 8,
    "aten::native_batch_norm_backward": 14,
    "aten::_native_batch_norm_legit": 8,
    "aten::_native_batch_norm_legit_functional": 8,
    "aten::_fused_rms_norm": 4,  # square, sum; multiply by the root, by the weight
    "aten::_fused_rms_norm_backward": 10,
    "aten::var": 4,
    "aten::var_mean": 4,
    "aten::std": 4,
    "aten::logsumexp": 4,
    "aten::native_dropout": 2,
    "zerofx::softmax_chunk": 5,  # max, subtract, exp, sum, compare
    "zerofx::softmax_gradient": 4,  # subtract, exp, subtract, multiply
    "aten::_fused_adam_": 14,  # two moments (6), bias corrections (2), root, add, divide, step; decay (2)
    "aten::_fused_adamw_": 14,
    "aten::_fused_sgd_": 5,
    "aten::_fused_adagrad_": 7,
    "zerofx::square_sum": 2,  # multiply, add
}

# Move values without arithmetic, whatever their tags say. Operators that make values (no tensor input, *_like, new_*),
# copies of views (tag view_copy) and *_scatter are found without a list.
# fmt: off
_NO_FLOPS = frozenset({
    "_foreach_copy_", "_foreach_zero_", "_to_copy", "_unsafe_index", "bernoulli", "cat", "clone", "constant_pad_nd",
    "copy", "copy_", "diagonal_backward", "embedding", "fill", "fill_", "flip", "gather", "index", "index_put",
    "index_put_", "index_select", "lift_fresh_copy", "masked_select", "repeat", "roll", "scatter", "select_backward",
    "slice_backward", "stack", "topk", "tril", "triu", "unfold_backward", "zero", "zero_",
})
# fmt: on
_ALLOCATE_ONLY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"})

# Read from their first argument only as many elements as they return.
_READS_WHAT_IT_RETURNS = frozenset(
    {"embedding", "gather", "index", "index_select", "_unsafe_index", "take", "nll_loss_forward", "masked_select"}
)
# Write to their first argument without reading it.
_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "_foreach_copy_", "_foreach_zero_"}
)


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node. `dtype` is that of its arithmetic (of the inputs of a matmul); None when it has no tensors."""

    flops: int
    bytes_read: int
    bytes_written: int
    seconds: float
    dtype: torch.dtype | None


def node_cost(
    node: fx.Node, machine: Machine, *, overrides: Mapping[str, float] | None = None, tf32: bool = False
) -> NodeCost:
    """The cost of one execution of `node` on `machine`.

    The node and its inputs carry fake or meta tensors in ``meta["val"]``. Views, placeholders, attributes and plain
    arithmetic on sizes cost nothing. `overrides` are measured seconds by node name, which replace the roofline;
    `tf32` says that float32 matmuls may use TF32. Raises InvalidGraphError for an operator without ``meta["val"]``.
    """
    measured = None if overrides is None else overrides.get(node.name)
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_view(node):
        opaque = node.op in ("call_function", "call_module", "call_method") and not is_view(node)
        read, written = (_bytes_read(node), _bytes_written(node)) if opaque and tensors_of(node) else (0, 0)
        seconds = _roofline(0, read + written, 1.0, machine) if written else 0.0
        return NodeCost(0, read, written, seconds if measured is None else measured, _output_dtype(node))
    if "val" not in node.meta and schema_of(node.target).returns:
        raise InvalidGraphError(
            f"{node.name} ({node.target}): no meta['val']; run fake tensor propagation before costs"
        )

    is_matmul = _matmul_packet(node.target) is not None
    flops, read, written = node_flops(node), _bytes_read(node), _bytes_written(node)
    dtype = _input_dtype(node) if is_matmul else _output_dtype(node) or _input_dtype(node)
    if measured is not None:
        seconds = measured
    elif _short_name(node.target) in _ALLOCATE_ONLY or dtype is None:
        seconds = 0.0
    else:
        rate = machine.matmul_flops(dtype, tf32=tf32) if is_matmul else machine.vector_flops(dtype)
        seconds = _roofline(flops, read + written, rate, machine)
    return NodeCost(flops, read, written, seconds, dtype)


def matmul_seconds_at_peak(node: fx.Node, machine: Machine) -> float:
    """Seconds of a matmul, a convolution or attention at the machine's peak for its inputs' type; 0 for all else."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or _matmul_packet(node.target) is None:
        return 0.0
    dtype = _input_dtype(node)
    return 0.0 if dtype is None else node_flops(node) / machine.peak_flops(dtype)


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one node; a multiply and an add count as two. 0 for views and copies."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_view(node):
        return 0
    packet = _matmul_packet(node.target)
    if packet is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    inputs = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
    outputs = tensors_of(node)
    name = _short_name(node.target)
    if name in ("mv", "addmv", "dot", "vdot"):
        return 2 * max((_numel(tensor) for tensor in inputs), default=0)
    if name == "_grouped_mm":  # Every row of the ragged operand meets one matrix: rows x columns x inner size.
        return 2 * _numel(outputs[0]) * int(inputs[0].shape[-1])
    makes_values = not inputs or name.startswith("new_") or name.endswith("_like")
    if makes_values or name in _NO_FLOPS or name.endswith("_scatter") or torch.Tag.view_copy in node.target.tags:
        return 0
    per_element = _PER_ELEMENT.get(schema_of(node.target).name, 1)
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        first = node.args[0] if node.args else ()
        sources = [item for item in first if isinstance(item, fx.Node)] if isinstance(first, (list, tuple)) else []
        return per_element * sum(_numel(tensor) for source in sources for tensor in tensors_of(source))
    if torch.Tag.pointwise in node.target.tags and outputs:
        return per_element * _numel(outputs[0])
    return per_element * max(_numel(tensor) for tensor in (*inputs, *outputs))


def _matmul_packet(target: OpOverload) -> Any:
    """The packet under which the registry knows `target`, or None: what runs on matrix units."""
    packet = _SAME_AS.get(schema_of(target).name, target.overloadpacket)
    return packet if packet in flop_registry else None


def _roofline(flops: int, num_bytes: int, rate: float, machine: Machine) -> float:
    return max(flops / rate, num_bytes / machine.memory_bandwidth) + machine.device.launch_latency


def _bytes_read(node: fx.Node) -> int:
    """Bytes of distinct memory that the node reads: what its views of a storage touch, at most the storage itself."""
    name = _short_name(node.target) if isinstance(node.target, OpOverload) else ""
    if name.endswith("_like") or name.startswith("new_"):
        return 0
    only_written = set(_only_written(node, name))
    touched: dict[tuple[fx.Node, int], int] = {}
    for position, source in enumerate(node.all_input_nodes):
        if source in only_written:
            continue
        num_bytes = sum(_touched_bytes(tensor) for tensor in tensors_of(source))
        if position == 0 and name in _READS_WHAT_IT_RETURNS:
            num_bytes = min(num_bytes, sum(_touched_bytes(tensor) for tensor in tensors_of(node)))
        owner = storage_source(source)
        touched[owner] = touched.get(owner, 0) + num_bytes
    return sum(min(num_bytes, _owned_bytes(owner)) for owner, num_bytes in touched.items())


def _bytes_written(node: fx.Node) -> int:
    """Bytes of new outputs, and of the inputs that are written in place."""
    if isinstance(node.target, OpOverload) and _short_name(node.target) in _ALLOCATE_ONLY:
        return 0
    changed = mutated_inputs(node)
    written = sum(_touched_bytes(tensor) for source in changed for tensor in tensors_of(source))
    if changed and (aliased_input(node) is not None or _returns_only_aliases(node)):
        return written
    return written + sum(_touched_bytes(tensor) for tensor in tensors_of(node))


def _returns_only_aliases(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload), node
    return all(returned.alias_info is not None for returned in schema_of(node.target).returns)


def _only_written(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    """The inputs that the node overwrites without looking at them: out= arguments, and the target of a copy."""
    if not isinstance(node.target, OpOverload):
        return ()
    changed = mutated_inputs(node)
    has_out = any(argument.is_out for argument in schema_of(node.target).arguments)
    if name in _OVERWRITES or torch.Tag.out in node.target.tags or has_out:
        return changed
    return ()


def _touched_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a view: an expanded dimension counts once."""
    sizes = (int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * tensor.element_size()


def _owned_bytes(owner: tuple[fx.Node, int]) -> int:
    """Bytes of the storage that an (owner node, output) pair names."""
    node, index = owner
    val = node.meta.get("val")
    tensor = val[index] if isinstance(val, (list, tuple)) and index < len(val) else val
    if isinstance(tensor, Tensor):
        return storage_bytes(tensor)
    return sum(storage_bytes(item) for item in tensors_of(node))


def _short_name(target: OpOverload) -> str:
    return schema_of(target).name.split("::")[-1]


def _numel(tensor: Tensor) -> int:
    return int(tensor.numel())


def _output_dtype(node: fx.Node) -> torch.dtype | None:
    tensors = tensors_of(node)
    return tensors[0].dtype if tensors else None


def _input_dtype(node: fx.Node) -> torch.dtype | None:
    """The type of the first floating-point input, else of the first input."""
    dtypes = [tensor.dtype for source in node.all_input_nodes for tensor in tensors_of(source)]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)
