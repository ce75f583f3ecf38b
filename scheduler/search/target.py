"""The target that a step is planned, simulated and lowered for: one value, made once and passed on whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from zerofx.codegen.kernels.table import kernels_in_use
from zerofx.codegen.regions import cut, regions_of
from zerofx.ir.graph import StepGraph
from zerofx.options import CompileOptions
from zerofx.scheduler.cost.fusion import kernel_seconds
from zerofx.scheduler.cost.liveness import MemoryEvent, RegionLike
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.cost.timeline import UnitPhase, seconds_by_place
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.settings import Settings

# What compiled regions take and free inside, by region key: equal regions hold equal memory.
RegionMemory = Mapping[str, tuple[MemoryEvent, ...]]


@dataclass(frozen=True)
class Target:
    """A machine, how regions run on it, and what is known of both.

    ``on_cpu``: whether kernels and collectives are those of a CPU, which hold memory of their own.
    ``compiles_regions``: whether Inductor makes the kernels of regions, which hold less inside then. ``kernels``: those
    of zerofx's own that the step uses. ``shares_kernels``: whether other steps differ from it in sizes alone, so that
    its regions' kernels are built for all of them, once they are needed. ``arena``: whether what a step makes lies in
    one pool. ``costs``: measured costs to go by;
    ``machine`` has their links.
    ``measured_regions``: what regions hold that have been compiled; ``estimates``: a dict that simulations fill in
    place, of what regions hold by an estimate where they have not been measured. ``region_seconds``: what they take,
    where times are those of fused kernels. ``verbose``: whether this rank shows progress, and writes what
    ``ZEROFX_DEBUG`` asks for.
    """

    machine: Machine
    settings: Settings
    on_cpu: bool
    compiles_regions: bool
    kernels: frozenset[str]
    shares_kernels: bool = False
    arena: bool = False
    costs: MeasuredCosts | None = None
    measured_regions: RegionMemory = field(default_factory=dict)
    estimates: dict[str, tuple[MemoryEvent, ...]] = field(default_factory=dict, repr=False, compare=False)
    region_seconds: dict[str, float] = field(default_factory=dict, repr=False, compare=False)
    verbose: bool = True

    @staticmethod
    def create(
        machine: Machine,
        options: CompileOptions,
        settings: Settings,
        device: torch.device,
        *,
        on_cpu: bool,
        verbose: bool = True,
    ) -> Target:
        """The target of steps on ``machine`` whose graph has its tensors on ``device``."""
        compiles_regions = options.compiles_regions
        kernels = kernels_in_use(settings.kernels, device) if compiles_regions else frozenset[str]()
        shares = compiles_regions and options.lengths is not None
        return Target(machine, settings, on_cpu, compiles_regions, kernels, shares, options.arena, verbose=verbose)

    @property
    def fuses(self) -> bool:
        """True if times are those of fused kernels, which wait for memory: on a GPU, where regions are compiled."""
        return self.compiles_regions and not self.on_cpu

    def kernel_seconds(self, regions: Iterable[RegionLike]) -> Mapping[str, float]:
        """Seconds of compiled regions, by key: these, and all that were asked for before."""
        for region in regions:
            if region.key not in self.region_seconds:
                self.region_seconds[region.key] = kernel_seconds(region, self.machine)
        return self.region_seconds

    def seconds_by_place(self, step: StepGraph) -> dict[UnitPhase, float]:
        """Seconds of computation in each unit and phase of a captured step, as its regions run."""
        if self.costs is None and not self.fuses:
            return seconds_by_place(step, self.machine)
        regions = regions_of(cut(step))
        costs = self.costs or MeasuredCosts(self.kernel_seconds(regions))
        return seconds_by_place(step, self.machine, costs.seconds_by_node(regions, self.machine))

    def replace_costs(self, costs: MeasuredCosts, mesh: Mesh) -> Target:
        """The same where operators, and links between the ranks of ``mesh``, take what was measured."""
        return replace(self, machine=costs.machine(self.machine, mesh), costs=costs)

    def add_measured(self, memory: RegionMemory) -> Target:
        """The same with what regions hold that have been compiled by now."""
        return replace(
            self,
            measured_regions={**self.measured_regions, **memory},
            estimates={**self.estimates, **self.measured_regions, **memory},
        )
