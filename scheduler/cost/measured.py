"""Costs that were measured, in the place of those that a machine's numbers lead to.

What is measured is a region as a whole: one run of nodes that is compiled, and timed, as one piece. Equal regions have
equal keys, whatever the plan, so that what one plan's run has shown holds for every plan that leads to the same region.
Collectives and copies between tiers are measured too, and correct the machine's links (``scheduler.cost.links``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zerofx.errors import PlanError
from zerofx.scheduler.cost.links import MeasuredLink, Transfer, correct_machine, fit_links
from zerofx.scheduler.cost.liveness import RegionLike
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.plan.mesh import Mesh


@dataclass(frozen=True)
class MeasuredCosts:
    """Measured seconds of one call of each distinct region, by the region's key, and ``links`` by stream.

    ``scale`` is how much longer all measured regions took together than was predicted for them. A region that was never
    measured is taken to be off by as much: a plan must not look better for what is not known of it. A link over which
    nothing was moved is as the machine has it.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    links: Mapping[str, MeasuredLink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), *self.seconds.items()):
            if not (math.isfinite(value) and (value > 0 or (value == 0 and name != "scale"))):
                raise PlanError(f"expected measured costs to be finite and positive, found {value} as {name}")

    @staticmethod
    def from_times(
        seconds: Mapping[str, float],
        regions: Iterable[RegionLike],
        machine: Machine,
        transfers: Mapping[str, Iterable[Transfer]] | None = None,
        mesh: Mesh | None = None,
    ) -> MeasuredCosts:
        """Ratios of measured costs to those that ``machine`` predicts.

        Args:
            seconds: of one call, by region key.
            regions: the regions that ran; those that were not measured do not count.
            transfers: collectives between the ranks of ``mesh`` (one rank without), and copies, by stream.
        """
        measured = predicted = 0.0
        for region in regions:
            if region.key in seconds:
                measured += seconds[region.key]
                predicted += sum(_predict_seconds(region, machine))
        scale = measured / predicted if measured and predicted else 1.0
        return MeasuredCosts(dict(seconds), scale, fit_links(transfers or {}, machine, mesh or Mesh()))

    def machine(self, machine: Machine, mesh: Mesh) -> Machine:
        """``machine`` with the links that were measured, for steps on ``mesh``."""
        return correct_machine(machine, self.links, mesh)

    def seconds_by_node(self, regions: Iterable[RegionLike], machine: Machine) -> dict[str, float]:
        """Seconds of every node of ``regions``, by name, for ``simulate``.

        The nodes of a region share its seconds in proportion to what ``machine`` predicts for them.
        """
        seconds_of: dict[str, float] = {}
        for region in regions:
            predicted = _predict_seconds(region, machine)
            total = sum(predicted)
            taken = self.seconds.get(region.key, self.scale * total)
            # Where nothing is predicted to take time, the region's last node stands for all of it.
            shares = predicted if total else [0.0] * (len(predicted) - 1) + [1.0]
            for node, share in zip(region.own, shares, strict=True):
                seconds_of[node.name] = taken * share / (total or 1.0)
        return seconds_of


def _predict_seconds(region: RegionLike, machine: Machine) -> list[float]:
    return [node_cost(node, machine).seconds for node in region.own]
