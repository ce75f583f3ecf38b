"""A plan as text: what was decided, for what, and why, with layers that repeat folded into one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from zerofx.precision import dtype_name, dtype_named
from zerofx.scheduler.plan.decisions import Absence, TileDecision, WireDecision
from zerofx.scheduler.plan.facts import BucketSummary
from zerofx.scheduler.plan.mesh import SHARD
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.fold import fold, span
from zerofx.scheduler.plan.text.reasons import OF_VALUES, count_values, group_by_unit, join_reasons, of_values, reasons
from zerofx.scheduler.plan.text.shared import product_lines, sharding_lines
from zerofx.units import format_bytes, format_count, format_seconds, text_table, tiers_text

_ATTENTION = re.compile(r"(?:aten\.|zerofx\.own_)_scaled_dot_product_(cudnn|flash|efficient)_attention\.default")
_HEADERS = ("bucket", "parameters", "dtype", "slice", "whole", "group", "gathers")


def order_words(plan: Plan) -> str:
    """The order of a plan's micro-batches."""
    if plan.pipe > 1:
        later = "" if plan.weights_lag is None else f", weight gradients {turns_later(plan.weights_lag)}"
        return f"{order_in_stages(plan.num_chunks, by_turns=not plan.by_layer)}{later}"
    return "layer by layer" if plan.by_layer else "one micro-batch after the other"


def order_in_stages(num_chunks: int, *, by_turns: bool) -> str:
    """The order of micro-batches in stages of so many chunks; ``by_turns``: backward of one comes before the forward of
    later ones."""
    if num_chunks == 1:
        return "one forward, one backward" if by_turns else "all forward, then all backward"
    return f"{'one forward, one backward' if by_turns else 'chunk by chunk'}, {num_chunks} chunks a stage"


def turns_later(lag: int) -> str:
    """The turn of weight gradients that come so many after the rest of backward."""
    return f"{lag} {'turn' if lag == 1 else 'turns'} later" if lag else "at the end of each turn"


def describe_plan(plan: Plan) -> str:
    """The plan for people: ``print(plan)``."""
    what = "plan" if plan.reduces else "plan of an evaluation"
    lines = [f"{what} {plan.decisions_hash()[:12]}: {heading(plan)}{_budget(plan)}"]
    if plan.prediction is not None:
        lines.append(
            f"predicted, per rank: peak {format_bytes(plan.peak_bytes['device'])} at {plan.prediction.peak_node}"
            f"{tiers_text(plan.slower_peak_bytes)}, {'step' if plan.reduces else 'evaluation'} "
            f"{format_seconds(plan.step_seconds)} of which "
            f"{format_seconds(plan.exposed_seconds)} waits for communication, {format_bytes(plan.wire_bytes)} sent, "
            f"{format_count(plan.prediction.flops)} FLOPs"
        )
        lines += arena_words(plan)
        if plan.node_wire_bytes:
            sent = ", ".join(f"{format_bytes(size)} {where}" for where, size in plan.node_wire_bytes.items())
            lines.append(f"sent by each node: {sent} nodes")
        lines += _from_best(plan)
    lines += _attention_kernels(plan)
    if any(gather.merged for gather in plan.gathers):
        lines.append(f"{len(plan.gathers)} gathers in {len(plan.launches)} collectives")
    if plan.num_micro_batches > 1:
        order = ", layer by layer" if plan.by_layer and plan.pipe == 1 else ""
        if plan.weights_lag is not None:
            order = f", weight gradients {turns_later(plan.weights_lag)}"
        lines.append(f"{plan.num_micro_batches} micro-batches before each update{order}: {plan.micro_batches_reason}")
    lines += [plan.states_reason] if plan.states_reason else []
    lines += _owner_words(plan)
    lines += ["", bucket_table(plan)]
    for kind, of_kind in reasons(plan).items():
        if kind not in OF_VALUES:
            lines += ["", kind, *(f"  {reason}" for reason in of_kind)]
    if plan.model > 1:
        lines += ["", *sharding_lines(plan)]
    if plan.fp8:
        lines += ["", *product_lines(plan)]
    if plan.slices:
        lines += [
            "",
            "slices",
            *(f"  {sliced.value} in {sliced.num_tiles}: {sliced.reason}" for sliced in plan.slices),
        ]
    for tiled in plan.tiles:
        over = " over classes" if tiled.over == "classes" else ""
        lines += ["", f"tiled{over}: {tiled.value} of {tiled.layer or '(model)'} and what follows: {tiled.reason}"]
    lines += _value_lines(plan)
    return "\n".join(lines)


