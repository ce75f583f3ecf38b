"""Lower bounds of a step on a mesh, for any plan: of memory, and of time on the links between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerofx.scheduler.cost.transfers import CollectiveKind
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.plan.mesh import Axes, Mesh
from zerofx.scheduler.search.problem import Problem


@dataclass(frozen=True)
class Floor:
    """``held_bytes``: slices of parameters, states and masters of a rank, which stay on the device from step to step.
    ``link_seconds``: those of collectives on buckets, by the axes that they run over."""

    held_bytes: float
    link_seconds: Mapping[Axes, float]

    @property
    def busy_seconds(self) -> float:
        """Of the link that is busy for longest."""
        return max(self.link_seconds.values(), default=0.0)

    def plus(self, times: float, more: Floor, less: Floor) -> Floor:
        """This, and ``times`` by how much ``more`` is more than ``less``, which are about the same axes."""
        seconds = {
            axes: own + times * (more.link_seconds[axes] - less.link_seconds[axes])
            for axes, own in self.link_seconds.items()
        }
        return Floor(self.held_bytes + times * (more.held_bytes - less.held_bytes), seconds)


def floor_of(problem: Problem, mesh: Mesh) -> Floor:
    """Least bytes held, and seconds on links, of the ranks of ``mesh``: each bucket is gathered and reduced once."""
    stage, machine = problem.options.stage, problem.machine
    held, seconds = 0, dict[Axes, float]()

    def add(axes: Axes, kind: CollectiveKind, num_bytes: int) -> None:
        along = mesh.axes_in_use(axes)
        if along:
            seconds[along] = seconds.get(along, 0.0) + seconds_along(kind, num_bytes, mesh, along, machine)

    for bucket in problem.layout.buckets:
        gathered = bucket.is_gathered(stage)
        held += bucket.shard_bytes if gathered else bucket.full_bytes
        if gathered:
            add(bucket.gathered_over, "all_gather", bucket.full_bytes)
        if bucket.trainable:
            add(bucket.reduction_axes, "reduce_scatter", bucket.gradient_bytes)
            if bucket.crosses:
                add(bucket.crossed_over, "reduce_scatter", bucket.gradient_slice_bytes)
    if problem.options.delayed_update is None:  # else they are on the host
        held += sum(problem.state_bytes().values())
    return Floor(held, seconds)
