"""Process groups of zerofx's own, and the transports of a mesh over them, one for each set of axes.

A group is over the ranks of a user's group, which itself is never closed or destroyed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zerofx.ir.streams import axes_text, stream_along
from zerofx.runtime.comm.transport import Transport
from zerofx.scheduler.plan.mesh import PIPE, Axes, Mesh

_NEVER_SENT = 2**31 - 1  # a tag that no message has


def destroy_with(owner: object, group: dist.ProcessGroup) -> weakref.finalize[..., object]:
    """Destroy ``group`` on this rank when ``owner`` is collected; detach the result if it is destroyed earlier."""
    end = weakref.finalize(owner, destroy, [group])
    end.atexit = False  # the process takes its connections with it
    return end


def gloo_over(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group over the ranks of ``group``; ``timeout`` is for each of its collectives, gloo's own if None.
    Collective itself."""
    gloo_group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)
    assert isinstance(gloo_group, dist.ProcessGroup)
    return gloo_group


def destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """Destroy groups in their order, which is the same on all ranks, once all messages sent there are delivered.

    Connections and threads of a gloo group end with the last reference to it.
    """
    for group in groups:
        # Unknown to torch where the user has destroyed the whole world before: they went with it.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def close_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group: ranks that wait for it there, now or later, fail at once.

    No call of gloo's does that in a process that lives on, but a message that times out does. The rank before this one
    comes first: it may listen, and continue from there.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    for distance in range(1, num_ranks):
        with contextlib.suppress(RuntimeError):
            peer = (rank - distance) % num_ranks
            late = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=peer, tag=_NEVER_SENT)
            assert late is not None
            late.wait(timedelta(milliseconds=1))


class Communicators:
    """The transport between all ranks, and those between the ranks of this rank's groups along some axes of a mesh.

    Construction is collective: all ranks construct the same, in the same order. ``world`` is None for one rank, where
    nothing is moved; ``used`` are the sets of axes, of more than one rank each.
    """

    def __init__(self, world: Transport | None, mesh: Mesh, used: Collection[Axes]) -> None:
        self.world, self.mesh = world, mesh
        self._over: dict[str, Transport] = {}
        if world is None:
            return
        for axes in sorted(used):
            is_world = mesh.size(axes) == mesh.num_ranks
            transport = world if is_world else world.split(mesh.groups(axes))
            transport.stream = stream_along(axes)
            self._over[axes_text(axes)] = transport

    def open_links(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare for messages from the first stage of each pair to the second. Collective, with the same ``pairs``."""
        self.transport_along(PIPE).open_links(pairs)

    def transport(self, axes: str) -> Transport:
        """The transport along ``axes``, in the text form of ``zerofx/ir/streams.py``."""
        return self._over[axes]

    def transport_along(self, axes: Axes) -> Transport:
        """The transport along the axes of a bucket."""
        return self.transport(axes_text(axes))

    def close(self) -> None:
        """Close all transports, after the last collective of all ranks."""
        if self.world is None:
            return
        for transport in self._over.values():
            if transport is not self.world:
                transport.close()
        self.world.close()
