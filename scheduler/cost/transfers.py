"""Bytes and seconds of transfers on a machine: collectives among ranks, and copies between tiers.

Sizes are bytes, times seconds.

The collective model is the ring of NCCL's own tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc): every rank
sends (N - 1) / N of the bytes, and the first byte travels N - 1 hops, of which (nodes - 1) leave a node. It is
pessimistic for small messages on many ranks, where a tree or a switch that reduces does better than a ring.
"""

from __future__ import annotations

import math
from typing import Literal

from zerofx.errors import UsageError
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.facts import Tier

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift"]


def wire_bytes(kind: CollectiveKind, full_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends in a ring collective over `full_bytes` (the whole tensor, not the shard).

    full * (N - 1) / N for all_gather, reduce_scatter and all_to_all (of which each rank has `full_bytes`), twice that
    for all_reduce, full for broadcast (which every rank but the last hands on whole), full / N for shift (to the next
    rank alone); 0 alone. Exact when N divides `full_bytes` (padded buckets), else rounded up.
    """
    if world_size == 1:
        return 0
    if kind == "broadcast":
        return full_bytes
    if kind == "shift":
        return -(-full_bytes // world_size)
    once = -(-full_bytes * (world_size - 1) // world_size)
    return 2 * once if kind == "all_reduce" else once


def collective_seconds(
    kind: CollectiveKind, num_bytes_full: int, world_size: int, machine: Machine, *, ranks_on_node: int | None = None
) -> float:
    """Seconds of a ring collective over `num_bytes_full` bytes (the whole tensor), without the launch.

    `ranks_on_node` is how many members of the group share a node (default: the group fills nodes). A group within one
    node runs at `intra_node`; one that spans nodes is bound by the slower of `intra_node` and the network of its
    members on a node together, and pays the network's latency once for every node boundary.
    """
    sent = wire_bytes(kind, num_bytes_full, world_size)
    local = _ranks_on_node(world_size, machine, ranks_on_node)
    nodes = math.ceil(world_size / local)
    if nodes == 1:
        bandwidth = machine.intra_node.bandwidth
    elif local == 1:
        bandwidth = machine.inter_node.bandwidth
    else:
        bandwidth = min(machine.intra_node.bandwidth, local * machine.inter_node.bandwidth)
    latency = collective_latency(kind, world_size, machine, ranks_on_node=ranks_on_node)
    return latency + sent / (bandwidth * machine.efficiency.link)


def collective_latency(
    kind: CollectiveKind, world_size: int, machine: Machine, *, ranks_on_node: int | None = None
) -> float:
    """Seconds of ``collective_seconds`` that do not depend on the bytes: what collectives that are merged pay once."""
    nodes = math.ceil(world_size / _ranks_on_node(world_size, machine, ranks_on_node))
    if kind == "shift":
        return max(machine.intra_node.latency if nodes < world_size else 0.0, machine.inter_node.latency * (nodes > 1))
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * ((world_size - nodes) * machine.intra_node.latency + (nodes - 1) * machine.inter_node.latency)


def _ranks_on_node(world_size: int, machine: Machine, asked: int | None) -> int:
    return min(world_size, machine.ranks_per_node) if asked is None else asked


def copy_seconds(num_bytes: int, source: Tier, destination: Tier, machine: Machine) -> float:
    """Seconds for one rank to copy `num_bytes` between tiers while every other rank of the node does the same.

    Shared resources (host memory, drives) therefore count with one rank's share: with bandwidth-centric partitioning
    every rank moves its own slice at once (ZeRO-Infinity, arXiv 2104.07857). Between device and nvme the
    bytes pass through the host, one hop after the other. Raises UsageError for nvme on a machine without drives.
    """
    if num_bytes < 0:
        raise UsageError(f"num_bytes must not be negative, found {num_bytes}")
    share = machine.ranks_per_node
    host_traffic = machine.host.memory_bandwidth * machine.efficiency.memory / share
    match source, destination:
        case ("device", "device"):
            return machine.device.launch_latency + 2 * num_bytes / machine.memory_bandwidth
        case ("host", "host"):
            return 2 * num_bytes / host_traffic
        case ("device", "host") | ("host", "device"):
            link = machine.host.to_host if destination == "host" else machine.host.to_device
            return link.latency + num_bytes / min(link.bandwidth * machine.efficiency.link, host_traffic)
        case ("nvme", "host") | ("host", "nvme"):
            if machine.nvme is None:
                raise UsageError(f"machine {machine.name!r} has no nvme: give it one, or do not offload to nvme")
            drive = machine.nvme.read if source == "nvme" else machine.nvme.write
            return drive.latency + num_bytes / (drive.bandwidth / share)
        case ("device", "nvme") | ("nvme", "device"):
            hops: tuple[tuple[Tier, Tier], ...] = ((source, "host"), ("host", destination))
            return sum(copy_seconds(num_bytes, first, second, machine) for first, second in hops)
        case _:
            raise UsageError(f"cannot copy from {source!r} to {destination!r}: tiers are device, host and nvme")


# The host's pool (``zerofx/runtime/tiers/host_memory.py``) hands out blocks of whole pages, in size classes, and plans
# count them where they are held to a ``host_budget``.
PAGE = 4096  # bytes; direct I/O needs buffers, lengths and offsets in multiples of it


def whole_pages(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def size_class(num_bytes: int) -> int:
    """Bytes of the block for ``num_bytes``: whole pages, sixteen sizes to each doubling, so at most 1/16 is waste."""
    step = max(PAGE, 1 << max(num_bytes.bit_length() - 5, 0))
    return max(-(-num_bytes // step), 1) * step
