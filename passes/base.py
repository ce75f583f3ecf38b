"""What a pass is, and the few helpers that passes share."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from zerofx.graph import StepGraph, target_name
from zerofx.scheduler.plan import Plan
from zerofx.scheduler.storage import is_view


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


def consumers(root: fx.Node) -> list[fx.Node]:
    """All nodes that read ``root``'s storage, itself or through views; the views themselves are not listed."""
    found: dict[fx.Node, None] = {}
    pending = list(root.users)
    while pending:
        user = pending.pop(0)
        if is_view(user):
            pending.extend(user.users)
        else:
            found[user] = None
    return list(found)


def after(node: fx.Node) -> fx.Node:
    """The node behind which a successor of ``node`` may be put: past the getitems that name its outputs."""
    while node.next.target is operator.getitem:
        node = node.next
    return node

