"""A plan as text: what was decided, for what, and why, with layers that repeat folded into one line."""

from __future__ import annotations

from collections import Counter

import torch
from tabulate import tabulate

from zerofx.report.fold import Block, fold, span
from zerofx.report.reasons import reasons
from zerofx.report.units import format_bytes, format_count, format_seconds
from zerofx.scheduler.plan import BucketSummary, Plan

_HEADERS = ("bucket", "parameters", "dtype", "slice", "whole", "group", "gathers")


def describe_plan(plan: Plan) -> str:
    """The plan for people: ``print(plan)``."""
    budget = "" if plan.memory_budget is None else f", memory budget {format_bytes(plan.memory_budget)}"
    lines = [f"plan {plan.decisions_hash()[:12]}: {heading(plan)}{budget}"]
    if plan.prediction is not None:
        lines.append(
            f"predicted, per rank: peak {format_bytes(plan.peak_bytes['device'])} at {plan.prediction.peak_node}, step "
            f"{format_seconds(plan.step_seconds)} of which {format_seconds(plan.exposed_seconds)} waits for "
            f"communication, {format_bytes(plan.wire_bytes)} sent, {format_count(plan.prediction.flops)} FLOPs"
        )
    lines += ["", bucket_table(plan)]
    for kind, found in reasons(plan).items():
        lines += ["", kind, *(f"  {reason}" for reason in found)]
    return "\n".join(lines)


def heading(plan: Plan) -> str:
    """Stage, ranks, precision and machine in a few words."""
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    return f"stage {plan.stage} on {ranks}, {plan.precision or 'precision of the model'}, times for {plan.machine}"


def bucket_table(plan: Plan) -> str:
    """The buckets in the order of their first use; a row for those in a row that are alike has the bytes of each."""
    gathers = Counter(decision.bucket for decision in plan.gathers)
    shapes = [
        (b.num_parameters, b.shard_numel, b.dtype, b.compute_dtype, b.group, gathers[index])
        for index, b in enumerate(plan.buckets)
    ]
    lines = [_line(plan, block, gathers[block.start]) for block in fold(shapes, [True] * len(shapes))]
    align = ("left", "right", "left", *["right"] * 4)
    return tabulate(lines, _HEADERS, colalign=align, disable_numparse=True, tablefmt="simple")


def _line(plan: Plan, block: Block, gathers: int) -> list[str]:
    first = plan.buckets[block.start]
    members = [plan.buckets[i] for n in range(block.count) for i in block.repetition(n)]
    count = f"  x{block.count}" if block.count > 1 else ""
    return [
        span([bucket.name for bucket in members]) + count,
        format_count(first.num_parameters),
        _dtype(first.compute_dtype) + ("" if first.dtype == first.compute_dtype else f" ({_dtype(first.dtype)} kept)"),
        format_bytes(first.shard_numel * _itemsize(first)),
        format_bytes(first.shard_numel * plan.num_ranks * _itemsize(first)),
        "frozen" if first.group is None else str(first.group),
        str(gathers) if plan.gathers_parameters else "",
    ]


def _dtype(name: str) -> str:
    return name.removeprefix("torch.")


def _itemsize(bucket: BucketSummary) -> int:
    """Bytes of an element as it is gathered."""
    dtype = getattr(torch, _dtype(bucket.compute_dtype))
    assert isinstance(dtype, torch.dtype)
    return dtype.itemsize