def arena_words(plan: Plan) -> list[str]:
    """Parts of the device's peak where a step has an arena."""
    arena = plan.arena
    if arena is None:
        return []
    throughout = plan.peak_bytes["device"] - arena.num_bytes
    above = arena.pool_bytes / arena.least_bytes - 1 if arena.least_bytes else 0.0
    whose = ", ".join(f"{format_bytes(size)} {name}" for name, size in arena.outside.items())
    return [
        f"of the peak, {format_bytes(throughout)} are held throughout; {format_bytes(arena.pool_bytes)} are the arena, "
        f"{above:.2%} more than is live in it at once; at most {format_bytes(arena.outside_bytes)} are outside of it"
        + (f" ({whose})" if whose else "")
    ]


def tiles_words(decision: TileDecision) -> str:
    """Into how many tiles, and of what where that is not rows."""
    return f"{decision.num_tiles} tiles" + (" of classes" if decision.over == "classes" else "")


def wire_words(decision: WireDecision) -> str:
    """The encoding of a bucket's collectives, in words."""
    if decision.is_exact:
        return "sent exactly"
    parts = [
        *([f"gathered in {decision.gather}"] if decision.gather != "exact" else []),
        *(["gathered again from second shards"] if decision.second_shard else []),
        *([f"reduced in {decision.reduce}"] if decision.reduce != "exact" else []),
    ]
    return ", ".join(parts)


def _budget(plan: Plan) -> str:
    if plan.memory_budget is None:
        return ""
    text = f", memory budget {format_bytes(plan.memory_budget)}"
    if plan.prediction is None:
        return text
    peak = plan.peak_bytes["device"]
    return f"{text} of which the peak takes {format_bytes(peak)} ({peak / plan.memory_budget:.1%})"


def _from_best(plan: Plan) -> list[str]:
    """The bound on the distance to the fastest plan of its kind."""
    least = plan.prediction.least_seconds if plan.prediction is not None else None
    if least is None:
        return []
    above = max(0.0, plan.step_seconds / least - 1)
    return [
        f"no choice of activations to keep and to recompute takes less than {format_seconds(least)} within the budget: "
        f"the plan takes at most {above:.2%} more"
    ]


def _attention_kernels(plan: Plan) -> list[str]:
    """The attention kernels of a GPU: which one it takes, torch chooses by its model, and builds of torch differ."""
    calls = plan.summary.operators if plan.summary is not None else {}
    kernels = {match[1]: number for name, number in calls.items() if (match := _ATTENTION.fullmatch(name))}
    if not kernels:
        return []
    listed = ", ".join(f"{kernel} in {number} call{'s' if number > 1 else ''}" for kernel, number in kernels.items())
    return [f"attention by {listed}, as torch chooses on the GPU that is planned for"]


def _value_lines(plan: Plan) -> Iterator[str]:
    """A paragraph for each fate of values; in it a line for all layers in a row of which the same values have it, for
    the same reason."""
    for fate, decisions in of_values(plan).items():
        freed, then = sum(decision.num_bytes for decision in decisions), ""
        if fate == "kept in parts":
            fate, then = f"kept as one part on each of {plan.model} ranks", ", which gathers them"
            freed = freed * (plan.model - 1) // plan.model
        if decisions:
            yield ""
            size = f"{format_bytes(freed)} freed between forward and backward{then}"
            yield f"{fate}: {count_values(len(decisions))}, {size}"
            yield from _layers(group_by_unit(plan, decisions))
        if fate == "recomputed" and decisions and plan.extra_keeps:
            yield f"  kept for it, though backward does not read it: {count_values(len(plan.extra_keeps))}"


def _layers(units: Mapping[str, Sequence[Absence]]) -> Iterator[str]:
    """A line for all layers in a row with equal decisions and reasons."""
    listed = list(units.items())
    shapes = [
        (unit != "", tuple(decision.num_bytes for decision in decisions), _common_reasons(unit, decisions))
        for unit, decisions in listed
    ]
    for block in fold(shapes):
        members = [listed[i] for n in range(block.count) for i in block.repetition(n)]
        # A repetition of several layers that differ: a line each.
        for rows in [members[i :: block.length] for i in range(block.length)]:
            names, (_, decisions) = [unit for unit, _ in rows], rows[0]
            size = sum(decision.num_bytes for decision in decisions)
            what = f"{count_values(len(decisions))}, {format_bytes(size)} freed"
            if len(rows) > 1:
                what = f"{what} in each, {format_bytes(size * len(rows))} in all"
            why = _common_reasons(names[0], decisions) if len(rows) > 1 else join_reasons(decisions)
            count = f"  x{len(rows)}" if len(rows) > 1 else ""
            yield f"  {span([unit or '(model)' for unit in names])}{count}: {what}; {why}"


