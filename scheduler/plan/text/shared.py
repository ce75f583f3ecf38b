"""How the ranks of the model axis share a step, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofx.scheduler.plan.placements import Sharded, placement_of

if TYPE_CHECKING:
    from zerofx.scheduler.plan.plan import Plan


def shared_lines(plan: Plan) -> Iterator[str]:
    """Which parameters lie in parts, those of equal layers in one line, and how many nodes are not done whole."""
    if plan.model == 1:
        return
    yield f"shared by {plan.model} ranks of the model axis: {len(plan.shardings)} nodes of the captured graph"
    alike: dict[tuple[str, str], int] = {}
    for decision in plan.shardings:
        if decision.parameter:
            key = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", decision.parameter), str(decision.outputs[0])
            alike[key] = alike.get(key, 0) + 1
    for (name, placement), count in alike.items():
        times = f" x {count}" if count > 1 else ""
        yield f"  {name}{times}: {placement_words(placement)}"


def placement_words(text: str) -> str:
    """A placement as people say it."""
    placement = placement_of(text)
    if not isinstance(placement, Sharded):
        return "whole"
    groups = f", in {placement.groups} groups" if placement.groups > 1 else ""
    return f"in parts along dimension {placement.dim}{groups}"
