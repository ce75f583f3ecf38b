"""What a pass is, and the few helpers that passes share."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from torch import fx

from zerofx import ops
from zerofx.graph import StepGraph, origin, target_name
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


def start_of_unit(step: StepGraph, node: fx.Node) -> fx.Node:
    """The node before which an event for ``node``'s unit is put so that it does not cut the unit's run in two."""
    run = node
    while _continues(step, run.prev, node):
        run = run.prev
    return run


def end_of_unit(step: StepGraph, node: fx.Node) -> fx.Node:
    """The node behind which an event for ``node``'s unit is put so that it does not cut the unit's run in two."""
    run = node
    while _continues(step, run.next, node):
        run = run.next
    return run


def _continues(step: StepGraph, other: fx.Node, node: fx.Node) -> bool:
    """Whether ``other`` runs in the unit and phase of ``node``; views are of no unit, as they run anywhere."""
    if other.op != "call_function" or other.target in ops.EVENTS:
        return False
    if is_view(other) and other.target is not operator.getitem:
        return True
    return step.unit_of(other) == step.unit_of(node) and origin(other).phase is origin(node).phase
