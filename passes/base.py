"""What a pass is, and what the pipeline reports of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from zerofx.ir.graph import StepGraph
from zerofx.ir.text import target_name
from zerofx.scheduler.plan.plan import Plan


class Pass(Protocol):
    """A frozen dataclass whose fields are its options. ``run`` edits the graph in place, as the plan says.

    A pass gets a valid graph and leaves a valid one. Verifying, timing and reporting are the pipeline's.
    """

    @property
    def name(self) -> str: ...

    def run(self, step: StepGraph, plan: Plan) -> None: ...


@dataclass(frozen=True)
class PassReport:
    """What a pass did: nodes added and removed by operator, and the peak before and after it in bytes."""

    name: str
    added: dict[str, int]
    removed: dict[str, int]
    peak_bytes_before: int
    peak_bytes_after: int
    seconds: float


def op_counts(step: StepGraph) -> Counter[str]:
    """How many times each operator is called."""
    return Counter(target_name(node) for node in step.calls())
