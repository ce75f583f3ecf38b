"""What can be decided about a step, each with its menu of levels, and the plan that a choice of levels leads to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.buckets import Bucket
from zerofx.ir.facts import Phase, origin
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import put_off, recompute
from zerofx.passes.activations.spread import spread
from zerofx.passes.divide import end_regions_at
from zerofx.scheduler.analysis.saved_values import storage_size, value_node
from zerofx.scheduler.cost.timeline import UnitPhase, runs
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.decide.activations import ActivationLevel, Segment, free_levels, menu
from zerofx.scheduler.decide.gathers import CollectiveLevel, keep_menus, prefetch_menu, reduction_menu, why_kept
from zerofx.scheduler.decide.gradients import GradientLevel, gradient_menus, place_gradients
from zerofx.scheduler.decide.offload import Capacity, OffloadRequest, away_seconds, entries, joint_menu, place
from zerofx.scheduler.decide.parameters import ParameterLevel, copies_menu, parameter_menus
from zerofx.scheduler.decide.prefetch import NUM_BUFFERS, place_arrivals
from zerofx.scheduler.decide.residency import PolicyOptions, decide, residencies
from zerofx.scheduler.decide.spread import SpreadLevel, spread_menu, spreads_of
from zerofx.scheduler.decide.states import StateLevel, decisions_of, left_to_activations, state_menus
from zerofx.scheduler.plan.decisions import (
    GradientDecision,
    ParameterDecision,
    RecomputeDecision,
    StateDecision,
)
from zerofx.scheduler.plan.mesh import MODEL
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.tiers import Tier
from zerofx.scheduler.search.order import Move, reached
from zerofx.scheduler.search.question import Leaning, Question
from zerofx.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Activations:
    """What becomes of the activations of one run of a repeated layer, or between layers."""

    segment: Segment
    levels: tuple[ActivationLevel, ...]


@dataclass(frozen=True)
class Keeping:
    """Whether a bucket stays gathered from forward to backward."""

    bucket: Bucket
    levels: tuple[CollectiveLevel, CollectiveLevel]


@dataclass(frozen=True)
class Prefetching:
    """How many units ahead gathers are issued, by level; with none, copies from slower tiers are awaited at once."""

    levels: tuple[CollectiveLevel, ...]
    units: tuple[int, ...]


@dataclass(frozen=True)
class Awaiting:
    """Whether reductions are awaited a unit later, or where they are issued."""

    levels: tuple[CollectiveLevel, CollectiveLevel]


@dataclass(frozen=True)
class States:
    """Where a bucket's optimizer states live."""

    bucket: Bucket
    levels: tuple[StateLevel, StateLevel]


@dataclass(frozen=True)
class Parameters:
    """Where a bucket's parameters live between uses."""

    bucket: Bucket
    levels: tuple[ParameterLevel, ParameterLevel]


@dataclass(frozen=True)
class Accumulated:
    """What of a bucket's gradients waits between micro-batches, and where."""

    bucket: Bucket
    levels: tuple[GradientLevel, ...]


@dataclass(frozen=True)
class Spreading:
    """Which values of a layer, of those that all ranks of the model axis have, wait for backward in parts."""

    segment: Segment
    levels: tuple[SpreadLevel, ...]


Item = Activations | Keeping | Prefetching | Awaiting | States | Parameters | Accumulated | Spreading


def items_of(question: Question, leaning: Leaning) -> list[Item]:
    """All that can be decided, in a fixed order."""
    items: list[Item] = [*_activations(question, leaning), *_spreading(question)]
    if any(bucket.is_gathered(question.stage) for bucket in question.layout.buckets):
        asked, seconds = question.asked, question.facts.seconds_of_one
        gathered = residencies(question.facts.divided, question.layout, asked)
        items += [
            Keeping(bucket, levels) for bucket, levels in keep_menus(gathered, asked, seconds, question.machine).items()
        ]
        levels = prefetch_menu(gathered, question.layout, asked.prefetch, seconds, question.machine)
        items.append(Prefetching(levels, tuple(range(asked.prefetch, -1, -1))))
    if question.layout.num_ranks > 1:
        items.append(Awaiting(reduction_menu(question.layout, question.facts.seconds_of_one, question.machine)))
    if leaning != "recompute" and (question.delayed or question.fixed is not None):
        items += _prefetching_copies(question, items)
    elif leaning != "recompute":
        activation_bytes = _offloaded_bytes(items)
        menus = state_menus(
            question.layout, question.state_bytes, question.stage, question.facts.seconds_of_one, question.machine,
            question.tiers, activation_bytes, clipped=question.undecided.updates_wait,
        )  # fmt: skip
        items += [States(bucket, levels) for bucket, levels in menus.items()]
        if question.stage == 3:
            items += _parameters(question, {bucket: off for bucket, (_, off) in menus.items()}, activation_bytes)
        items += _prefetching_copies(question, items)
    return items + _accumulated(question, items, leaning)


