"""Outcomes of plans for a captured graph: each is carried out on a copy of it, and simulated.

Of peak memory there is also a lower bound for all shorter prefixes of the same moves (``Held``).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torch import fx

from zerofx.codegen.kernels.choose import update_kernels
from zerofx.codegen.kernels.table import UPDATE
from zerofx.codegen.regions import Instruction, cut, regions_of
from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, Role, copied_from, origin, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.operator import Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.ir.ops import gather_values
from zerofx.optimizers import UpdateProgram
from zerofx.pipeline import run_quietly
from zerofx.scheduler.cost.fusion import estimate_memory
from zerofx.scheduler.cost.liveness import Liveness, apply_profiles, liveness
from zerofx.scheduler.cost.simulate import Simulation, predict, simulate
from zerofx.scheduler.plan.facts import Prediction
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.target import Target

_REMEMBERED = 2  # simulations that a search remembers: those of two ways to do one thing are compared


@dataclass(frozen=True)
class Simulated:
    """A plan without the reasons that are given for it as a whole, and what it came to."""

    plan: Plan
    rehearsal: Rehearsal
    step: StepGraph
    simulation: Simulation


@dataclass(frozen=True)
class Rehearsal:
    """A captured graph to carry plans out on, copy by copy, and the target that the outcome is predicted for.

    ``latest``: what was simulated last, of this problem and others of one search, for whoever asks again.
    """

    captured: StepGraph
    layout: BucketLayout
    programs: Mapping[int, UpdateProgram]
    target: Target
    latest: deque[Simulated] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), repr=False, compare=False)

    def carry_out(self, plan: Plan) -> StepGraph:
        """The captured graph as all passes leave it."""
        step = self.captured.clone()
        run_quietly(step, plan, self.layout, self.programs, self.target.settings)
        return step

    def simulate(self, plan: Plan) -> tuple[StepGraph, Simulation]:
        """The graph that carries ``plan`` out, and its run on paper."""
        bare = replace(plan, states_reason="", micro_batches_reason="")
        for known in self.latest:
            if known.rehearsal.is_of(self.captured, self.layout, self.programs) and known.plan == bare:
                return known.step, known.simulation
        step = self.carry_out(plan)
        simulation = simulate_step(step, cut(step), self.layout, self.target)
        self.latest.append(Simulated(bare, self, step, simulation))
        return step, simulation

    def is_of(self, captured: StepGraph, layout: BucketLayout, programs: Mapping[int, UpdateProgram]) -> bool:
        """True if it is about this graph, layout and these updates."""
        return self.captured is captured and self.layout is layout and self.programs is programs

    def predict(self, plan: Plan) -> Prediction:
        """Prediction of the outcome of ``plan``."""
        step, simulation = self.simulate(plan)
        return predict(step, plan, self.layout, simulation)

    def peak_memory(self, plan: Plan, begun: StepGraph, done: Collection[str]) -> Held:
        """Peak memory of the device when ``plan`` is carried out on ``begun``, which has had the passes ``done``."""
        target = self.target
        run_quietly(begun, plan, self.layout, self.programs, target.settings, done=done)
        live = liveness(begun, target.on_cpu, compiles_regions=target.compiles_regions)
        if target.compiles_regions:
            live = _live_when_compiled(live, begun, cut(begun), target)
        return peak_memory(begun, live)

    def host_block_bytes(self, plan: Plan) -> int:
        """Host bytes of ``plan``, counted in blocks."""
        return self.simulate(plan)[1].live.host_block_bytes


def simulate_step(
    step: StepGraph, instructions: tuple[Instruction, ...], layout: BucketLayout, target: Target
) -> Simulation:
    """The run of a step on paper as measured costs, if there are any, and compiled regions make it.

    ``instructions`` are those that ``step`` is cut into.
    """
    costs, machine, compiles_regions = target.costs, target.machine, target.compiles_regions
    measured = None
    if costs is not None:
        measured = costs.seconds_by_node(regions_of(instructions), machine)
    elif target.fuses:
        measured = _seconds_when_compiled(instructions, target)
    simulation = simulate(
        step, machine, layout.mesh, on_cpu=target.on_cpu, compiles_regions=compiles_regions, measured=measured
    )
    if compiles_regions:
        live = _live_when_compiled(simulation.live, step, instructions, target)
        simulation = replace(simulation, live=live)
    return simulation


def _seconds_when_compiled(instructions: tuple[Instruction, ...], target: Target) -> dict[str, float]:
    """Seconds of nodes in regions that are compiled for a GPU, by name: the last that computes has those of its region,
    which runs as one piece. Equal regions take equal times."""
    seconds: dict[str, float] = {}
    of_regions = target.kernel_seconds(regions_of(instructions))
    for region in regions_of(instructions):
        seconds |= dict.fromkeys((node.name for node in region.own), 0.0)
        last = next((node for node in reversed(region.own) if not is_view(node)), region.own[-1])
        seconds[last.name] = of_regions[region.key]
    return seconds


def _live_when_compiled(
    live: Liveness, step: StepGraph, instructions: tuple[Instruction, ...], target: Target
) -> Liveness:
    """``live`` as it will be with compiled regions, by the target's estimates, to which those made here are added.

    Updates run on torch's kernels, or on one of ours, which holds nothing.
    """
    regions, estimates = regions_of(instructions), target.estimates
    if UPDATE in target.kernels:
        unknown = [region for region in regions if region.key not in estimates]
        estimates |= dict.fromkeys(update_kernels(unknown).kernels, ())
    compiled = [region for region in regions if not region.is_update or region.key in estimates]
    for region in compiled:
        if region.key not in estimates:
            estimates[region.key] = estimate_memory(region, target.kernels, on_cpu=target.on_cpu)
    return apply_profiles(live, step, [(region, estimates[region.key]) for region in compiled])


_BRINGING: Final = frozenset({ops.reload, ops.all_gather, ops.gather_on_node, gather_values, ops.restore_saved})


@dataclass(frozen=True)
class Held:
    """The device's peak in bytes, and ``firm_bytes``, below which no plan of fewer moves can be."""

    peak_bytes: int
    firm_bytes: int


