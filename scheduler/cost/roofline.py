"""Cost of one node of the graph on a machine: FLOPs, bytes read and written, seconds.

Time is a roofline: the longer of arithmetic at the machine's rate for that kind of work and memory traffic at its
bandwidth, plus the launch of a kernel. FLOPs come from `torch.utils.flop_counter.flop_registry` where it knows the
operator, so they equal what `FlopCounterMode` counts; of those that it does not know, the table of operators has them
per element (``zerofx/ir/operators/table.py``).

Not covered: fusion (a region of pointwise nodes costs the sum of its parts here; ``kernel_seconds`` has what it takes
when it is compiled for a GPU; an update on the host is one pass over its memory), causal attention (counted as full,
as the registry does), and collectives, whose time depends on the group: see ``scheduler/cost/transfers.py``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input, is_view, mutated_inputs, storage_bytes, storage_source, tensors_of
from zerofx.ir.operators.operator import Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.ir.streams import runs_on_host
from zerofx.scheduler.cost.machine import Machine
from zerofx.torch_private.operators import OpOverload, flop_count, is_out, schema_of

_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


@dataclass(frozen=True)
class NodeCost:
    """Cost of one node."""

    flops: int
    bytes_read: int
    bytes_written: int
    seconds: float


def node_cost(node: fx.Node, machine: Machine) -> NodeCost:
    """The cost of one execution of `node` on `machine`.

    The node and its inputs carry fake or meta tensors in ``meta["val"]``. Views, placeholders, attributes and plain
    arithmetic on sizes cost nothing.
    Raises InvalidGraphError for an operator without ``meta["val"]``.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or is_view(node):
        opaque = node.op in ("call_function", "call_module", "call_method") and not is_view(node)
        read, written = (_bytes_read(node), _bytes_written(node)) if opaque and tensors_of(node) else (0, 0)
        seconds = _roofline(0, read + written, 1.0, machine) if written else 0.0
        return NodeCost(0, read, written, seconds)
    if "val" not in node.meta and schema_of(node.target).returns:
        raise InvalidGraphError(
            f"{node.name} ({node.target}): no meta['val']; run fake tensor propagation before costs"
        )

    packet = _matmul_packet(node.target)
    flops, read, written = node_flops(node), _bytes_read(node), _bytes_written(node)
    if node.target is ops.update_whole:
        dtype = node.kwargs["dtype"]
        assert isinstance(dtype, torch.dtype)
        rate = machine.matmul_flops(dtype)
        return NodeCost(flops, read, written, _roofline(flops, read + written, rate, machine))
    if runs_on_host(node):
        read, written = _bytes_of_pass(node)
    facts = facts_of(node.target)
    # The registry does not know products of groups, but the operator table counts them.
    is_product = packet is not None or (facts.is_cubic and facts.flops is not None)
    outputs = [] if is_product else tensors_of(node)
    dtype = outputs[0].dtype if outputs else _input_dtype(node)
    if facts.traffic is Traffic.ALLOCATES or dtype is None:
        seconds = 0.0
    else:
        seconds = _roofline(flops, read + written, _rate(packet, dtype, machine, is_product=is_product), machine)
    return NodeCost(flops, read, written, seconds)


def seconds_to_copy(node: fx.Node, machine: Machine) -> float:
    """Seconds of a copy of what ``node`` gives."""
    return _roofline(0, 2 * _node_bytes(node), 1.0, machine)


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
    if node.target is ops.update_whole:  # which says them itself
        flops = node.kwargs["flops"]
        assert isinstance(flops, int)
        return flops
    packet = _matmul_packet(node.target)
    if packet is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return flop_count(packet, args, kwargs, node.meta["val"])
    inputs = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
    outputs = tensors_of(node)
    facts = facts_of(node.target)
    if facts.flops is not None:
        return facts.flops(inputs, outputs)
    if not inputs or torch.Tag.view_copy in node.target.tags:
        return 0  # it makes values, or copies them
    if facts.of_lists:
        first = node.args[0] if node.args else ()
        sources = [item for item in first if isinstance(item, fx.Node)] if isinstance(first, (list, tuple)) else []
        return facts.per_element * sum(tensor.numel() for source in sources for tensor in tensors_of(source))
    if facts.is_pointwise and outputs:
        return facts.per_element * outputs[0].numel()
    return facts.per_element * max(tensor.numel() for tensor in (*inputs, *outputs))


def _matmul_packet(target: OpOverload) -> Any:
    """The packet under which the registry knows `target`, or None: what runs on matrix units."""
    same = facts_of(target).counted_as
    packet = target.overloadpacket if same is None else getattr(torch.ops.aten, same)
    return packet if packet in flop_registry else None


def _rate(packet: Any, dtype: torch.dtype, machine: Machine, *, is_product: bool) -> float:
    """FLOP/s of what the registry knows as ``packet``, or of another product, or of what runs on no matrix units."""
    if not is_product:
        return machine.vector_flops(dtype)
    if packet in _CONVOLUTIONS:
        return machine.convolution_flops(dtype)
    return machine.matmul_flops(dtype)