def _common_reasons(unit: str, decisions: Sequence[Absence]) -> str:
    """The reasons as they read for any one of several layers."""
    text = join_reasons(decisions)
    return re.sub(rf"(?<![\w.]){re.escape(unit)}(?![\w.]*\w)", "each", text) if unit else text


def _owner_words(plan: Plan) -> list[str]:
    """Numbers of parameters that each rank updates whole, and why so."""
    lines = []
    for axes in dict.fromkeys(bucket.states_over for bucket in plan.buckets if bucket.owners):
        counts = Counter(r for bucket in plan.buckets if bucket.states_over == axes for r in bucket.owners)
        num_ranks = plan.mesh.size(axes)
        least, most = (of(counts[rank] for rank in range(num_ranks)) for of in (min, max))
        each = str(most) if least == most else f"{least} to {most}"
        lines.append(
            f"owners: {counts.total()} parameters are updated whole, {each} by each of {num_ranks} ranks along "
            f"{' and '.join(axes)}: the costliest first, to the one that has least to do"
        )
    return lines


def heading(plan: Plan) -> str:
    """Stage, ranks, micro-batches, precision, dtypes of states and gradients, scaling, clipping and machine."""
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    if plan.mesh.world != SHARD:
        ranks += f" ({plan.mesh})"
    if plan.pipe > 1:
        ranks += f", part {plan.pipe_stage + 1} of {plan.pipe} on the axis pipe"
    parts = f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    scaled = ", loss scaled" if plan.loss_scaled else ""
    clipped = "" if plan.max_grad_norm is None else f", gradients clipped to a norm of {plan.max_grad_norm:g}"
    low = f", products in fp8 ({plan.fp8})" if plan.fp8 else ""
    states = next((f", states stored in {dtype_name(b.state_dtype)}" for b in plan.buckets if b.state_dtype), "")
    reduced = next((f", gradients reduced in {dtype_name(b.reduce_dtype)}" for b in plan.buckets if b.reduce_dtype), "")
    return (
        f"stage {plan.stage} on {ranks}{parts}, {plan.precision or 'precision of the model'}{low}{states}{reduced}"
        f"{scaled}{clipped}, times for {plan.machine}"
    )


def bucket_table(plan: Plan) -> str:
    """The buckets in the order of their first use; a row for those in a row that are alike has the bytes of each."""
    gathers = Counter(decision.bucket for decision in plan.gathers)
    shapes = [
        (b.num_parameters, b.shard_numel, b.dtype, b.compute_dtype, b.group, gathers[index])
        for index, b in enumerate(plan.buckets)
    ]
    lines = [
        _line(plan, [block.repetition(n)[place] for n in range(block.count)], gathers)
        for block in fold(shapes)
        for place in range(block.length)
    ]
    return text_table(lines, _HEADERS, left=(0, 2))


def _line(plan: Plan, alike: Sequence[int], gathers: Counter[int]) -> list[str]:
    first = plan.buckets[alike[0]]
    count = f"  x{len(alike)}" if len(alike) > 1 else ""
    return [
        span([plan.buckets[index].name for index in alike]) + count,
        format_count(first.num_parameters),
        dtype_name(first.compute_dtype)
        + ("" if first.dtype == first.compute_dtype else f" ({dtype_name(first.dtype)} kept)"),
        format_bytes(first.shard_numel * itemsize(first)),
        format_bytes(first.shard_numel * plan.num_slices(first) * itemsize(first)),
        _group(plan, first),
        str(gathers[alike[0]]) if plan.has_residencies else "",
    ]


def _group(plan: Plan, bucket: BucketSummary) -> str:
    """The param group that a bucket is trained with; nothing in an evaluation, which trains none."""
    if bucket.group is not None:
        return str(bucket.group)
    if bucket.lent:
        return "another step's"
    return "frozen" if plan.reduces else ""


def itemsize(bucket: BucketSummary) -> int:
    """Bytes of an element of a bucket as it is gathered."""
    return dtype_named(bucket.compute_dtype).itemsize
