"""The reasons of a plan's decisions on a layer, a bucket or a node: ``plan.why("layers.7.mlp")``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from zerofx.errors import PlanError
from zerofx.scheduler.plan.decisions import (
    Absence,
    GatherDecision,
    PieceDecision,
    ReduceDecision,
    TileDecision,
    bucket_decisions,
)
from zerofx.scheduler.plan.facts import is_within
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.overview import itemsize, tiles_words
from zerofx.scheduler.plan.text.reasons import absences, count_values
from zerofx.scheduler.plan.text.shared import placement_words, product_words
from zerofx.units import format_bytes

_NEAREST = 5  # names that an error suggests


def why(plan: Plan, name: str) -> str:
    """Every decision of ``plan`` that concerns ``name``, a line each; see ``Plan.why``.

    A plan does not list the modules inside a bucket, so any name below a bucket's is taken to be one of them.

    Raises:
        PlanError: the plan knows no such name.
    """
    lines = [*_node_lines(plan, name), *_module_lines(plan, name)]
    if name == "accumulate":
        lines.insert(0, f"{plan.num_micro_batches} micro-batch(es) before each update: {plan.micro_batches_reason}")
    if not lines:
        raise PlanError(
            f"expected the name of a layer, a bucket or a node that the plan decides about, found {name!r}: "
            f"{_nearest(plan, name)}"
        )
    return "\n".join([f"{name}:", *(f"  {line}" for line in lines)])


def _node_lines(plan: Plan, name: str) -> Iterator[str]:
    """Decisions that name a node."""
    for gather in plan.gathers:
        bucket = plan.buckets[gather.bucket].name
        at = [
            *(["its slice is read from nvme before it"] if gather.read == name else []),
            *(["its slice is copied to the device before it"] if gather.reload == name else []),
            *(["issued before it"] if gather.issue == name else []),
            *(["awaited before it, the first use"] if gather.first == name else []),
            *(["released after it, the last use"] if gather.last == name else []),
        ]
        if at:
            yield f"gather of {bucket}: {', '.join(at)}: {gather.reason}"
    for reduce in plan.reduces:
        if reduce.wait_after == name and plan.num_ranks > 1:
            yield f"reduction of {plan.buckets[reduce.bucket].name}: awaited after it: {reduce.reason}"
        if name and reduce.gathered_after == name and plan.num_ranks > 1:
            yield f"reduction of {plan.buckets[reduce.bucket].name}: its sum is there after it: {reduce.reason}"
        if name and reduce.crossed_after == name:
            yield f"reduction of {plan.buckets[reduce.bucket].name}: summed across replicas after it: {reduce.reason}"
    for wire in plan.wires:
        if wire.hop_after == name and plan.num_ranks > 1:
            yield f"reduction of {plan.buckets[wire.bucket].name}: its hop across nodes begins after it: {wire.reason}"
    for kind, away in absences(plan).items():
        for decision, fate in away:
            at = [
                *(["freed on the device after it"] if name in decision.free_after else []),
                *(["its copy back is issued before it"] if name in decision.reload_before else []),
                *(["it is read from nvme before it"] if decision.read == name else []),
            ]
            if decision.value == name:
                yield _value(decision, fate)
            elif at:
                whose = decision.value or plan.buckets[decision.bucket].name
                subject = f"{'offload' if decision.value else kind} of {whose}"
                yield f"{subject}: {', '.join(at)}: {decision.reason}"
    for tiled in plan.tiles:
        if tiled.value == name:
            yield _tile(tiled)
    for shared in plan.shardings:
        if shared.node == name and not shared.parameter:
            how = f"{' '.join(shared.inputs) or '-'} -> {' '.join(map(str, shared.outputs))}"
            yield f"shared by {plan.model} ranks of the model axis as {how}: {shared.reason}"
    for product in plan.products:
        if name in (product.node, product.weight):
            yield f"{product.node} of {product.weight}: {product_words(product)}"
    for piece in plan.pieces:
        if piece.name == name:
            yield from _piece(plan, piece)
    if name in plan.extra_keeps:
        yield "kept for backward, which reads it only because other values are computed again from it"
    if plan.prediction is not None and plan.prediction.peak_node == name:
        live = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in plan.prediction.peak_live.items())
        yield f"the device's peak is here, {format_bytes(plan.peak_bytes['device'])}: {live}"


def _module_lines(plan: Plan, name: str) -> Iterator[str]:
    """Decisions about the buckets that a module is in, or that are in it, and about the values it makes."""
    for index, bucket in enumerate(plan.buckets):
        if not _is_related(bucket.name, name):
            continue
        num_slices = plan.num_slices(bucket)
        whole = bucket.shard_numel * num_slices * itemsize(bucket)
        yield f"bucket {bucket.name}: {bucket.num_parameters} parameters, {format_bytes(whole)} whole" + (
            f", {format_bytes(whole // num_slices)} on each of {num_slices} ranks" if plan.gathers_parameters else ""
        )
        yield from map(_gather, bucket_decisions(plan.gathers, index))
        where = bucket_decisions(plan.parameters, index)
        yield from (f"parameters on {decision.tier} between uses: {decision.reason}" for decision in where)
        if not plan.gathers_parameters and not where:
            yield f"never gathered: stage {plan.stage} on {plan.num_ranks} rank(s) keeps parameters whole on the device"
        if bucket.group is None:
            yield "never reduced: frozen, or without a gradient"
        elif plan.num_ranks == 1:
            yield "never reduced: there is one rank"
        else:
            yield from map(_reduce, bucket_decisions(plan.reduces, index))
        yield from (f"wire: {wire.reason}" for wire in bucket_decisions(plan.wires, index))
        for kind in ("gradients", "optimizer states"):
            away = [(d, place) for d, place in absences(plan)[kind] if d.bucket == index]
            yield from (f"{kind} {place}: {decision.reason}" for decision, place in away)
    for shared in plan.shardings:
        if shared.parameter and is_within(shared.parameter, name):
            words = placement_words(str(shared.outputs[0]))
            because = f": {shared.reason}" if shared.reason else ""
            yield f"{shared.parameter} lies {words} on {plan.model} ranks of the model axis{because}"
    for product in plan.products:
        if product.weight != name and is_within(product.weight, name):
            yield f"{product.node} of {product.weight}: {product_words(product)}"
    for sliced in plan.slices:
        if is_within(sliced.value, name) or name.startswith(f"{sliced.value}["):
            yield f"{sliced.value} is worked with in {sliced.num_tiles} slices: {sliced.reason}"
    yield from (_tile(tiled) for tiled in plan.tiles if is_within(tiled.layer, name))
    for kind, title in (
        ("recomputed", "computed again in backward"),
        ("offloaded", "offloaded between forward and backward"),
        ("kept in parts", "in parts between forward and backward"),
        ("kept in 8 bits", "in 8 bits between forward and backward"),
    ):
        values = [(d, fate) for d, fate in absences(plan)[kind] if is_within(d.layer, name)]
        if values:
            total = format_bytes(sum(decision.num_bytes for decision, _ in values))
            yield f"{title}: {count_values(len(values))}, {total} {'whole' if kind == 'kept in parts' else 'freed'}"
            yield from (f"  {_value(decision, fate)}" for decision, fate in values)
        elif kind == "recomputed" and any(_is_related(bucket.name, name) for bucket in plan.buckets):
            yield "nothing is computed again in backward"


def _gather(gather: GatherDecision) -> str:
    ahead = "" if gather.read is None else f", read from nvme before {gather.read}"
    ahead += "" if gather.reload is None else f", copied to the device before {gather.reload}"
    together = " as one collective with the gather before it" if gather.merged else ""
    return (
        f"gathered from {gather.first} to {gather.last}{ahead}, issued before {gather.issue}{together}: {gather.reason}"
    )


def _reduce(reduce: ReduceDecision) -> str:
    places = [place for place in dict.fromkeys((reduce.wait_after, reduce.update_after)) if place is not None]
    where = f" (after {' and '.join(places)})" if places else ""
    return f"gradients reduced: {reduce.reason}{where}"


def _value(decision: Absence, fate: str) -> str:
    return f"{decision.value}{_label(decision.layer)}, {format_bytes(decision.num_bytes)}, {fate}: {decision.reason}"


def _label(layer: str) -> str:
    return f" of {layer}" if layer else ""


def _piece(plan: Plan, piece: PieceDecision) -> Iterator[str]:
    back = "" if piece.back_first is None else f", and in backward from {piece.back_first} to {piece.back_last}"
    yield f"a piece of what is outside repeated layers, from {piece.first} to {piece.last} in forward{back}"
    if not piece.values:
        yield "all its values stay on the device"
    for away in absences(plan).values():
        yield from (_value(decision, fate) for decision, fate in away if decision.value in piece.values)


def _tile(decision: TileDecision) -> str:
    return (
        f"{decision.value}{_label(decision.layer)} and what follows run in {tiles_words(decision)}: {decision.reason}"
    )


def _is_related(bucket: str, name: str) -> bool:
    """True if a name is a bucket's, or that of a module in it or around it, or of a parameter that it is a slice of.

    A bucket of loose parameters has the names of several modules.
    """
    return name in (bucket, bucket.partition("[")[0]) or any(
        is_within(part, name) or is_within(name, part) for part in bucket.split("+")
    )


def _nearest(plan: Plan, name: str) -> str:
    away = [decision for of_kind in absences(plan).values() for decision, _ in of_kind]
    known: list[str | None] = [
        *(bucket.name for bucket in plan.buckets),
        *(decision.layer for decision in away),
        *(decision.value for decision in away),
        *(tiled.value for tiled in plan.tiles),
        *(piece.name for piece in plan.pieces),
        *(sliced.value for sliced in plan.slices),
        *plan.extra_keeps,
        *(node for g in plan.gathers for node in (g.first, g.last, g.issue, g.reload, g.read)),
        *(node for r in plan.reduces for node in (r.wait_after, r.gathered_after, r.crossed_after)),
        *(wire.hop_after for wire in plan.wires),
        *(node for decision in away for node in (*decision.free_after, *decision.reload_before, decision.read)),
        *(shared.parameter or shared.node for shared in plan.shardings),
        *(name for product in plan.products for name in (product.weight, product.node)),
    ]
    near = difflib.get_close_matches(name, filter(None, dict.fromkeys(known)), _NEAREST, cutoff=0.4)
    if near:
        return f"the nearest are {', '.join(near)}"
    return f"the buckets are {', '.join(bucket.name for bucket in plan.buckets)}"
