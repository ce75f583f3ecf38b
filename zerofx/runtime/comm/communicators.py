"""Transports of a mesh: one for each set of axes that a step's collectives run over."""

from __future__ import annotations

from collections.abc import Collection

from zerofx.ir.collective_axes import axes_text
from zerofx.ir.streams import stream_along
from zerofx.runtime.comm.transport import Transport
from zerofx.scheduler.plan.mesh import Axes, Mesh


class Communicators:
    """The transport between all ranks, and those between the ranks of this rank's groups along some axes of a mesh.

    Collective to make: all ranks make the same, in the same order. ``world`` is None for one rank, where nothing is
    moved; ``used`` are the sets of axes, of more than one rank each.
    """

    def __init__(self, world: Transport | None, mesh: Mesh, used: Collection[Axes]) -> None:
        self.world = world
        self._over: dict[str, Transport] = {}
        if world is None:
            return
        for axes in sorted(used):
            is_world = mesh.size(axes) == mesh.num_ranks
            transport = world if is_world else world.among(mesh.groups(axes))
            transport.stream = stream_along(axes)
            self._over[axes_text(axes)] = transport

    def over(self, axes: str) -> Transport:
        """The transport along ``axes`` (``zerofx/ir/collective_axes.py`` has how they are written)."""
        return self._over[axes]

    def along(self, axes: Axes) -> Transport:
        """The same, for axes as a bucket has them."""
        return self.over(axes_text(axes))

    def close(self) -> None:
        """After the last collective of all ranks."""
        if self.world is None:
            return
        for transport in self._over.values():
            if transport is not self.world:
                transport.close()
        self.world.close()
