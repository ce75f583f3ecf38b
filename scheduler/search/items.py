"""Menus of all that can be decided about a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from zerofx.ir.buckets import Bucket
from zerofx.ir.facts import twin_of
from zerofx.ir.micro_batches import loop_numbers, loops_of
from zerofx.scheduler.analysis.saved_values import storage_size
from zerofx.scheduler.cost.timeline import runs
from zerofx.scheduler.cost.wire_volume import seconds_along
from zerofx.scheduler.decide.activations import Segment, free_levels, menu
from zerofx.scheduler.decide.gathers import keep_menus, prefetch_menu, reduction_menu
from zerofx.scheduler.decide.gradients import gradient_menus
from zerofx.scheduler.decide.ledger import Ledger, Level
from zerofx.scheduler.decide.offload import entries, joint_menu, seconds_away, spread_menu
from zerofx.scheduler.decide.parameters import copies_menu, parameter_menus
from zerofx.scheduler.decide.residency import residencies
from zerofx.scheduler.decide.states import host_bytes_for_activations, state_menus
from zerofx.scheduler.plan.mesh import MODEL
from zerofx.scheduler.search.choice import Item, Kind
from zerofx.scheduler.search.order import Move
from zerofx.scheduler.search.question import Leaning, Question


def items_of(question: Question, leaning: Leaning) -> list[Item]:
    """All that can be decided, in a fixed order."""
    items = [*_activations(question, leaning), *_spread_items(question)]
    layout, asked, machine, seconds = question.layout, question.asked, question.machine, question.facts.seconds_of_one
    if any(bucket.is_gathered(question.stage) for bucket in layout.buckets):
        gathered = residencies(question.facts.piece_graph, layout, asked)
        items += _bucket_items("kept", keep_menus(gathered, asked, seconds, machine))
        items.append(Item("prefetch", prefetch_menu(gathered, layout, asked.prefetch, seconds, machine)))
    if layout.num_stage_ranks > 1:
        items.append(Item("awaited", reduction_menu(layout, seconds, machine)))
    ledger = Ledger.of(machine, question.tiers if leaning != "recompute" else ())
    if ledger.tiers:
        items += _tier_items(question, items, ledger)
    menus = gradient_menus(
        layout, question.stage, question.step.num_backwards, question.reduce, seconds, machine, ledger
    )
    return items + _bucket_items("gradients", menus)


def free_items(question: Question) -> list[Item]:
    """The layers in which less is kept if backward computes again what costs it nothing."""
    first = {part.key: part for part in reversed(question.facts.segments) if part.unit}
    menus = {key: levels for key, part in first.items() if len(levels := free_levels(part)) > 1}
    return _activation_items(question, [p for p in question.facts.segments if p.key in menus], lambda p: menus[p.key])


def num_free(items: Sequence[Item], moves: Sequence[Move]) -> int:
    """Number of leading ``moves`` that cost nothing, and are made in any case."""

    def is_free(move: Move) -> bool:
        item = items[move.item]
        return item.kind == "activations" and not item.levels[move.level].seconds

    return sum(1 for _ in itertools.takewhile(is_free, moves))


def _bucket_items(kind: Kind, menus: Mapping[Bucket, Sequence[Level]]) -> list[Item]:
    return [Item(kind, levels, bucket) for bucket, levels in menus.items()]


def _tier_items(question: Question, others: Sequence[Item], ledger: Ledger) -> list[Item]:
    """States and parameters in slower tiers, with what they take entered in ``ledger``, and whether copies are issued
    ahead where no gathers are."""
    layout, machine, seconds = question.layout, question.machine, question.facts.seconds_of_one
    items: list[Item] = []
    if question.delayed or question.fixed is not None:
        ledger.take_levels(list(question.delayed.values()))
    else:
        # What activations take elsewhere where the least of them stays on the device.
        last = [(item.segment, item.levels[-1]) for item in others if item.kind == "activations"]
        activation_bytes = sum(storage_size(segment.values[i]) for segment, level in last for i in level.offloaded)
        menus = state_menus(
            layout, question.state_bytes, question.stage, seconds, machine, ledger, activation_bytes,
            clipped=question.undecided.updates_wait, on_device=question.on_device, at_end=question.at_end,
        )  # fmt: skip
        items += _bucket_items("states", menus)
        if question.stage == 3:
            used, reserve = residencies(question.facts.piece_graph, layout, question.asked), 0
            everything = sum(bucket.shard_bytes for bucket in layout.buckets) + activation_bytes
            if {"host", "nvme"} <= {*ledger.tiers} and everything > ledger.left["host"]:
                reserve = host_bytes_for_activations(activation_bytes, ledger.left["host"])
            states = {bucket: off for bucket, (_, off) in menus.items()}
            parameters = parameter_menus(
                used, layout, question.state_bytes, seconds, machine, ledger, states, activation_bytes, reserve
            )
            items += _bucket_items("parameters", parameters)
    if question.asked.prefetch and all(item.kind != "prefetch" for item in others):
        items.append(Item("prefetch", copies_menu(layout, question.state_bytes, ledger.tiers[0], machine)))
    return items


def _activation_items(
    question: Question, parts: Sequence[Segment], menu_of: Callable[[Segment], Sequence[Level]]
) -> list[Item]:
    """Items about each of ``parts``: one for all micro-batches of a layer where turns hand its values on, and none
    where these differ."""
    if not question.step.is_ahead:
        return [Item("activations", menu_of(part), part) for part in parts]
    runs: dict[tuple[str, str], list[Segment]] = {}
    for part in parts:
        runs.setdefault((part.unit, _first_name(part)), []).append(part)
    return [
        Item("activations", menu_of(run[0]), run[0], run[1:])
        for run in runs.values()
        if len(run) == question.step.num_bodies and len({part.key for part in run}) == 1
    ]


def _first_name(part: Segment) -> str:
    """The name that the first operator of a run has in the first micro-batch."""
    twin = twin_of(part.operators[0])
    return "" if twin is None else str(twin[0])


def _activations(question: Question, leaning: Leaning) -> list[Item]:
    if not question.recompute and (question.step.is_ahead or not question.tiers):
        return []
    parts = question.facts.segments
    num_layers = len(parts) // question.step.num_bodies
    # The peak is that of the worst micro-batch: a layer makes the same move in each before another layer does.
    parts = [part for layer in range(num_layers) for part in parts[layer::num_layers]]
    machine, first = question.machine, {part.key: part for part in reversed(parts)}
    if leaning == "recompute" or question.step.is_ahead:
        menus = {key: menu(part, machine, inlines=question.inlines) for key, part in first.items()}
        return _activation_items(question, parts, lambda part: menus[part.key])
    tier, recompute = question.tiers[0], leaning == "joint"
    # Of layers that are alike one at a time has its values back, and so it is with pieces, which need not be alike.
    alike = Counter(_kind(part) for part in parts)
    # What a round of a layer's loop copies it awaits.
    loops = loops_of(question.facts.piece_graph) if question.step.by_layer else ()
    in_loop = loop_numbers(loops)
    first_of = {(part.key, part.operators[0] in in_loop): part for part in reversed(parts)}
    entries_of = {
        key: entries(part, machine, tier, alike[_kind(part)], recompute=recompute, hides=not key[1])
        for key, part in first_of.items()
    }
    spans = runs(question.facts.piece_graph, question.facts.run_seconds)
    return [
        Item(
            "activations",
            joint_menu(entries_of[part.key, part.operators[0] in in_loop], seconds_away(part, spans)),
            part,
        )
        for part in parts
    ]


def _spread_items(question: Question) -> list[Item]:
    mesh, machine = question.layout.mesh, question.machine

    def seconds(num_bytes: int) -> float:
        cut = 2 * num_bytes / mesh.model / machine.memory_bandwidth
        return cut + seconds_along("all_gather", num_bytes, mesh, MODEL, machine)

    if mesh.model == 1:
        return []
    menus = [(part, spread_menu(part, mesh.model, seconds)) for part in question.facts.segments]
    return [Item("spread", levels, part) for part, levels in menus if len(levels) > 1]


def _kind(part: Segment) -> str:
    return "piece" if part.piece else part.key