def free_items(question: Question) -> list[Activations]:
    """The layers in which less is kept if backward computes again what costs it nothing."""
    first = {part.key: part for part in reversed(question.facts.segments) if part.unit}
    menus = {key: levels for key, part in first.items() if len(levels := free_levels(part)) > 1}
    return [Activations(part, menus[part.key]) for part in question.facts.segments if part.key in menus]


def num_free(items: Sequence[Item], moves: Sequence[Move]) -> int:
    """How many of the first ``moves`` cost nothing, and are made in any case."""

    def is_free(move: Move) -> bool:
        item = items[move.item]
        return isinstance(item, Activations) and not item.levels[move.level].seconds

    return sum(1 for _ in itertools.takewhile(is_free, moves))


def _accumulated(question: Question, others: Sequence[Item], leaning: Leaning) -> list[Item]:
    """Gradients between micro-batches: in slices, or in the room that states and parameters leave elsewhere."""
    states = {item.bucket: item.levels[1] for item in others if isinstance(item, States)} or question.delayed
    parameters = [item.levels[1].decision(item.bucket, 0) for item in others if isinstance(item, Parameters)]
    menus = gradient_menus(
        question.layout, question.stage, question.step.num_micro_batches, question.reduce,
        question.facts.seconds_of_one, question.machine,
        _capacity(question, states, parameters).tiers if leaning != "recompute" else {},
    )  # fmt: skip
    return [Accumulated(bucket, levels) for bucket, levels in menus.items()]


def _prefetching_copies(question: Question, others: Sequence[Item]) -> list[Item]:
    """Whether copies are issued ahead, where no gathers are."""
    prefetch = question.asked.prefetch
    if not question.tiers or not prefetch or any(isinstance(item, Prefetching) for item in others):
        return []
    levels = copies_menu(question.layout, question.state_bytes, question.tiers[0], question.machine)
    return [Prefetching(levels, (prefetch, 0))]


def _offloaded_bytes(items: Sequence[Item]) -> int:
    """What activations take elsewhere where the least of them stays on the device."""
    last = [(item.segment, item.levels[-1]) for item in items if isinstance(item, Activations)]
    return sum(storage_size(segment.values[i]) for segment, level in last for i in level.offloaded)


def _parameters(question: Question, states: Mapping[Bucket, StateLevel], activation_bytes: int) -> list[Parameters]:
    """``states`` are where states may go, which takes room too, and ``activation_bytes`` what activations may take."""
    used = residencies(question.facts.divided, question.layout, question.asked)
    capacity = dict(_capacity(question, states).tiers)
    everything = sum(bucket.shard_bytes for bucket in question.layout.buckets) + activation_bytes
    if "nvme" in capacity and "host" in capacity and everything > capacity["host"]:
        capacity["host"] -= left_to_activations(activation_bytes, capacity["host"])
    menus = parameter_menus(
        used,
        question.layout,
        question.state_bytes,
        question.facts.seconds_of_one,
        question.machine,
        capacity,
        states,
        activation_bytes,
    )
    return [Parameters(bucket, levels) for bucket, levels in menus.items()]


def _activations(question: Question, leaning: Leaning) -> list[Activations]:
    if not question.recompute and not question.tiers:
        return []
    parts = question.facts.segments
    num_layers = len(parts) // question.step.num_bodies
    # The peak is that of the worst micro-batch: a layer makes the same move in each before another layer does.
    parts = [part for layer in range(num_layers) for part in parts[layer::num_layers]]
    machine, first = question.machine, {part.key: part for part in reversed(parts)}
    if leaning == "recompute":
        menus = {key: menu(part, machine, inlines=question.inlines) for key, part in first.items()}
        return [Activations(part, menus[part.key]) for part in parts]
    tier, recompute = question.tiers[0], leaning == "joint"
    # Of layers that are alike one at a time has its values back, and so it is with pieces, which need not be alike.
    alike = Counter(_kind(part) for part in parts)
    entries_of = {
        key: entries(part, machine, tier, alike[_kind(part)], recompute=recompute) for key, part in first.items()
    }
    spans = runs(question.facts.divided, question.facts.seconds)
    return [Activations(part, joint_menu(entries_of[part.key], away_seconds(part, spans))) for part in parts]


