"""What can be decided about a step, each with its menu of levels, and the plan that a choice of levels leads to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from zerofx.buckets import Bucket, BucketLayout
from zerofx.graph import Phase, StepGraph, origin
from zerofx.passes.recompute import put_off
from zerofx.passes.recompute import recompute as carry_out
from zerofx.passes.tile import tile
from zerofx.report.units import format_bytes, format_seconds
from zerofx.scheduler.activations import Level, Segment, Storage, crossing_storages, menu, segments, value_node
from zerofx.scheduler.gathers import Gathering, keep_menus, prefetch_menu, why_kept
from zerofx.scheduler.machine import Machine, Tier
from zerofx.scheduler.moves import Move, reached
from zerofx.scheduler.offload import Wish, away_seconds, entries, joint_menu, place
from zerofx.scheduler.plan import Plan, RecomputeDecision, StateDecision, TileDecision
from zerofx.scheduler.policy import PolicyOptions, decide, residencies
from zerofx.scheduler.states import Placement, state_menus
from zerofx.scheduler.storage import storage_bytes, tensors_of
from zerofx.scheduler.timeline import Place, runs, seconds_by_place

Leaning = Literal["recompute", "offload", "joint"]


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for.

    ``recompute``: whether activations may be computed again. ``tiers``: where they may be offloaded to, the first being
    filled first; none if empty. ``asked``: how buckets are gathered as long as memory allows. ``state_bytes``: bytes of
    one rank's optimizer states and masters, by bucket index. ``tile``: whether values may be tiled; ``tiles``: how they
    are.
    """

    step: StepGraph
    layout: BucketLayout
    machine: Machine
    stage: int
    precision: str | None
    memory_budget: int | None
    recompute: bool
    tiers: tuple[Tier, ...] = ()
    asked: PolicyOptions = field(default_factory=PolicyOptions)
    state_bytes: Mapping[int, int] = field(default_factory=dict)
    tile: bool = False
    tiles: tuple[TileDecision, ...] = ()

    @cached_property
    def tiled(self) -> StepGraph:
        """The captured graph with ``tiles`` carried out: what all other decisions are about."""
        if not self.tiles:
            return self.step
        found = self.step.clone()
        tile(found, self.tiles)
        return found

    @cached_property
    def seconds(self) -> dict[Place, float]:
        """Seconds of computation by unit and phase."""
        return seconds_by_place(self.tiled, self.machine)

    @cached_property
    def seconds_of_one(self) -> dict[Place, float]:
        """Seconds of computation by unit and phase, of one micro-batch: what is beside a single transfer."""
        return {place: total / self.step.num_micro_batches for place, total in self.seconds.items()}

    @cached_property
    def crossing(self) -> dict[Storage, None]:
        """Storages that forward makes and backward reads."""
        return crossing_storages(self.tiled)

    @property
    def leanings(self) -> tuple[Leaning, ...]:
        """The ways to hold fewer activations; the joint one chooses for each tensor."""
        if self.recompute and self.tiers:
            return ("joint", "recompute", "offload")
        return ("offload",) if self.tiers else ("recompute",)


@dataclass(frozen=True)
class Activations:
    """What becomes of the activations of one run of a repeated layer."""

    segment: Segment
    levels: tuple[Level, ...]


@dataclass(frozen=True)
class Keeping:
    """Whether a bucket stays gathered from forward to backward."""

    bucket: Bucket
    levels: tuple[Gathering, Gathering]


@dataclass(frozen=True)
class Prefetching:
    """How many units ahead gathers are issued: one less with each level."""

    levels: tuple[Gathering, ...]


@dataclass(frozen=True)
class States:
    """Where a bucket's optimizer states live."""

    bucket: Bucket
    levels: tuple[Placement, Placement]


Item = Activations | Keeping | Prefetching | States


def items_of(question: Question, leaning: Leaning) -> list[Item]:
    """All that can be decided, in a fixed order."""
    found: list[Item] = list(_activations(question, leaning))
    if question.stage == 3 and question.layout.num_ranks > 1:
        asked = question.asked
        gathered = residencies(question.tiled, question.layout, asked)
        found += [
            Keeping(bucket, levels)
            for bucket, levels in keep_menus(gathered, asked, question.seconds_of_one, question.machine).items()
        ]
        found.append(
            Prefetching(
                prefetch_menu(gathered, question.layout, asked.prefetch, question.seconds_of_one, question.machine)
            )
        )
    if leaning != "recompute":
        menus = state_menus(
            question.layout, question.state_bytes, question.stage, question.seconds_of_one, question.machine,
            question.tiers,
        )  # fmt: skip
        found += [States(bucket, levels) for bucket, levels in menus.items()]
    return found