def peak_memory(step: StepGraph, live: Liveness) -> Held:
    """Peak bytes of ``step``, whose bytes are ``live``, and the most that plans of fewer moves hold at some node too.

    They hold there what stays between steps, values that were computed before and are read there or later, and the
    weights that the node reads; not what is recomputed, gathered or reloaded for others, nor what is only there for
    what shorter prefixes do elsewhere, or not at all. A region is one node here, without what it holds inside.
    """
    order = step.positions()
    begins = {node: order[nodes[0]] for nodes in live.compiled for node in nodes}
    changes = [0] * (len(order) + 1)
    for storage, size in live.sizes.items():
        owner, is_weight = storage[0], _brings_weights(storage[0])
        if copied_from(owner) is not None or (owner.target in _BRINGING and not is_weight):
            continue
        # What is computed again is not in all of them, and a buffer gets its next value after what reads the last.
        read = {
            begins.get(reader, order[reader])
            for reader in consumers(owner)
            if copied_from(reader) is None
            and facts_of(reader.target).traffic is not Traffic.OVERWRITES
            and not (is_weight and origin(reader).phase is Phase.UPDATE)
        }
        freed_by = live.last_use.get(storage, step.output)  # of several results each has its own last reader
        end = begins.get(freed_by, order[freed_by])
        for first, last in (
            [(at, at) for at in sorted(read)] if is_weight else [(order[owner] + 1, max(read, default=0))]
        ):
            if first <= (last := min(last, end)):
                changes[first] += size
                changes[last + 1] -= size
    held = itertools.accumulate(changes)
    at_nodes = (num for (node, at), num in zip(order.items(), held, strict=False) if begins.get(node, at) == at)
    return Held(live.peak_bytes, live.persistent_bytes + max(at_nodes, default=0))


def _brings_weights(owner: fx.Node) -> bool:
    """True for what gathers a bucket, or brings one up that waits in a slower tier."""
    source: Any = owner
    while source.target in (ops.reload, ops.wait):
        source = source.args[0]
    is_up = source is not owner and source.op == "placeholder" and placeholder(source).role in (Role.FULL, Role.SHARD)
    return is_up or source.target in (ops.all_gather, ops.gather_on_node)
