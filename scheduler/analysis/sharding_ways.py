"""In which ways each call of a step may be shared by the ranks of an axis, and its values lie on them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerofx.ir.facts import Role, placeholder, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.operator import Traffic
from zerofx.ir.operators.table import facts_of
from zerofx.ir.sharding.rule import Rule, read_tensors, results_of
from zerofx.ir.sharding.rules import Ways, rules_of
from zerofx.scheduler.analysis.layer_classes import NodeClasses, node_classes
from zerofx.scheduler.plan.placements import REPLICATED, Placement, Ragged, Sharded
from zerofx.torch_private.operators import OpOverload

Result = tuple[fx.Node, int]
"""A value: the node that gives it, and which of its results it is."""


def slot_of(node: fx.Node) -> Result:
    """The value that a node stands for: one of several results for the node that names it."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


@dataclass
class ShardingWays:
    """The rules of a step's calls for ``num_ranks``: for the first node of each class.

    ``placeholders`` has the placements that a placeholder may have.
    """

    step: StepGraph
    classes: NodeClasses
    num_ranks: int
    rules: dict[fx.Node, list[Rule]] = field(default_factory=dict)
    placeholders: dict[fx.Node, list[Placement]] = field(default_factory=dict)

    @functools.cached_property
    def nodes_by_name(self) -> Mapping[str, fx.Node]:
        """The step's nodes by name."""
        return self.step.nodes_by_name()

    def slot(self, node: fx.Node) -> Result:
        """The value of ``node``, of the first node of its class."""
        source, index = slot_of(node)
        return self.classes.first[source], index

    def can_lie(self, node: fx.Node, placement: Placement) -> bool:
        """True if a value can have the placement at its position: ragged rows that a layer makes stay in it."""
        if not isinstance(placement, Ragged):
            return True
        ends = self.nodes_by_name[placement.ends]
        is_alone = len(self.classes.members[self.classes.first[ends]]) == 1
        return node.op == "call_function" and (is_alone or self.step.unit_of(node) == self.step.unit_of(ends))

    def member_placement(self, member: fx.Node, placement: Placement) -> Placement:
        """The placement of a node whose class has ``placement``: ragged rows end where those of its own layer do."""
        if not isinstance(placement, Ragged):
            return placement
        alike = self.classes.members[self.classes.first[self.nodes_by_name[placement.ends]]]
        unit = self.step.unit_of(member)
        own = next((node for node in alike if self.step.unit_of(node) == unit), alike[0])
        return replace(placement, ends=own.name)


def sharding_ways(
    step: StepGraph, num_ranks: int, marks: Mapping[fx.Node, str] = MappingProxyType({}), capacity: float = 0.0
) -> ShardingWays:
    """All ways for a captured graph; ``marks`` tell layers apart that are alike.

    ``capacity``: of rows that ranks send each other each has room for that many equal shares; 0: none are sent.

    What products, convolutions, attention and lookups can share is what there is to share; all other calls follow
    them, through reshapes and cuts that make groups of a dimension too, until nothing is added.
    """
    classes = node_classes(step, marks)
    ways = ShardingWays(step, classes, num_ranks)
    firsts = [node for node in classes.members if node.target is not operator.getitem and node.op != "output"]
    candidates: dict[Result, set[Sharded | Ragged]] = {
        (node, index): set() for node in firsts for index in range(len(results_of(node)))
    }
    readers: dict[Result, set[fx.Node]] = {}
    calls = {node: Ways.from_node(node) for node in firsts if node.op == "call_function"}
    sources = {node: _sources(ways, node) for node in calls}
    for node, read in sources.items():
        for slots in read:
            for slot in slots:
                readers.setdefault(slot, set()).add(node)
    pending = dict.fromkeys(calls)
    while pending:
        node = next(iter(pending))
        del pending[node]
        read_ways = [set().union(*(candidates[slot] for slot in slots)) for slots in sources[node]]
        given_ways = [candidates[node, index] for index in range(len(results_of(node)))]
        leads = _leads(node)
        rules = rules_of(calls[node], num_ranks, read_ways, given_ways, plain=leads, capacity=capacity)
        ways.rules[node] = rules
        for slot, placement in _shardings(rules, node, sources[node]):
            if placement not in candidates[slot] and ways.can_lie(slot[0], placement):
                candidates[slot].add(placement)
                pending.update(dict.fromkeys([*([slot[0]] if slot[0] in calls else []), *readers.get(slot, ())]))
    ways.rules = {node: ways.rules[node] for node in calls}
    for node in firsts:
        if node.op == "placeholder" and isinstance(value(node), Tensor):
            shards = sorted(p for p in candidates[node, 0] if isinstance(p, Sharded))
            ways.placeholders[node] = [REPLICATED, *(shards if placeholder(node).role is Role.PARAMETER else [])]
    return ways


def _leads(node: fx.Node) -> bool:
    """True if a call is one that others follow."""
    facts, target = facts_of(node.target), node.target
    is_counted = isinstance(target, OpOverload) and target.overloadpacket in flop_registry
    return facts.is_cubic or facts.traffic is Traffic.PICKS or facts.counted_as is not None or is_counted


def _sources(ways: ShardingWays, node: fx.Node) -> list[list[Result]]:
    """For each tensor argument, the values that calls of the class of ``node`` read there."""
    read = [[ways.slot(source) for source in read_tensors(member)] for member in ways.classes.members[node]]
    return [list(dict.fromkeys(slots)) for slots in zip(*read, strict=True)]


def _shardings(
    rules: list[Rule], node: fx.Node, sources: list[list[Result]]
) -> Iterator[tuple[Result, Sharded | Ragged]]:
    for rule in rules:
        for index, placement in enumerate(rule.outputs):
            if isinstance(placement, Sharded | Ragged):
                yield (node, index), placement
        for slots, placement in zip(sources, rule.inputs, strict=True):
            if isinstance(placement, Sharded | Ragged):
                yield from ((slot, placement) for slot in slots)
