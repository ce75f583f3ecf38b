"""The streams that a step's nodes run on: computation, collectives, and the copies between tiers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zerofx import ops
from zerofx.graph import DEVICE, tier_of
from zerofx.scheduler.machine import Tier

COMPUTE, COLLECTIVE = "compute", "collective"
TO_HOST, TO_DEVICE, NVME_READ, NVME_WRITE = "to_host", "to_device", "nvme_read", "nvme_write"
LINKS = (TO_HOST, TO_DEVICE, NVME_READ, NVME_WRITE)
STREAMS = (COMPUTE, COLLECTIVE, *LINKS)


@dataclass(frozen=True)
class Hop:
    """One leg of a copy between tiers: its stream, and where it leads."""

    stream: str
    source: Tier
    destination: Tier


_OUT = (Hop(TO_HOST, "device", "host"), Hop(NVME_WRITE, "host", "nvme"))
_BACK = (Hop(NVME_READ, "nvme", "host"), Hop(TO_DEVICE, "host", "device"))


def hops_of(node: fx.Node) -> tuple[Hop, ...]:
    """The legs of a copy between tiers, in order: nvme is reached through the host. Empty for any other node."""
    if node.target is ops.offload:
        return _OUT if tier_of(node) == "nvme" else _OUT[:1]
    if node.target is ops.reload:
        return _BACK if slower_tier(node) == "nvme" else _BACK[1:]
    return ()


def slower_tier(node: fx.Node) -> str:
    """The tier beyond the device that a copy leads to or comes from; ``"device"`` for any other node."""
    if node.target is ops.reload:
        stored = node.args[0]
        assert isinstance(stored, fx.Node)
        return tier_of(stored)
    return tier_of(node) if node.target is ops.offload else DEVICE


def stream_of(node: fx.Node) -> str:
    """The stream that a node runs on; of a copy of two legs, that of the one beyond the host."""
    if node.target in ops.COLLECTIVES:
        return COLLECTIVE
    legs = [hop.stream for hop in hops_of(node)]
    return next((stream for stream in legs if stream in (NVME_READ, NVME_WRITE)), legs[0]) if legs else COMPUTE
