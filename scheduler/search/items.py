"""What can be decided about a step, each with its menu of levels and the decisions that these come to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerofx.ir.aliasing import storage_bytes, tensors_of
from zerofx.ir.buckets import Bucket
from zerofx.ir.facts import Phase, origin
from zerofx.scheduler.analysis.saved_values import storage_size, value_node
from zerofx.scheduler.cost.timeline import runs
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.decide.activations import ActivationLevel, Segment, free_levels, menu
from zerofx.scheduler.decide.gathers import CollectiveLevel, keep_menus, prefetch_menu, reduction_menu, why_kept
from zerofx.scheduler.decide.gradients import GradientLevel, gradient_menus
from zerofx.scheduler.decide.offload import OffloadRequest, away_seconds, entries, joint_menu
from zerofx.scheduler.decide.parameters import ParameterLevel, copies_menu, parameter_menus
from zerofx.scheduler.decide.residency import residencies
from zerofx.scheduler.decide.spread import SpreadLevel, spread_menu
from zerofx.scheduler.decide.states import StateLevel, left_to_activations, state_menus
from zerofx.scheduler.plan.decisions import RecomputeDecision
from zerofx.scheduler.plan.mesh import MODEL
from zerofx.scheduler.search.choice import Choice, Item, capacity
from zerofx.scheduler.search.order import Move
from zerofx.scheduler.search.question import Leaning, Question
from zerofx.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Activations(Item):
    """What becomes of the activations of one run of a repeated layer, or between layers."""

    segment: Segment
    levels: tuple[ActivationLevel, ...]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        segment, level = self.segment, self.levels[move.level]
        again = (segment.unit, Phase.BACKWARD)
        extra = level.seconds * question.facts.share_run(segment.unit)
        chosen.seconds[again] = chosen.seconds.get(again, 0.0) + extra
        reached_level = f"level {move.level} of {len(self.levels) - 1} for {segment.name}"
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


@dataclass(frozen=True)
class Keeping(Item):
    """Whether a bucket stays gathered from forward to backward."""

    bucket: Bucket
    levels: tuple[CollectiveLevel, CollectiveLevel]

    def stay(self, chosen: Choice) -> None:
        chosen.keep[self.bucket.name] = why_kept(self.bucket, self.levels)

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        """What is gathered again is not kept: there is nothing to enter."""


@dataclass(frozen=True)
class Prefetching(Item):
    """How many units ahead gathers are issued, by level; with none, copies from slower tiers are awaited at once."""

    levels: tuple[CollectiveLevel, ...]
    units: tuple[int, ...]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        chosen.prefetch = self.units[move.level]


@dataclass(frozen=True)
class Awaiting(Item):
    """Whether reductions are awaited a unit later, or where they are issued."""

    levels: tuple[CollectiveLevel, CollectiveLevel]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        chosen.hide_reductions = False


@dataclass(frozen=True)
class States(Item):
    """Where a bucket's optimizer states live."""

    bucket: Bucket
    levels: tuple[StateLevel, StateLevel]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        chosen.states.append(self.levels[1].decision(self.bucket, move.freed_bytes))
        chosen.state_levels[self.bucket] = self.levels[1]


@dataclass(frozen=True)
class Parameters(Item):
    """Where a bucket's parameters live between uses."""

    bucket: Bucket
    levels: tuple[ParameterLevel, ParameterLevel]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        chosen.parameters.append(self.levels[1].decision(self.bucket, move.freed_bytes))


@dataclass(frozen=True)
class Accumulated(Item):
    """What of a bucket's gradients waits between micro-batches, and where."""

    bucket: Bucket
    levels: tuple[GradientLevel, ...]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        waiting = self.levels[move.level]
        if waiting.each:
            chosen.each[self.bucket.index] = waiting.why_each(move.freed_bytes)
        else:
            chosen.each.pop(self.bucket.index, None)
            chosen.gradients.append(waiting.decision(self.bucket, move.freed_bytes))


@dataclass(frozen=True)
class Spreading(Item):
    """Which values of a layer, of those that all ranks of the model axis have, wait for backward in parts."""

    segment: Segment
    levels: tuple[SpreadLevel, ...]

    def choose(self, move: Move, question: Question, chosen: Choice) -> None:
        why = (
            f"the last move for {self.segment.name} frees {format_bytes(move.freed_bytes)} on each of "
            f"{question.layout.mesh.model} ranks for {format_seconds(move.extra_seconds)} to gather them"
        )
        chosen.spreads |= dict.fromkeys(self.levels[move.level].values, why)


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
        capacity(question, states, parameters).tiers if leaning != "recompute" else {},
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
    left = dict(capacity(question, states).tiers)
    everything = sum(bucket.shard_bytes for bucket in question.layout.buckets) + activation_bytes
    if "nvme" in left and "host" in left and everything > left["host"]:
        left["host"] -= left_to_activations(activation_bytes, left["host"])
    menus = parameter_menus(
        used,
        question.layout,
        question.state_bytes,
        question.facts.seconds_of_one,
        question.machine,
        left,
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
    spans = runs(question.facts.divided, question.facts.run_seconds)
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
