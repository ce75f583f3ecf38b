"""Seconds to share a call among the ranks of the model axis, and to convert a value between placements.

Seconds of a rank's share are those of its part of the arithmetic and of the bytes; launches are left out, as they are
the same in every way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor, fx

from zerofx.ir.aliasing import is_view
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.sharding.rule import Rule, num_bytes, read_tensors, results_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.transfers import CollectiveKind
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.plan.mesh import MODEL, SHARD, Mesh
from zerofx.scheduler.plan.placements import (
    REPLICATED,
    SUM,
    Partial,
    Placement,
    Ragged,
    Replicated,
    Sharded,
    local_shape,
)


@dataclass(frozen=True)
class Prices:
    """Prices besides seconds of calls and conversions on the axis.

    Of the seconds that ranks take to gather parameters and to reduce their gradients, the part ``exposed`` is not
    hidden. ``seconds_per_byte`` is paid for each byte of an activation that waits for backward, and of what is
    made whole.
    """

    exposed: float = 1.0
    seconds_per_byte: float = 0.0


def conversion_seconds(tensor: Tensor, source: Placement, target: Placement, mesh: Mesh, machine: Machine) -> float:
    """Seconds of what ``passes/lib/local_graph.py`` writes for a value, which is ``tensor`` where it is whole."""
    size = num_bytes(tuple(tensor.shape), tensor.dtype)

    def collective(kind: CollectiveKind, num_bytes_full: int) -> float:
        return seconds_along(kind, num_bytes_full, mesh, MODEL, machine)

    def reorder_seconds(placement: Sharded, num_bytes: int) -> float:
        """Seconds to bring the ranks' parts from one after the other into their places, or back."""
        is_in_order = placement.groups == 1 == prod(tensor.shape[: placement.dim])
        return 0.0 if is_in_order else 2 * num_bytes / machine.memory_bandwidth

    match source, target:
        case Replicated(), Sharded():
            return 2 * size / mesh.model / machine.memory_bandwidth
        case Replicated(), Partial("sum"):
            return 2 * size / machine.memory_bandwidth
        case Replicated(), Partial():
            return 0.0
        case Replicated(), Ragged():
            own = num_bytes(local_shape(tuple(tensor.shape), target, mesh.model), tensor.dtype)
            return 2 * own / machine.memory_bandwidth
        case Ragged(), Partial("sum"):
            return 3 * size / machine.memory_bandwidth
        case Ragged(), Replicated() | Sharded():
            terms = conversion_seconds(tensor, source, SUM, mesh, machine)
            return terms + conversion_seconds(tensor, SUM, target, mesh, machine)
        case Sharded(), Replicated():
            return collective("all_gather", size) + reorder_seconds(source, size)
        case Sharded(), Sharded() if source.dim == target.dim:
            return collective("all_gather", size) + reorder_seconds(source, size)
        case Sharded(), Sharded():
            part = size // mesh.model
            return collective("all_to_all", part) + reorder_seconds(target, part) + reorder_seconds(source, part)
        case Partial("sum"), Sharded():
            return collective("reduce_scatter", size) + reorder_seconds(target, size)
        case Partial(), Replicated() | Sharded():
            return collective("all_reduce", size)
    return conversion_seconds(tensor, source, REPLICATED, mesh, machine) + 2 * size / machine.memory_bandwidth


def seconds_of_share(node: fx.Node, rule: Rule, mesh: Mesh, machine: Machine, prices: Prices) -> float:
    """Seconds of one rank's share of a call, and of what it sums over the ranks meanwhile; of a placeholder what is not
    hidden of gathering it for forward and backward and reducing its gradient, if it is a parameter."""
    if node.op == "placeholder":
        return _parameter_seconds(node, rule, mesh, machine, prices)
    cost = node_cost(node, machine)
    extra = rule.extra
    sums = seconds_along("all_reduce", extra.reduced_bytes, mesh, MODEL, machine) if extra.reduced_bytes else 0.0
    if extra.shifted_bytes:
        sums += (mesh.model - 1) * seconds_along("shift", extra.shifted_bytes, mesh, MODEL, machine)
    if extra.exchanged_bytes:
        sums += seconds_along("all_to_all", extra.exchanged_bytes, mesh, MODEL, machine)
    sums += extra.traffic_bytes / machine.memory_bandwidth
    if not cost.seconds or is_view(node):
        return sums
    whole = local = 0
    tensors = [*results_of(node), *(results_of(source)[0] for source in read_tensors(node))]
    for tensor, placement in zip(tensors, (*rule.outputs, *rule.inputs), strict=True):
        if tensor is not None and placement is not None:
            shape = tuple(tensor.shape)
            whole += num_bytes(shape, tensor.dtype)
            local += num_bytes(local_shape(shape, placement, mesh.model), tensor.dtype)
    traffic = (cost.bytes_read + cost.bytes_written) / machine.memory_bandwidth
    work = cost.seconds - machine.device.launch_latency
    arithmetic = work if work > traffic * 1.001 else 0.0
    return max(arithmetic * extra.work / (mesh.model if rule.shards else 1), traffic * local / max(whole, 1)) + sums


def _parameter_seconds(node: fx.Node, rule: Rule, mesh: Mesh, machine: Machine, prices: Prices) -> float:
    (placement,), (tensor,) = rule.outputs, results_of(node)
    if placeholder(node).role is not Role.PARAMETER or tensor is None or placement is None:
        return 0.0
    size = num_bytes(local_shape(tuple(tensor.shape), placement, mesh.model), tensor.dtype)
    axes = mesh.axes_in_use((*SHARD, *MODEL) if placement == REPLICATED else SHARD)
    return 3 * prices.exposed * seconds_along("all_gather", size, mesh, axes, machine) if axes else 0.0
