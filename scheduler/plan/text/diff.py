"""The differences between two plans in words: ``plan.diff(other)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from zerofx.scheduler.plan.decisions import Absence, GatherDecision, ReduceDecision
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.fold import fold, span
from zerofx.scheduler.plan.text.overview import order_words, tiles_words, wire_words
from zerofx.scheduler.plan.text.reasons import absences, count_values, group_by_unit, of_values
from zerofx.units import first_few, format_bytes, format_count, format_seconds

SAME = "the plans are the same"


@dataclass(frozen=True)
class _Change:
    """A change of one bucket or layer; in folded lines each is one of several."""

    name: str
    text: str


def diff_plans(first: Plan, other: Plan) -> str:
    """Changes from ``first`` to ``other``, a line each, as ``before -> after``; layers in a row that changed alike are
    one line. Plans with equal decisions and predictions are the same.
    """
    placed = partial(_place_changes, first, other)
    sections = {
        "made for": list(_settings(first, other)),
        "buckets": list(_buckets(first, other)),
        "gathers": _fold_changes(_gathers(first, other)),
        "reductions": _fold_changes(_reductions(first, other)),
        "wire": _fold_changes(placed(lambda plan: [(d.bucket, wire_words(d)) for d in plan.wires], "sent exactly")),
        "tiled": list(_tiles(first, other)),
        **{title: list(_changes_by_name(read(first), read(other))) for title, read in _BY_NAME.items()},
        **{
            kind: _fold_changes(placed(partial(_places_of, kind)))
            for kind in ("parameters", "optimizer states", "gradients")
        },
        **{
            fate: [
                *_fold_changes(
                    _values(first, *(group_by_unit(plan, of_values(plan)[fate]) for plan in (first, other)))
                ),
                *(_extra_keeps(first, other) if fate == "recomputed" else ()),
            ]
            for fate in of_values(first)
        },
        "predicted, per rank": list(_predictions(first, other)),
    }
    lines = [line for title, lines in sections.items() if lines for line in (title, *(f"  {text}" for text in lines))]
    if not lines and first != other:
        lines = ["the reasons that are given for decisions"]  # all that is left: the same is done, and predicted
    return "\n".join(lines) if lines else SAME


_BY_NAME: Mapping[str, Callable[[Plan], Mapping[str, object]]] = MappingProxyType(
    {
        "shared along model": lambda plan: {d.node: replace(d, reason="") for d in plan.shardings},
        "moved to overlap with collectives": lambda plan: {nodes[-1]: nodes for nodes in plan.overlaps if nodes},
        "products of linear layers": lambda plan: {d.node: d.in_fp8 for d in plan.products},
        "pieces outside layers": lambda plan: {d.name: d for d in plan.pieces},
    }
)


def _changes_by_name(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """The nodes or pieces about which another thing is decided, or that one plan alone decides about."""
    for title, names in {
        "gone": [name for name in before if name not in after],
        "added": [name for name in after if name not in before],
        "changed": [name for name in before if name in after and before[name] != after[name]],
    }.items():
        if names:
            yield f"{title}: {first_few(names)}"


def _settings(first: Plan, other: Plan) -> Iterator[str]:
    fields: dict[str, Callable[[Plan], str]] = {
        "stage": lambda plan: str(plan.stage),
        "ranks": lambda plan: str(plan.num_ranks),
        "mesh": lambda plan: plan.mesh.axes_text,
        "micro-batches": lambda plan: str(plan.num_micro_batches),
        "order": order_words,
        "precision": lambda plan: plan.precision or "of the model",
        "products in fp8": lambda plan: plan.fp8 or "none",
        "wire": lambda plan: plan.wire,
        "saved": lambda plan: plan.saved or "None",
        "max_grad_norm": lambda plan: str(plan.max_grad_norm),
        "grad_norms": lambda plan: str(plan.grad_norms),
        "kept gradients": lambda plan: ", ".join(plan.kept_gradients) or "none",
        "loss": lambda plan: "scaled" if plan.loss_scaled else "as it is",
        "ranks of a node": lambda plan: "any" if plan.ranks_per_node is None else str(plan.ranks_per_node),
        "machine": lambda plan: plan.machine,
        "memory budget": lambda plan: "none" if plan.memory_budget is None else format_bytes(plan.memory_budget),
        "graph": lambda plan: plan.graph[:12],
    }
    for name, read in fields.items():
        if read(first) != read(other):
            yield f"{name}: {read(first)} -> {read(other)}"
    if first.memory_budget != other.memory_budget and fields["memory budget"](first) == fields["memory budget"](other):
        yield f"memory budget: {first.memory_budget} -> {other.memory_budget} bytes"


def _buckets(first: Plan, other: Plan) -> Iterator[str]:
    """Slices change with the number of ranks alone: that is no change of a bucket."""

    def facts(plan: Plan) -> list[tuple[Any, ...]]:
        return [
            (b.name, b.group, b.num_parameters, b.dtype, b.compute_dtype, b.reduce_dtype, b.state_dtype)
            for b in plan.buckets
        ]

    before, after = facts(first), facts(other)
    names, others = [bucket[0] for bucket in before], [bucket[0] for bucket in after]
    if names == others:
        changed = [b[0] for a, b in zip(before, after, strict=True) if a != b]
        moved = [a.name for a, b in zip(first.buckets, other.buckets, strict=True) if a.owners != b.owners]
        if moved and first.mesh == other.mesh:
            yield f"{span(moved)}: whole parameters at other owners ({len(moved)} of {len(after)} buckets)"
        if changed:
            yield f"{span(changed)}: another dtype, param group or size ({len(changed)} of {len(after)} buckets)"
        return
    for what, changes in (
        ("gone", [n for n in names if n not in others]),
        ("new", [n for n in others if n not in names]),
    ):
        if changes:
            yield f"{what}: {', '.join(changes)}"
    if sorted(names) == sorted(others):
        yield "in another order"


def _gathers(first: Plan, other: Plan) -> list[_Change]:
    before, after = _gathers_of(first), _gathers_of(other)
    changes = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, []), after.get(name, [])
        if [_positions(timed) for timed in old] == [_positions(timed) for timed in new]:
            continue
        if len(old) != len(new):
            text = f"{_times(len(old))} -> {_times(len(new))}"
            if {len(old), len(new)} == {1, 2}:
                text += f" ({_keep_words(len(old))} -> {_keep_words(len(new))})"
        elif _merge_words(old) != _merge_words(new):
            text = f"{_merge_words(old)} -> {_merge_words(new)}"
        elif _distances(old) != _distances(new):
            text = f"issued {_distances(old)} -> {_distances(new)} gathers ahead"
        else:
            text = f"{_times(len(new))} as before, at other nodes"
        changes.append(_Change(name, text))
    return changes


def _gathers_of(plan: Plan) -> dict[str, list[tuple[GatherDecision, int]]]:
    """The gathers of each bucket, and how many gathers ahead of its own place each is issued."""
    gathers: dict[str, list[tuple[GatherDecision, int]]] = {}
    place: dict[str, int] = {}  # of the latest gather that is awaited before a node
    for number, gather in enumerate(plan.gathers):
        place[gather.first] = number
        ahead = number - place.get(gather.issue, number)
        gathers.setdefault(plan.buckets[gather.bucket].name, []).append((gather, ahead))
    return gathers


def _positions(timed: tuple[GatherDecision, int]) -> tuple[str | bool | None, ...]:
    gather, _ = timed
    return (gather.first, gather.last, gather.issue, gather.reload, gather.read, gather.merged)


def _merge_words(gathers: list[tuple[GatherDecision, int]]) -> str:
    """The start of each gather of a bucket, in words."""
    ways = ["as one collective with the gather before it" if gather.merged else "alone" for gather, _ in gathers]
    return f"gathered {' and '.join(dict.fromkeys(ways))}"


def _times(number: int) -> str:
    return {0: "not gathered", 1: "gathered once", 2: "gathered twice"}.get(number, f"gathered {number} times")


def _keep_words(number: int) -> str:
    """The residency of a bucket that is gathered once or twice, in words."""
    return "kept from forward to backward" if number == 1 else "released between"


def _distances(gathers: list[tuple[GatherDecision, int]]) -> str:
    return " and ".join(str(ahead) for ahead in dict.fromkeys(ahead for _, ahead in gathers))


def _wait_words(reduce: ReduceDecision) -> str:
    where = reduce.wait_after or "the end of the step"
    if reduce.crossed_after != "":
        where += f", across replicas after {reduce.crossed_after or 'the end of the step'}"
    if reduce.gathered_after == "":
        return where
    return f"{where}, the sum after {reduce.gathered_after or 'the end of the step'}"


def _reductions(first: Plan, other: Plan) -> list[_Change]:
    def waits(plan: Plan) -> dict[str, str]:
        # On one rank nothing is reduced, whatever the plan says of when.
        decided = plan.reduces if plan.num_ranks > 1 else ()
        return {plan.buckets[d.bucket].name: _wait_words(d) for d in decided}

    before, after = waits(first), waits(other)
    changes = []
    for name in dict.fromkeys([*before, *after]):
        if name not in before or name not in after:
            words = ["not reduced" if name not in side else "reduced" for side in (before, after)]
            changes.append(_Change(name, " -> ".join(words)))
        elif before[name] != after[name]:
            changes.append(_Change(name, f"awaited after {before[name]} -> {after[name]}"))
    return changes


def _tiles(first: Plan, other: Plan) -> Iterator[str]:
    def cuts(plan: Plan) -> dict[str, str]:
        slices = {sliced.value: f"{sliced.num_tiles} slices" for sliced in plan.slices}
        return slices | {tiled.value: tiles_words(tiled) for tiled in plan.tiles}

    return (f"{change.name}: {change.text}" for change in _changes(cuts(first), cuts(other), "whole"))


def _places_of(kind: str, plan: Plan) -> list[tuple[int, str]]:
    return [(decision.bucket, place) for decision, place in absences(plan)[kind]]


def _place_changes(
    first: Plan, other: Plan, known: Callable[[Plan], list[tuple[int, str]]], otherwise: str = "on the device"
) -> list[_Change]:
    """Changes of tier; ``otherwise`` is the text of buckets that ``known`` leaves out."""
    before, after = ({plan.buckets[index].name: text for index, text in known(plan)} for plan in (first, other))
    return _changes(before, after, otherwise)


def _changes(before: Mapping[str, str], after: Mapping[str, str], otherwise: str) -> list[_Change]:
    sides = {name: (before.get(name, otherwise), after.get(name, otherwise)) for name in {**before, **after}}
    return [_Change(name, f"{old} -> {new}") for name, (old, new) in sides.items() if old != new]


def _values(first: Plan, before: Mapping[str, list[Absence]], after: Mapping[str, list[Absence]]) -> list[_Change]:
    """Changes of the values of each repeated layer."""
    order = [bucket.name for bucket in first.buckets]
    units = sorted({*before, *after}, key=lambda unit: order.index(unit) if unit in order else len(order))
    changes = []
    for unit in units:
        old, new = before.get(unit, []), after.get(unit, [])
        sides = []
        for decisions in (old, new):
            size = format_bytes(sum(decision.num_bytes for decision in decisions))
            sides.append(f"{count_values(len(decisions))}, {size} freed" if decisions else "nothing")
        if sides[0] != sides[1]:
            changes.append(_Change(unit or "(model)", f"{sides[0]} -> {sides[1]}"))
        elif {decision.value for decision in old} != {decision.value for decision in new}:
            changes.append(_Change(unit or "(model)", f"{sides[0]}, but other values"))
        elif [(d.free_after, d.reload_before) for d in old] != [(d.free_after, d.reload_before) for d in new]:
            changes.append(_Change(unit or "(model)", "the same values, copied at other nodes"))
    return changes


def _extra_keeps(first: Plan, other: Plan) -> Iterator[str]:
    if first.extra_keeps != other.extra_keeps:
        before, after = count_values(len(first.extra_keeps)), count_values(len(other.extra_keeps))
        yield f"kept for it, though backward does not read it: {before} -> {after}" + (
            ", others" if before == after else ""
        )


def _predictions(first: Plan, other: Plan) -> Iterator[str]:
    before, after = first.prediction, other.prediction
    if before is None or after is None:
        if before is not after:
            yield f"{'not simulated' if before is None else 'simulated'} -> " + (
                "not simulated" if after is None else "simulated"
            )
        return
    for name, (words, text) in _NUMBERS.items():
        old, new = getattr(before, name), getattr(after, name)
        if name == "peak_node" and old != new:
            yield words.format(f"{old} -> {new}")
        elif isinstance(old, Mapping) and (name != "node_wire_bytes" or (old and new)):
            for key in dict.fromkeys([*old, *new]):
                yield from _change(words.format(key), old.get(key, 0), new.get(key, 0), text)
        elif isinstance(old, int | float):
            yield from _change(words, old, new, text)


# Fields of predictions in words; those by key have its place.
_NUMBERS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "peak_bytes": ("peak on the {}", format_bytes),
    "peak_live": ("  {} at the peak", format_bytes),
    "peak_node": ("peak at: {}", str),
    "model_state_bytes": ("parameters, gradients, optimizer states", format_bytes),
    "step_seconds": ("time of a step", format_seconds),
    "exposed_seconds": ("waits for communication", format_seconds),
    "wire_bytes": ("sent in a step", format_bytes),
    "node_wire_bytes": ("sent by a node {} nodes", format_bytes),
    "link_bytes": ("moved by {}", format_bytes),
    "flops": ("FLOPs of a step", format_count),
}


def _change(what: str, before: float, after: float, text: Callable[[float], str]) -> Iterator[str]:
    if before != after:
        share = f" ({(after - before) / before:+.1%})" if before else ""
        yield f"{what}: {text(before)} -> {text(after)}{share}"


def _fold_changes(changes: list[_Change]) -> list[str]:
    """Successive names to which the same happened, as one line. Nodes in the text differ from layer to layer."""
    shapes = [change.text for change in changes]
    lines = []
    for block in fold(shapes):
        for i in block.repetition(0):
            names = [changes[i + n * block.length].name for n in range(block.count)]
            count = f"  x{block.count}" if block.count > 1 else ""
            lines.append(f"{span(names)}{count}: {changes[i].text}")
    return lines
