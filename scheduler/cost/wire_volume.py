"""Bytes that collectives send, by link: within nodes and across them.

On a CPU every rank sends its part to every other (``zerofx/runtime/comm/gloo.py``). Elsewhere gathers and reductions
are rings, which leave each node once, and only exchanges go from rank to rank. A node's bytes are those that its ranks
send together: (N - 1) / N of a bucket cross a node's boundary in a ring over N ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import node_bytes, storage_bytes
from zerofx.ir.facts import tensor
from zerofx.ir.streams import axes_of
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.transfers import CollectiveKind, collective_seconds
from zerofx.scheduler.plan.mesh import Axes, Mesh

WITHIN, ACROSS = "within", "across"
_OF_VALUES: Mapping[object, CollectiveKind] = MappingProxyType(
    {
        ops.gather_values: "all_gather",
        ops.reduce_scatter_values: "reduce_scatter",
        ops.all_reduce_values: "all_reduce",
        ops.exchange_values: "all_to_all",
        ops.shift_values: "shift",
    }
)


@dataclass(frozen=True)
class Collective:
    """A collective: what it is, bytes of the whole tensor, its ranks, and how many of them are on one node."""

    kind: CollectiveKind
    full_bytes: int
    num_ranks: int
    ranks_on_node: int


def seconds_along(kind: CollectiveKind, num_bytes_full: int, mesh: Mesh, axes: Axes, machine: Machine) -> float:
    """``collective_seconds`` among the ranks along ``axes``."""
    local = mesh.num_on_node(axes, machine.ranks_per_node)
    return collective_seconds(kind, num_bytes_full, mesh.size(axes), machine, ranks_on_node=local)


def value_collective_seconds(node: fx.Node, machine: Machine) -> float:
    """Seconds of a collective on a value, among the ranks of the model axis, which are neighbours."""
    num_ranks = next(argument for argument in reversed(node.args) if isinstance(argument, int))
    return collective_seconds(_OF_VALUES[node.target], _value_bytes(node, num_ranks), num_ranks, machine)


def _value_bytes(node: fx.Node, num_ranks: int) -> int:
    """Bytes of the whole of what a collective on a value is about: the larger of what it is given and gives."""
    given, gives = storage_bytes(tensor(node.all_input_nodes[0])), storage_bytes(tensor(node))
    return max(given, gives) * (num_ranks if node.target is ops.shift_values else 1)


def collective_of(node: fx.Node, mesh: Mesh, ranks_per_node: int) -> Collective:
    """The collective that a node stands for on a mesh."""
    axes = axes_of(node, mesh)
    num_ranks, local = mesh.size(axes), mesh.num_on_node(axes, ranks_per_node)
    if node.target is ops.broadcast:
        size = sum(map(node_bytes, node.all_input_nodes))
        return Collective("broadcast", size, num_ranks, local)
    if node.target in ops.REDUCTIONS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return Collective("reduce_scatter", storage_bytes(tensor(source)), num_ranks, local)
    size = storage_bytes(tensor(node))
    if node.target in ops.MESSAGES:
        message = node.args[0] if node.target is ops.send_value else node
        assert isinstance(message, fx.Node)
        return Collective("shift", storage_bytes(tensor(message)) * num_ranks, num_ranks, local)
    if node.target in _OF_VALUES:
        return Collective(_OF_VALUES[node.target], _value_bytes(node, num_ranks), num_ranks, local)
    if node.target in ops.OWNER_EXCHANGES:
        moved = node.args[4]
        assert isinstance(moved, int)
        return Collective("all_to_all", moved * tensor(node).dtype.itemsize // (num_ranks - 1), num_ranks, local)
    if node.target is ops.gather_on_node:
        (_, _, members) = node.args
        assert isinstance(members, int)
        return Collective("all_gather", size, members, members)
    if node.target is ops.exchange:
        (_, _, members, group) = node.args
        assert isinstance(members, int)
        on_node = {"all": local, "node": members, "across": 1}[str(group)]
        return Collective("all_to_all", size, members, on_node)
    return Collective("all_gather", size, num_ranks, local)


def node_wire_bytes(
    collectives: Iterable[fx.Node], mesh: Mesh, ranks_per_node: int, *, pairwise: bool
) -> dict[str, int]:
    """Bytes that the first node's ranks send in all ``collectives``; ``pairwise``: no rings for gathers, as on CPUs."""
    within = across = 0
    for node in collectives:
        if node.target is ops.receive_value:
            continue  # which its sender has sent
        sent = collective_of(node, mesh, ranks_per_node)
        inside, outside = _wire_bytes(sent, min(mesh.num_ranks, ranks_per_node), pairwise=pairwise)
        within, across = within + inside, across + outside
    return {WITHIN: within, ACROSS: across}


def _wire_bytes(sent: Collective, local: int, *, pairwise: bool) -> tuple[int, int]:
    others = sent.num_ranks - sent.ranks_on_node
    if sent.kind == "broadcast":  # from the first rank alone
        return sent.full_bytes * (sent.ranks_on_node - 1), sent.full_bytes * others
    # Each rank of a node is in a group, which has as many ranks there as any.
    part = sent.full_bytes // sent.num_ranks * (local // sent.ranks_on_node) * (2 if sent.kind == "all_reduce" else 1)
    if sent.kind == "shift":
        crosses = min(1, others)
        return (sent.ranks_on_node - crosses) * part, crosses * part
    if pairwise or sent.kind == "all_to_all" or not others:
        return sent.ranks_on_node * (sent.ranks_on_node - 1) * part, sent.ranks_on_node * others * part
    return (sent.ranks_on_node - 1) * (sent.num_ranks - 1) * part, (sent.num_ranks - 1) * part
