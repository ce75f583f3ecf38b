"""The streams that a step's nodes run on: computation, collectives, the host's, and the copies between tiers.

A collective names the axes of the mesh that it runs over, unless that is ``shard`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.facts import DEVICE, Role, placeholder, tier_of
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.mesh import SHARD, Axes, Axis, Mesh

COMPUTE, COLLECTIVE, HOST = "compute", "collective", "host"
TO_HOST, TO_DEVICE, NVME_READ, NVME_WRITE = "to_host", "to_device", "nvme_read", "nvme_write"
LINKS = (TO_HOST, TO_DEVICE, NVME_READ, NVME_WRITE)
STREAMS = (COMPUTE, COLLECTIVE, HOST, *LINKS)


@dataclass(frozen=True)
class Hop:
    """One leg of a copy between tiers: its stream, and where it leads."""

    stream: str
    source: Tier
    destination: Tier


_OUT: dict[Tier, tuple[str, Tier]] = {
    "device": (TO_HOST, "host"),
    "host": (NVME_WRITE, "nvme"),
}  # from a tier: the stream, and where it leads
_BACK: dict[Tier, tuple[str, Tier]] = {"nvme": (NVME_READ, "host"), "host": (TO_DEVICE, "device")}


# What has the values of what it reads first, elsewhere, whole or in part, or rounded.
_HANDS_ON = frozenset(
    {
        ops.reload,
        ops.all_gather,
        ops.wait,
        ops.quantise,
        ops.dequantise,
        ops.second_shard,
        ops.gather_on_node,
        ops.fp8_slice_cast,
    }
)


def ends_of(node: fx.Node) -> tuple[Tier, Tier]:
    """The tiers that a copy leads from and to; the device twice for any other node."""
    if node.target not in ops.TRANSFERS:
        return DEVICE, DEVICE
    source = node.args[1] if node.target is ops.copy_into else node.args[0]
    assert isinstance(source, fx.Node)
    return tier_of(storage_source(source)[0]), tier_of(storage_source(node)[0])


def hops_of(node: fx.Node) -> tuple[Hop, ...]:
    """The legs of a copy between tiers, in order: nvme is reached through the host. Empty for any other node."""
    here, end = ends_of(node)
    way = _OUT if here == DEVICE or end == "nvme" else _BACK
    hops = []
    while here != end:
        stream, there = way[here]
        hops.append(Hop(stream, here, there))
        here = there
    return tuple(hops)


def runs_on_host(node: fx.Node) -> bool:
    """True if a node computes on the host: an update whose states are there."""
    return tier_of(node) == "host" and node.op == "call_function" and node.target not in ops.EVENTS


def background_work(node: fx.Node) -> tuple[int, bool]:
    """The bucket whose work a ``run_on`` leaves running and a ``settle`` awaits: its update on the host with copies of
    it, or, where the second is True, copies back to its tier."""
    bucket = node.args[0]
    assert isinstance(bucket, int)
    return bucket, bool(node.kwargs.get("back"))


def slice_gathered(node: fx.Node) -> fx.Node | None:
    """The placeholder of the parameters' slice whose values a copy, a gather or their wait has; None for others."""
    while node.target in _HANDS_ON:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node if node.op == "placeholder" and placeholder(node).role is Role.SHARD else None


def num_gathers_after(node: fx.Node) -> int:
    """The number of gathers directly after a node that start with it as one collective; 0 for the last of them, and for
    other nodes."""
    if node.target is not ops.all_gather or len(node.args) < 4:
        return 0
    more = node.args[3]
    assert isinstance(more, int)
    return more


def sort_streams(streams: Iterable[str]) -> list[str]:
    """Distinct streams in the order of reports; those of collectives along other axes follow the one of ``shard``."""
    return sorted(set(streams), key=lambda stream: (STREAMS.index(stream.partition(" ")[0]), stream))


def stream_along(axes: Axes) -> str:
    """The stream of collectives along some axes of a mesh; but for ``shard``, it names them: ``"collective model"``."""
    return COLLECTIVE if axes == SHARD else f"{COLLECTIVE} {axes_text(axes)}"


def axes_of_stream(stream: str) -> Axes | None:
    """The axes whose collectives a stream has; None for a stream of other work."""
    kind, _, axes = stream.partition(" ")
    if kind != COLLECTIVE:
        return None
    return axes_named(axes) if axes else SHARD


def stream_of(node: fx.Node) -> str:
    """The stream that a node runs on; of a copy of two legs, that of the one beyond the host."""
    if node.target in ops.COLLECTIVES:
        axes = node.kwargs.get("over")
        return COLLECTIVE if axes is None else stream_along(axes_named(str(axes)))
    if runs_on_host(node):
        return HOST
    legs = [hop.stream for hop in hops_of(node)]
    return next((stream for stream in legs if stream in (NVME_READ, NVME_WRITE)), legs[0]) if legs else COMPUTE


_SEPARATOR = ","


def axes_argument(axes: Axes) -> Mapping[str, str]:
    """The keyword argument with the axes of a collective's node."""
    return {} if axes == SHARD else {"over": axes_text(axes)}


def axes_text(axes: Axes) -> str:
    """Axes as a node has them: ``"replicate,shard"``."""
    return _SEPARATOR.join(axes)


def axes_named(text: str) -> Axes:
    """The axes in a text of ``axes_text``."""
    known: dict[str, Axis] = {axis: axis for axis in get_args(Axis)}
    return tuple(known[axis] for axis in text.split(_SEPARATOR))


def axes_of(node: fx.Node, mesh: Mesh) -> Axes:
    """The axes that a collective's node runs over: a broadcast over all."""
    if node.target in ops.OVER_AXES:
        return axes_named(str(node.kwargs.get("over", axes_text(SHARD))))
    return mesh.world