def _bytes_of_pass(node: fx.Node) -> tuple[int, int]:
    """Bytes that an update on the host reads and writes for ``node``: it passes over its memory once, block by block
    (``codegen/cpu/update_blocks.py``).

    What a node before it in the same update has read, written or made is in the caches then.
    """
    touched, written, values = set[_Owner](), set[_Owner](), set[fx.Node]()
    for earlier in _nodes_of_update_before(node):
        touched.update(map(storage_source, earlier.all_input_nodes))
        written.update(map(storage_source, mutated_inputs(earlier)))
        values.add(earlier)
    only_written = set(map(storage_source, _write_only_inputs(node)))
    changed = set(map(storage_source, mutated_inputs(node)))
    if facts_of(node.target).of_lists and node.kwargs.get("grad_scale") is None and isinstance(node.args[1], list):
        # A fused kernel writes gradients where it unscales them, whatever its schema says.
        changed -= {storage_source(source) for source in node.args[1] if isinstance(source, fx.Node)}
    reads = {storage_source(source): source for source in node.all_input_nodes}
    from_memory = {owner: source for owner, source in reads.items() if owner[0] not in values}
    return (
        sum(map(_node_bytes, (source for owner, source in from_memory.items() if owner not in touched | only_written))),
        sum(map(_node_bytes, (source for owner, source in from_memory.items() if owner in changed - written))),
    )


_Owner = tuple[fx.Node, int]


def _node_bytes(node: fx.Node) -> int:
    return sum(distinct_bytes(tensor) for tensor in tensors_of(node))


def _nodes_of_update_before(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes before ``node`` of the region on the host that it is in, the nearest first."""
    earlier = node.prev
    while earlier.op == "call_function" and earlier.target not in ops.EVENTS:
        if runs_on_host(earlier):
            yield earlier
        elif earlier.target is not operator.getitem:
            return
        earlier = earlier.prev


def _roofline(flops: int, num_bytes: int, rate: float, machine: Machine) -> float:
    return max(flops / rate, num_bytes / machine.memory_bandwidth) + machine.device.launch_latency


def _bytes_read(node: fx.Node) -> int:
    """Bytes of distinct memory that the node reads: what its views of a storage touch, at most the storage itself."""
    traffic = facts_of(node.target).traffic
    if traffic in (Traffic.FILLS, Traffic.ALLOCATES):
        return 0
    only_written = set(_write_only_inputs(node))
    touched: dict[tuple[fx.Node, int], int] = {}
    for position, source in enumerate(node.all_input_nodes):
        if source in only_written:
            continue
        num_bytes = sum(distinct_bytes(tensor) for tensor in tensors_of(source))
        if position == 0 and traffic is Traffic.PICKS:
            num_bytes = min(num_bytes, sum(distinct_bytes(tensor) for tensor in tensors_of(node)))
        owner = storage_source(source)
        touched[owner] = touched.get(owner, 0) + num_bytes
    return sum(min(num_bytes, _output_bytes(owner)) for owner, num_bytes in touched.items())


def _bytes_written(node: fx.Node) -> int:
    """Bytes of new outputs, and of the inputs that are written in place."""
    if facts_of(node.target).traffic is Traffic.ALLOCATES:
        return 0
    changed = mutated_inputs(node)
    written = sum(distinct_bytes(tensor) for source in changed for tensor in tensors_of(source))
    if changed and (aliased_input(node) is not None or _returns_only_aliases(node)):
        return written
    return written + sum(distinct_bytes(tensor) for tensor in tensors_of(node))


def _returns_only_aliases(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload), node
    return all(returned.alias_info is not None for returned in schema_of(node.target).returns)


def _write_only_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs that the node overwrites without looking at them: out= arguments, and the target of a copy."""
    if not isinstance(node.target, OpOverload):
        return ()
    changed = mutated_inputs(node)
    return changed if is_out(node.target) or facts_of(node.target).traffic is Traffic.OVERWRITES else ()


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a view: an expanded dimension counts once."""
    sizes = (int(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0)
    return math.prod(sizes) * tensor.element_size()


def _output_bytes(owner: tuple[fx.Node, int]) -> int:
    """Bytes of the storage that an (owner node, output) pair names."""
    node, index = owner
    val = node.meta.get("val")
    tensor = val[index] if isinstance(val, (list, tuple)) and index < len(val) else val
    if isinstance(tensor, Tensor):
        return storage_bytes(tensor)
    return sum(storage_bytes(item) for item in tensors_of(node))


def _input_dtype(node: fx.Node) -> torch.dtype | None:
    """The type of the first floating-point input, else of the first input."""
    dtypes = [tensor.dtype for source in node.all_input_nodes for tensor in tensors_of(source)]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else None)
