"""The protocol of a pass, and the report that the pipeline makes of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from zerofx.ir.edit import Rewrite
from zerofx.ir.graph import StepGraph
from zerofx.ir.text import target_name
from zerofx.scheduler.plan.plan import Plan

# ``run(step)`` edits a captured graph before there is a plan; its decisions are its fields.
Preparation: TypeAlias = Rewrite[[StepGraph]]
# ``run(step, plan)`` edits the graph as the plan says. Verifying, timing and reporting are the pipeline's.
Pass: TypeAlias = Rewrite[[StepGraph, Plan]]


@dataclass(frozen=True)
class PassReport:
    """Effects of a pass: nodes added and removed by operator, and the peak before and after it in bytes."""

    name: str
    added: dict[str, int]
    removed: dict[str, int]
    peak_bytes_before: int
    peak_bytes_after: int
    seconds: float


def op_counts(step: StepGraph) -> Counter[str]:
    """The number of calls of each operator."""
    return Counter(target_name(node) for node in step.calls())