def _activations(question: Question, leaning: Leaning) -> list[Activations]:
    if not question.recompute and not question.tiers:
        return []
    parts = segments(question.tiled)
    num_layers = len(parts) // question.step.num_micro_batches
    # The peak is that of the worst micro-batch: a layer makes the same move in each before another layer does.
    parts = [part for layer in range(num_layers) for part in parts[layer::num_layers]]
    machine, first = question.machine, {part.key: part for part in reversed(parts)}
    if leaning == "recompute":
        menus = {key: menu(part, machine) for key, part in first.items()}
        return [Activations(part, menus[part.key]) for part in parts]
    tier, recompute = question.tiers[0], leaning == "joint"
    alike = Counter(part.key for part in parts)
    found = {key: entries(part, machine, tier, alike[key], recompute=recompute) for key, part in first.items()}
    spans = runs(question.tiled, question.seconds)
    return [Activations(part, joint_menu(found[part.key], away_seconds(part, spans))) for part in parts]


def plan_of(question: Question, items: Sequence[Item], moves: Sequence[Move]) -> tuple[Plan, StepGraph]:
    """The plan that some moves lead to, and a copy of the captured graph with tiles and recomputation carried out."""
    prefetch, keep = question.asked.prefetch, dict.fromkeys(_named(question.asked), "as asked")
    seconds = dict(question.seconds)
    recomputes: list[RecomputeDecision] = []
    extra: dict[str, None] = {}
    wishes: dict[str, Wish] = {}
    states: list[StateDecision] = []
    levels = reached(moves)
    for number, item in enumerate(items):
        move = levels.get(number)
        if isinstance(item, Keeping) and move is None:
            keep[item.bucket.name] = why_kept(item.bucket, item.levels)
        elif isinstance(item, Prefetching) and move is not None:
            prefetch -= move.level
        elif isinstance(item, States) and move is not None:
            states.append(item.levels[1].decision(item.bucket, move.freed_bytes))
        elif isinstance(item, Activations) and move is not None:
            segment, level = item.segment, item.levels[move.level]
            place_ = (segment.unit, Phase.BACKWARD)
            seconds[place_] = seconds.get(place_, 0.0) + level.seconds
            reached_level = f"level {move.level} of {len(item.levels) - 1} for {segment.unit}"
            reason = (
                f"{reached_level}: the last move frees {format_bytes(move.freed_bytes)} for "
                f"{format_seconds(move.extra_seconds)} of computation"
            )
            for i, storage in enumerate(segment.values):
                node = value_node(storage)
                if i in segment.needed and i not in level.kept:
                    size = storage_bytes(tensors_of(node)[0])
                    recomputes.append(RecomputeDecision(node.name, size, reason, origin(node).layer))
                elif i in level.kept and storage not in question.crossing:
                    extra[node.name] = None
                if i in level.offloaded:
                    wishes[node.name] = Wish(node.name, reached_level)
    carried_out = question.tiled.clone()
    carry_out(carried_out, frozenset(decision.value for decision in recomputes), frozenset(extra))
    offloads = place(carried_out, list(wishes.values()), seconds, question.machine, _room(question, states))
    if not offloads:
        put_off(carried_out)
    plan = decide(
        question.step,
        question.layout,
        stage=question.stage,
        precision=question.precision,
        machine=question.machine.name,
        options=PolicyOptions(prefetch, "all" if question.asked.keep == "all" else keep),
        recomputes=tuple(recomputes),
        extra_keeps=tuple(extra),
        tiles=question.tiles,
        offloads=offloads,
        states=tuple(states),
        memory_budget=question.memory_budget,
        carried_out=carried_out,
    )
    return plan, carried_out


def _room(question: Question, states: Sequence[StateDecision]) -> dict[Tier, int]:
    """Bytes of each tier that one rank has left for activations, the tier to fill first in front."""
    machine = question.machine
    sizes: dict[Tier, int] = {"host": machine.host_bytes_per_rank, "nvme": machine.nvme_bytes_per_rank}
    room = {tier: sizes[tier] for tier in question.tiers}
    for tier in room:
        room[tier] -= sum(question.state_bytes[decision.bucket] for decision in states if decision.tier == tier)
    return room


def _named(asked: PolicyOptions) -> tuple[str, ...]:
    return () if isinstance(asked.keep, str) else tuple(asked.keep)