def _spreading(question: Question) -> list[Spreading]:
    mesh, machine = question.layout.mesh, question.machine

    def seconds(num_bytes: int) -> float:
        cut = 2 * num_bytes / mesh.model / machine.memory_bandwidth
        return cut + seconds_along("all_gather", num_bytes, mesh, MODEL, machine)

    if mesh.model == 1:
        return []
    menus = [(part, spread_menu(part, mesh.model, seconds)) for part in question.facts.segments]
    return [Spreading(part, levels) for part, levels in menus if len(levels) > 1]


def _kind(part: Segment) -> str:
    return "piece" if part.piece else part.key


@dataclass
class _Choice:
    """What the levels that moves have reached come to, by kind of decision."""

    prefetch: int
    keep: dict[str, str]
    seconds: dict[UnitPhase, float]  # of computation, what is computed again included
    hide_reductions: bool = True
    recomputes: list[RecomputeDecision] = field(default_factory=list)
    extra_keeps: dict[str, None] = field(default_factory=dict)
    requests: dict[str, OffloadRequest] = field(default_factory=dict)
    states: list[StateDecision] = field(default_factory=list)
    state_levels: dict[Bucket, StateLevel] = field(default_factory=dict)  # of the same buckets
    parameters: list[ParameterDecision] = field(default_factory=list)
    gradients: list[GradientDecision] = field(default_factory=list)
    each: dict[int, str] = field(default_factory=dict)  # buckets that are reduced in each micro-batch
    spreads: dict[str, str] = field(default_factory=dict)  # reasons by value


def plan_of(question: Question, items: Sequence[Item], moves: Sequence[Move]) -> tuple[Plan, StepGraph]:
    """The plan that some moves lead to, and a copy of the captured graph with tiles and recomputation carried out."""
    chosen = _choose(question, items, reached(moves))
    recomputed, extra = frozenset(decision.value for decision in chosen.recomputes), frozenset(chosen.extra_keeps)
    carried_out = question.facts.divided.clone()
    recompute(carried_out, recomputed, extra)
    capacity = _capacity(question, chosen.state_levels, chosen.parameters, chosen.gradients)
    offloads = place(carried_out, list(chosen.requests.values()), chosen.seconds, question.machine, capacity)
    if not offloads:
        put_off(carried_out)
    divided = question.facts.pieces_without(recomputed.union(decision.value for decision in offloads))
    end_regions_at(carried_out, divided)
    spreads = spreads_of(
        carried_out, chosen.spreads, question.layout.mesh.model, {decision.value for decision in offloads}
    )
    spread(carried_out, spreads, question.layout.mesh.model)
    plan = replace(
        question.undecided,
        recomputes=tuple(chosen.recomputes),
        extra_keeps=tuple(chosen.extra_keeps),
        pieces=divided,
        tiles=question.tiles,
        offloads=offloads,
        spreads=spreads,
        states=tuple(chosen.states),
        parameters=tuple(chosen.parameters),
        gradients=place_gradients(chosen.gradients, carried_out, question.layout, chosen.seconds, question.machine),
    )
    keep = "all" if question.asked.keep == "all" else chosen.keep
    options = PolicyOptions(chosen.prefetch, keep, chosen.hide_reductions)
    plan = decide(carried_out, question.layout, plan, options, each=chosen.each)
    plan = place_arrivals(
        plan,
        carried_out,
        question.layout,
        question.state_bytes,
        chosen.seconds,
        question.machine,
        ahead=chosen.prefetch > 0,
    )
    return plan, carried_out


