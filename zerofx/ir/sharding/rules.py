"""The rules of an operator: from its family's patterns, else DTensor's, else, if it is pointwise, the elementwise ones.

Every rank runs an unknown operator on whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of
from zerofx.ir.sharding import attention, convolutions, grouped, indexing, losses, reductions, shapes
from zerofx.ir.sharding.exchanges import exchange_rules
from zerofx.ir.sharding.pattern import DimMap, Lies, Pattern
from zerofx.ir.sharding.rule import Rule, read_tensors, results_of, shape_of
from zerofx.scheduler.plan.placements import REPLICATED, Placement, Ragged, Sharded
from zerofx.torch_private.distributed import single_dim_rules
from zerofx.torch_private.operators import OpOverload, base_name, schema_of

_OWN: Mapping[str, Callable[[fx.Node], list[Pattern]]] = {
    **shapes.PATTERNS, **indexing.PATTERNS, **losses.PATTERNS, **convolutions.PATTERNS, **attention.PATTERNS,
    **reductions.PATTERNS, **grouped.PATTERNS,
}  # fmt: skip


def patterns_of(node: fx.Node) -> list[Pattern]:
    """The ways to share a call, apart from replication."""
    target = node.target
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return []
    name = base_name(target)
    own = _OWN.get(f"{name}.{str(target).rpartition('.')[2]}") or _OWN.get(name)
    if own is not None:
        return own(node)
    if facts_of(target).kind is OperatorKind.INDEXED and indexing.has_mask(node):
        return indexing.mask_patterns(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    outputs, num = results_of(node), len(read_tensors(node))
    if torch.Tag.nondeterministic_seeded in target.tags:
        return _elementwise(node) if target in OWN_DRAWS else []  # each rank draws for its part
    listed = single_dim_rules(target, args, kwargs, len(outputs))
    if listed is None:
        return _elementwise(node) if facts_of(target).is_pointwise else []
    return [
        Pattern(
            tuple(_check_dim(dim) for dim in dims[: len(outputs)]),
            tuple(_check_dim(dim) for dim in dims[len(outputs) :]),
            is_tried=True,
        )
        for dims in listed
        if len(dims) == len(outputs) + num
    ]


def dim_map_of(node: fx.Node) -> DimMap | None:
    """The map of sharded dimensions through a call that only moves elements; None for other calls."""
    if not isinstance(node.target, OpOverload):
        return None
    moved = shapes.DIM_MAPS.get(base_name(node.target))
    return None if moved is None else moved(node)


def _check_dim(dim: object) -> Lies:
    assert dim is None or isinstance(dim, int) or dim == "sum"
    return dim


def _elementwise(node: fx.Node) -> list[Pattern]:
    """Patterns of elementwise operators: any dimension; broadcast inputs are whole."""
    outputs = results_of(node)
    shapes_read = [shape_of(source) for source in read_tensors(node)]
    if any(tensor is None or tensor.shape != outputs[0].shape for tensor in outputs if outputs[0] is not None):
        return []
    assert outputs[0] is not None
    shape = tuple(outputs[0].shape)

    def read(dim: int, source: tuple[int, ...]) -> Lies:
        own = dim - (len(shape) - len(source))
        return own if own >= 0 and source[own] == shape[dim] else None

    return [
        Pattern((dim,) * len(outputs), tuple(read(dim, source) for source in shapes_read))
        for dim in range(len(shape))
        if shape[dim] > 1
    ]


def replication_rule(node: fx.Node) -> Rule:
    """The rule by which every rank computes the whole call."""
    outputs = tuple(None if tensor is None else REPLICATED for tensor in results_of(node))
    return Rule(outputs, (REPLICATED,) * len(read_tensors(node)))


@dataclass(frozen=True)
class Ways:
    """A call with its patterns and its map of dimensions, from which its rules are made."""

    node: fx.Node
    patterns: tuple[Pattern, ...]
    dim_map: DimMap | None

    @staticmethod
    def from_node(node: fx.Node) -> Ways:
        return Ways(node, tuple(patterns_of(node)), dim_map_of(node))


def rules_of(
    ways: Ways,
    num_ranks: int,
    read: Sequence[Collection[Sharded | Ragged]],
    given: Sequence[Collection[Sharded | Ragged]],
    *,
    plain: bool,
    capacity: float = 0.0,
) -> list[Rule]:
    """The rules of a call, replication first.

    ``read`` has the possible shardings of each tensor argument, ``given`` those of each output: a rule uses one of
    them, or, if ``plain``, any dimension in one group. Ragged rows (``Ragged``) pass through row-wise calls, and come
    and go by those that take rows by an index; ``capacity`` is what ranks may have for them, where it is bounded.
    """
    rules: dict[tuple[tuple[Placement | None, ...], tuple[Placement, ...]], Rule] = {}

    def add(rule: Rule | None) -> None:
        if rule is not None:
            rules.setdefault((rule.outputs, rule.inputs), rule)

    add(replication_rule(ways.node))
    for pattern in ways.patterns:
        pairs = [*zip(pattern.outputs, given, strict=True), *zip(pattern.inputs, read, strict=True)]
        groups = {p.groups for lies, shards in pairs for p in shards if isinstance(p, Sharded) and p.dim == lies}
        if plain or not any(isinstance(lies, int) for lies, _ in pairs):
            groups.update((1, *pattern.groups))
        capacities = {capacity, *(p.capacity for _, shards in pairs for p in shards if isinstance(p, Ragged))}
        for number in sorted(groups):
            rule = pattern.rule(ways.node, number, num_ranks)
            add(rule)
            for bounded in sorted(capacities - {0.0} if rule is not None and rule.has_ragged else ()):
                add(rule.with_capacity(bounded))  # type: ignore[union-attr]  # it is one
    if ways.dim_map is not None:
        shards = {p for source in read for p in source if isinstance(p, Sharded)}
        shards |= {back for p in given[0] if isinstance(p, Sharded) and (back := ways.dim_map.backward(p)) is not None}
        for shard in sorted(shards):
            add(ways.dim_map.rule(ways.node, shard, num_ranks))
    for rule in (*_row_rules(ways, read, given), *exchange_rules(ways.node, num_ranks, read, given)):
        add(rule)
    return list(rules.values())


def _row_rules(
    ways: Ways, read: Sequence[Collection[Sharded | Ragged]], given: Sequence[Collection[Sharded | Ragged]]
) -> Iterator[Rule | None]:
    """The rules of a row-wise call for ragged rows."""
    ragged = {p for shards in (*given, *read) for p in shards if isinstance(p, Ragged)}
    if not ragged:
        return
    moved = ways.dim_map.rows(ways.node) if ways.dim_map is not None else []
    for pattern in (*ways.patterns, *moved):
        pairs = [*zip(pattern.outputs, given, strict=True), *zip(pattern.inputs, read, strict=True)]
        for ends, capacity in sorted({(p.ends, p.capacity) for p in ragged}):
            if any(Ragged(lies, ends, capacity) in shards for lies, shards in pairs if isinstance(lies, int)):
                rule = pattern.ragged_rule(ways.node, ends)
                yield None if rule is None else rule.with_capacity(capacity)


def rule_for(
    node: fx.Node, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...], num_ranks: int
) -> Rule | None:
    """The rule of a call with these placements of outputs and tensor arguments; None if there is none."""
    read = [[p] if isinstance(p, Sharded | Ragged) else [] for p in inputs]
    given = [[p] if isinstance(p, Sharded | Ragged) else [] for p in outputs]
    rules = rules_of(Ways.from_node(node), num_ranks, read, given, plain=False)
    return next((rule for rule in rules if (rule.outputs, rule.inputs) == (outputs, inputs)), None)
