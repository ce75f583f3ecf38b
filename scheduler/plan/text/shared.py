"""Sharding on the model axis, and products in fp8, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from zerofx.scheduler.plan.placements import Partial, Ragged, Sharded, placement_of
from zerofx.units import format_seconds

if TYPE_CHECKING:
    from zerofx.scheduler.plan.decisions import ProductDecision, ShardingDecision
    from zerofx.scheduler.plan.plan import Plan


def sharding_lines(plan: Plan) -> Iterator[str]:
    """The sharded parameters, those of equal layers in one line, and the number of nodes that are sharded."""
    if plan.model == 1:
        return
    shared = [decision for decision in plan.shardings if not decision.has_no_way]
    yield f"shared by {plan.model} ranks of the model axis: {len(shared)} nodes of the captured graph"
    yield from (f"  {line}" for line in _parameters(decision for decision in shared if decision.parameter))
    whole = [decision for decision in plan.shardings if decision.has_no_way]
    if whole:
        yield "whole on every rank, as nothing else can be"
        yield from (f"  {line}" for line in _parameters(decision for decision in whole if decision.parameter))
        calls = Counter(decision.reason or decision.node for decision in whole if not decision.parameter)
        yield from (f"  {reason}{f' in {count} calls' if count > 1 else ''}" for reason, count in calls.items())


def _parameters(decisions: Iterable[ShardingDecision]) -> Iterator[str]:
    """Placements of parameters and their reasons, those of equal layers in one line."""
    alike: dict[tuple[str, str, str], int] = {}
    for decision in decisions:
        key = _of_any_layer(decision.parameter), str(decision.outputs[0]), decision.reason
        alike[key] = alike.get(key, 0) + 1
    for (name, placement, reason), count in alike.items():
        times, why = f" x {count}" if count > 1 else "", f"; {reason}" if reason else ""
        yield f"{name}{times}: {placement_words(placement)}{why}"


def placement_words(text: str) -> str:
    """A placement as people say it."""
    match placement_of(text):
        case Partial(reduction):
            return "a sum of what the ranks have" if reduction == "sum" else f"the {reduction} of what the ranks have"
        case Ragged(dim):
            return f"rows of its groups along dimension {dim}"
        case Sharded(dim, groups):
            return f"in parts along dimension {dim}{f', in {groups} groups' if groups > 1 else ''}"
    return "whole"


def product_lines(plan: Plan) -> Iterator[str]:
    """The products of linear layers that may be in fp8, those of equal layers in one line."""
    if not plan.fp8:
        return
    low = [decision for decision in plan.products if decision.in_fp8]
    gained = format_seconds(sum(decision.seconds for decision in low))
    less = f", {gained} less for a micro-batch" if any(decision.seconds for decision in low) else ""
    yield f"products in fp8 ({plan.fp8}): {len(low)} of {len(plan.products)} of linear layers{less}"
    alike = Counter((_of_any_layer(decision.weight), product_words(decision)) for decision in plan.products)
    yield from (f"  {name}{f' x {count}' if count > 1 else ''}: {words}" for (name, words), count in alike.items())


def product_words(decision: ProductDecision) -> str:
    """A decision about a product, with its gain and its reason."""
    gained = f", {format_seconds(decision.seconds)} less" if decision.in_fp8 and decision.seconds else ""
    return f"{decision.gives} {'in fp8' if decision.in_fp8 else 'as it is'}{gained}: {decision.reason or 'CUDA has it'}"


def _of_any_layer(parameter: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.)", r"\1*", parameter)