def _choose(question: Question, items: Sequence[Item], levels: Mapping[int, Move]) -> _Choice:
    """What is decided about each item, given the last move made for those that have been moved."""
    asked = question.asked
    chosen = _Choice(asked.prefetch, dict.fromkeys(_named(asked), "as asked"), dict(question.facts.seconds))
    chosen.states += decisions_of(question.delayed)
    chosen.state_levels |= question.delayed
    if question.fixed is not None:
        chosen.states += question.fixed.states
        chosen.parameters += question.fixed.parameters
        chosen.state_levels |= question.levels_where_fixed
    chosen.gradients += question.gradients
    chosen.each |= question.reduced_each
    for number, item in enumerate(items):
        move = levels.get(number)
        if isinstance(item, Keeping) and move is None:
            chosen.keep[item.bucket.name] = why_kept(item.bucket, item.levels)
        elif isinstance(item, Prefetching) and move is not None:
            chosen.prefetch = item.units[move.level]
        elif isinstance(item, Awaiting) and move is not None:
            chosen.hide_reductions = False
        elif isinstance(item, States) and move is not None:
            chosen.states.append(item.levels[1].decision(item.bucket, move.freed_bytes))
            chosen.state_levels[item.bucket] = item.levels[1]
        elif isinstance(item, Parameters) and move is not None:
            chosen.parameters.append(item.levels[1].decision(item.bucket, move.freed_bytes))
        elif isinstance(item, Accumulated) and move is not None:
            waiting = item.levels[move.level]
            if waiting.each:
                chosen.each[item.bucket.index] = waiting.why_each(move.freed_bytes)
            else:
                chosen.each.pop(item.bucket.index, None)
                chosen.gradients.append(waiting.decision(item.bucket, move.freed_bytes))
        elif isinstance(item, Spreading) and move is not None:
            why = (
                f"the last move for {item.segment.name} frees {format_bytes(move.freed_bytes)} on each of "
                f"{question.layout.mesh.model} ranks for {format_seconds(move.extra_seconds)} to gather them"
            )
            chosen.spreads |= dict.fromkeys(item.levels[move.level].values, why)
        elif isinstance(item, Activations) and move is not None:
            _choose_activations(question, item, move, chosen)
    return chosen


def _choose_activations(question: Question, item: Activations, move: Move, chosen: _Choice) -> None:
    segment, level = item.segment, item.levels[move.level]
    again = (segment.unit, Phase.BACKWARD)
    chosen.seconds[again] = chosen.seconds.get(again, 0.0) + level.seconds
    reached_level = f"level {move.level} of {len(item.levels) - 1} for {segment.name}"
    reason = (
        f"{reached_level}: the last move frees {format_bytes(move.freed_bytes)} for "
        f"{format_seconds(move.extra_seconds)} of computation"
    )
    if question.inlines and not level.seconds:
        reason = f"computed by the kernels of backward that read it: {format_bytes(move.freed_bytes)} less to keep"
    for i, storage in enumerate(segment.values):
        node = value_node(storage)
        if i in segment.needed and i not in level.saved:
            size = storage_bytes(tensors_of(node)[0])
            chosen.recomputes.append(RecomputeDecision(node.name, size, reason, origin(node).layer))
        elif i in level.saved and storage not in question.facts.crossing:
            chosen.extra_keeps[node.name] = None
        if i in level.offloaded:
            chosen.requests[node.name] = OffloadRequest(node.name, reached_level)


def _capacity(
    question: Question,
    states: Mapping[Bucket, StateLevel],
    parameters: Sequence[ParameterDecision] = (),
    gradients: Sequence[GradientDecision] = (),
) -> Capacity:
    """What one rank has left for activations besides its states and parameters."""
    machine = question.machine
    left: dict[Tier, int] = {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank}
    for tier in left:
        left[tier] -= sum(placement.stored_bytes for placement in states.values() if placement.tier == tier)
        buckets = [question.layout.buckets[decision.bucket] for decision in parameters if decision.tier == tier]
        with_states = {bucket for bucket in buckets if bucket in states and states[bucket].parameter_bytes}
        left[tier] -= sum(bucket.shard_bytes for bucket in buckets if bucket not in with_states)
        left[tier] -= sum(decision.num_bytes for decision in gradients if decision.tier == tier)
    left["host"] -= sum(placement.waiting_bytes for placement in states.values())
    left["host"] -= NUM_BUFFERS * max((placement.passing_bytes for placement in states.values()), default=0)
    return Capacity({tier: left[tier] for tier in question.tiers}, left["host"])


def _named(asked: PolicyOptions) -> tuple[str, ...]:
    return () if isinstance(asked.keep, str) else tuple(asked.keep)
