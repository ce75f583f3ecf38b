"""The stages of a step on the axis pipe, next to each other."""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_bytes, format_seconds, text_table

_HEADERS = ("part", "begins with", "parameters", "peak", "idle", "of the step")


def stage_table(plans: Sequence[Plan]) -> str:
    """A row for each stage: what it holds, and how long it waits for others."""
    rows = []
    for number, plan in enumerate(plans):
        idle = 0.0 if plan.prediction is None else plan.prediction.idle_seconds or 0.0
        rows.append(
            (
                f"{number + 1} of {len(plans)}",
                plan.buckets[0].name if plan.buckets else "",
                f"{sum(bucket.num_parameters for bucket in plan.buckets):,}",
                format_bytes(plan.peak_bytes["device"]),
                format_seconds(idle),
                f"{100 * idle / plan.step_seconds:.1f} %" if plan.step_seconds else "",
            )
        )
    return text_table(rows, _HEADERS, left=(0, 1))
