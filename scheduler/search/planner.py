"""The plan for a captured graph: as the options say, or the fastest that fits a memory budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zerofx.codegen.kernels.table import LOSS
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.graph import StepGraph
from zerofx.optimizers import UpdateProgram
from zerofx.options import CompileOptions, gradients_tier, tiers_for
from zerofx.progress import watched
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.decide.coalesce import may_merge, merge_gathers
from zerofx.scheduler.decide.gradients import gradients_asked, place_gradients
from zerofx.scheduler.decide.overlap import hide_collectives
from zerofx.scheduler.decide.quantised_wire import with_wire
from zerofx.scheduler.decide.residency import decide
from zerofx.scheduler.decide.states import decisions_of, delayed_placements
from zerofx.scheduler.decide.tiling import named_tiles
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.bound import with_least_seconds
from zerofx.scheduler.search.budget import fit, least_memory
from zerofx.scheduler.search.evaluate import Estimates, Rehearsal
from zerofx.scheduler.search.graph_facts import Captured
from zerofx.scheduler.search.held import Held
from zerofx.scheduler.search.host_budget import fit_host
from zerofx.scheduler.search.problem import Question
from zerofx.settings import Settings


def budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A memory budget in bytes; a fraction is of the machine's device memory."""
    return int(asked * machine.device.memory_bytes) if isinstance(asked, float) else asked


def host_budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A host budget in bytes of one rank; a fraction is of its share of the machine's host memory."""
    return int(asked * machine.host_bytes_per_rank) if isinstance(asked, float) else asked


def make_plan(
    captured: StepGraph,
    layout: BucketLayout,
    programs: Mapping[int, UpdateProgram],
    machine: Machine,
    options: CompileOptions,
    settings: Settings,
    memory_budget: int | None,
    *,
    on_cpu: bool,
    costs: MeasuredCosts | None = None,
    talk: bool = True,
    estimates: Estimates | None = None,
) -> Plan:
    """Decide. Without a budget the plan is as the options say; with one it is the fastest that fits.

    Where ``options.wire`` allows it, buckets are then sent in few bits as far as that makes the step faster.
    ``costs`` are measured costs to go by; ``talk``: whether this rank shows how far the search is. What compiled
    regions are estimated to hold is added to ``estimates``, for further plans.

    Raises:
        MemoryBudgetError: no plan fits ``memory_budget`` bytes, or none does within the host budget.
        UsageError: ``options.tile`` names what cannot be tiled, or ranks do not fill nodes and ``options.wire`` asks.
    """
    machine = costs.machine(machine, layout.num_ranks) if costs is not None else machine
    rehearsal = Rehearsal(
        captured, layout, programs, machine, settings, on_cpu, options.compiles_regions, costs,
        {} if estimates is None else estimates,
    )  # fmt: skip
    plan = _exact_plan(rehearsal, options, memory_budget, merging=options.wire == "exact", talk=talk)
    if options.wire == "exact":
        return plan
    found = with_wire(plan, layout, machine, options.wire, rehearsal.simulated, memory_budget)
    if memory_budget is None or not all(one.is_exact for one in found.wires):
        return found
    merged = _exact_plan(rehearsal, options, memory_budget, merging=True, talk=talk)
    return replace(merged, wire=found.wire, ranks_per_node=found.ranks_per_node, wires=found.wires)


def _exact_plan(
    rehearsal: Rehearsal, options: CompileOptions, memory_budget: int | None, *, merging: bool, talk: bool
) -> Plan:
    """The plan that sends everything as it is; ``merging``: gathers may start together. See ``make_plan``."""
    captured, layout, machine = rehearsal.captured, rehearsal.layout, rehearsal.machine
    tiles = named_tiles(captured, options.tile) if isinstance(options.tile, Mapping) else ()
    state_bytes = _state_bytes(layout, rehearsal.programs, options.stage)
    delayed = delayed_placements(layout, state_bytes, options.stage) if options.delayed_update is not None else {}
    facts = Captured(captured, machine, tiles)
    gradients = gradients_asked(layout, captured.num_micro_batches, gradients_tier(options.offload, machine))
    if memory_budget is None and options.recompute != "full":
        # Only copies that are to be placed ask how long computation takes.
        placed = place_gradients(gradients, facts.tiled, layout, facts.seconds, machine) if gradients else ()
        return decide(
            captured, layout, stage=options.stage, precision=options.precision, machine=machine.name,
            options=options.policy, tiles=tiles, states=decisions_of(delayed), max_grad_norm=options.max_grad_norm,
            gradients=placed,
        )  # fmt: skip

    question = Question(
        captured=facts,
        layout=layout,
        stage=options.stage,
        precision=options.precision,
        memory_budget=memory_budget,
        recompute=options.recompute != "none",
        tiers=tiers_for(options.offload, machine),
        asked=options.policy,
        tile=options.tile == "auto",
        tile_classes=LOSS in rehearsal.kernels,
        state_bytes=state_bytes,
        delayed=delayed,
        max_grad_norm=options.max_grad_norm,
        gradients=gradients,
    )
    with watched("planning", "plans tried", show=talk) as bar:

        def peak(plan: Plan, begun: StepGraph) -> Held:
            bar.update()
            return rehearsal.held(plan, begun, done=("tile", "divide", "recompute"))

        def spend(plan: Plan) -> Iterator[Plan]:
            assert memory_budget is not None
            step, simulation = rehearsal.simulated(plan)
            hidden = hide_collectives(plan, step, layout, simulation, options.policy.prefetch, memory_budget)
            if hidden != plan:
                yield hidden
                step, simulation = rehearsal.simulated(hidden)
            if merging and may_merge(hidden, layout, machine):
                yield merge_gathers(hidden, step, layout, simulation, machine, memory_budget)

        def say(what: str) -> None:
            bar.set_description(f"planning ({what})")

        if memory_budget is None:
            return least_memory(question, rehearsal.predicted)
        limit = host_budget_bytes(options.host_budget, machine)

        def fit_device(one: Question) -> Plan:
            return fit(one, peak, rehearsal.predicted, say, spend)

        found = fit_host(question, limit, fit_device, rehearsal.host_block_bytes)
        # The bound is on times by rule, and says nothing of measured ones.
        if rehearsal.costs is not None:
            return found
        return with_least_seconds(found, captured, layout, machine, on_cpu=rehearsal.on_cpu, by_region=rehearsal.fused)


def _state_bytes(layout: BucketLayout, programs: Mapping[int, UpdateProgram], stage: int) -> dict[int, int]:
    """Bytes of one rank's optimizer states and masters, by bucket."""
    found = {}
    for index, program in programs.items():
        bucket = layout.buckets[index]
        local = bucket.shard_numel if stage >= 1 else bucket.numel
        master = bucket.dtype.itemsize if bucket.has_master else 0
        found[index] = local * (master + sum(state.dtype.itemsize for state in program.states))
    return found
