"""Reasons why a step's kernels cannot be launched as CUDA graphs, from its plan and graph, before it has run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.facts import DEVICE, Role, origin, tier_of, value
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.ir.text import target_name
from zerofx.lowering.lower import LoweredStep
from zerofx.units import format_bytes

# The host moves these buffers, or makes them again in each step.
_MOVED = frozenset({*ops.TRANSFERS, ops.empty_stored, ops.settle})
_COMPRESSED = frozenset({ops.exchange, ops.gather_on_node, ops.second_shard})


def machine_obstacle(device: torch.device) -> str:
    """The obstacle on this machine; empty if there is none."""
    if device.type != "cuda":
        return f"the model is on {device}, and only CUDA has graphs"
    if torch.version.hip is not None:
        return "they have not been tried on ROCm"
    return ""


def step_obstacle(lowered: LoweredStep, device: torch.device, budget_bytes: int | None) -> str:
    """The obstacle in this step; empty if there is none.

    Graphs read the batch from buffers of their own: ``budget_bytes``, if there is a budget, has to leave room for them.
    """
    if lowered.plan.arena is not None:
        return "arena=True, and CUDA graphs have a memory pool of their own"
    for node in lowered.graph.calls():
        obstacle = _node_obstacle(node, device.type)
        if obstacle:
            return obstacle
    copies = batch_bytes(lowered)
    peak = lowered.plan.peak_bytes["device"]
    if budget_bytes is not None and peak + copies > budget_bytes:
        return (
            f"they need {format_bytes(copies)} for copies of the batch, and the plan leaves "
            f"{format_bytes(max(0, budget_bytes - peak))} of the memory budget"
        )
    return ""


def batch_bytes(lowered: LoweredStep) -> int:
    """Bytes of the buffers that graphs read a batch from."""
    return sum(storage_bytes(value(node)) for node in lowered.graph.placeholders(Role.INPUT))


def _node_obstacle(node: fx.Node, device_type: str) -> str:
    where = f"{target_name(node)} of {origin(node).layer or 'the model'}"
    if node.target in _MOVED or tier_of(node) != DEVICE:
        return f"the plan has tensors in slower tiers, which the host copies and updates ({where})"
    if node.target in _COMPRESSED:
        return f"the plan sends values in few bits, in buffers that are made again in each step ({where})"
    if node.target in VALUE_COLLECTIVES:
        return f"ranks share what layers compute, in buffers that are made again in each step ({where})"
    tags: Any = getattr(node.target, "tags", ())
    if _waits_for_values(node, tags):
        return f"the host waits for a value that the device computes ({where})"
    if torch.Tag.cudagraph_unsafe in tags:
        return f"its author marked {where} as unsafe in CUDA graphs"
    if any(tensor.device.type != device_type for tensor in tensors_of(node)):
        return f"{where} is not on the device"
    return ""


def _waits_for_values(node: fx.Node, tags: Any) -> bool:
    """True if the host has to know values to launch the work after the node."""
    if facts_of(node.target).kind is OperatorKind.INDEXED:
        # With numbers as indices shapes are known; a mask is counted first.
        return any(index.dtype in (torch.bool, torch.uint8) for index in _indices(node))
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _indices(node: fx.Node) -> Iterator[torch.Tensor]:
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    for index in indices:
        if isinstance(index, fx.Node):
            yield value(index)
