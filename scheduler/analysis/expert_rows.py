"""Experts whose rows ranks of the model axis can send each other: the calls of each kind, and the ways that do so.

Experts are of one kind where layers are alike: their rows end at one value of a class of layers. Of all ways in which
the calls of a kind can be shared, a layout has those by which rows are sent, or has none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from torch import fx

from zerofx.ir.facts import Phase, Role, origin, placeholder, tensor
from zerofx.ir.sharding.grouped import ends_of
from zerofx.ir.sharding.rule import Rule, read_tensors, results_of
from zerofx.scheduler.analysis.sharding_ways import ShardingWays
from zerofx.scheduler.plan.placements import Ragged


@dataclass(frozen=True)
class Experts:
    """Experts of alike layers, whose rows end at ``kind``; ``weights`` are their matrices, of all layers."""

    kind: str
    weights: tuple[fx.Node, ...]


def experts_of(ways: ShardingWays) -> list[Experts]:
    """The experts of a step, those of alike layers together."""
    weights: dict[str, dict[fx.Node, None]] = {}
    for first, members in ways.classes.members.items():
        ends = ends_of(first)
        if ends is None or origin(first).phase is not Phase.FORWARD:
            continue
        of_kind = weights.setdefault(ways.slot(ends)[0].name, {})
        of_kind.update((weight, None) for member in members for weight in weights_of(member))
    return [Experts(kind, tuple(nodes)) for kind, nodes in weights.items() if nodes]


def kinds_that_send(ways: ShardingWays, calls: Collection[fx.Node] | None = None) -> dict[str, None]:
    """The kinds of experts whose rows ranks can send each other, of ``calls``, if given."""
    sending = (
        rule for first, rules in ways.rules.items() if calls is None or first in calls for rule in rules
        if rule.extra.exchanged_bytes
    )  # fmt: skip
    return dict.fromkeys(kind for rule in sending for kind in _bounded(ways, rule))


def send_rows(ways: ShardingWays, kinds: Collection[str]) -> ShardingWays:
    """The ways in which rows of ``kinds`` are sent, and those of no others."""
    rules = dict[fx.Node, list[Rule]]()
    for first, possible in ways.rules.items():
        left = [rule for rule in possible if all(kind in kinds for kind in _bounded(ways, rule))]
        results = results_of(first)
        has_rows = bool(results) and results[0] is not None and results[0].ndim > 1
        rules[first] = (has_rows and [rule for rule in left if rule.is_bounded]) or left
    return replace(ways, rules=rules)


def _bounded(ways: ShardingWays, rule: Rule) -> Iterator[str]:
    """The kinds of experts of which a rule is about as many rows as a rank has room for."""
    for lies in (*rule.outputs, *rule.inputs):
        if isinstance(lies, Ragged) and lies.capacity:
            yield ways.classes.first[ways.nodes_by_name[lies.ends]].name


def weights_of(product: fx.Node) -> Iterator[fx.Node]:
    """The parameters, a matrix for each expert, that a grouped product's operand is made of: one, with what adapters
    add."""
    pending, seen = [read_tensors(product)[1]], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and placeholder(node).role is Role.PARAMETER and tensor(node).ndim > 2:
            yield node
        seen.add(node)
        pending += [source for source in node.all_input_nodes if source not in seen]
