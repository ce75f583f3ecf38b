"""Infer the kinds of a call's results from those of its arguments, for the placement check.

Three sources: element moves (views, slices, concatenations) of local shapes; the values computed from a rank's number
on the way to a mask (``Own``); and for all other calls the rules of ``zerofx/ir/sharding`` that run the call itself,
matched against the call with global sizes. So the graph that a rule writes instead of a call is checked operator by
operator, and not trusted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.facts import ints, is_random, set_value, value
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.sharding.pattern import empty_in_order
from zerofx.ir.sharding.placed_moves import (
    MOVES,
    NOTHING,
    WHOLE,
    Averaged,
    Kind,
    Kinds,
    KindsRule,
    Own,
    any_part,
    parts_of,
)
from zerofx.ir.sharding.placed_numbers import RANK_NUMBER_RULES
from zerofx.ir.sharding.rule import argument, read_tensors, results_of, shape_of, sharing_key
from zerofx.ir.sharding.rules import Ways, rules_of
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Partial, Ragged, Sharded
from zerofx.torch_private.operators import OpOverload, base_name, schema_of

_aten = torch.ops.aten
_OWN_DRAWS = frozenset(OWN_DRAWS.values())
_MOST_COMBINATIONS = 64
_SUM_OF_LOSSES = 2  # as torch counts reductions


def kinds_of_call(
    node: fx.Node, read: Sequence[Kinds], num_ranks: int, known: dict[Any, Any]
) -> tuple[Kinds, ...] | None:
    """Kinds of each result; None for an unknown call. ``known`` caches equal calls."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    if target in _OWN_DRAWS:
        return (frozenset.intersection(*(parts_of(kinds) for kinds in read[:1])),) * len(results_of(node))
    if is_random(node):
        return (WHOLE if all(REPLICATED in kinds for kinds in read) else NOTHING,) * len(results_of(node))
    name = base_name(target)
    rule = _RULES.get(name)
    if any(isinstance(kind, Own) for kinds in read for kind in kinds):
        rule = RANK_NUMBER_RULES.get(name)
        if rule is None:
            return None
    elif any(isinstance(kind, Ragged) for kinds in read for kind in kinds):
        rule = None  # by the rules: what treats each row for itself
    possible = _kinds_from_rules(node, read, num_ranks, known) if rule is None else rule(node, read, num_ranks)
    return (possible,) if isinstance(possible, frozenset) else possible


def _kinds_from_rules(
    node: fx.Node, read: Sequence[Kinds], num_ranks: int, known: dict[Any, Any]
) -> tuple[Kinds, ...] | None:
    key = (sharing_key(node), tuple(read))
    if key not in known:
        known[key] = _query_rules(node, read, num_ranks)
    possible: tuple[Kinds, ...] | None = known[key]
    return possible


def _query_rules(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """Match the rules of the global call, for each combination of sharded dimensions of the arguments."""
    choices = [{k.dim if isinstance(k, Sharded) else None for k in kinds if _is_placement(k)} for kinds in read]
    combinations = list(itertools.product(*choices)) if prod(map(len, choices)) <= _MOST_COMBINATIONS else []
    # Of many, those in which arguments have the same dimension in parts, all that may.
    for dim in set().union(*choices) if not combinations else ():
        combinations.append(tuple(next(d for d in (dim, None, *each) if d in each) for each in choices if each))
    outputs: list[set[Kind]] = [set() for _ in results_of(node)]
    takes_sizes = any(each.name in _SIZES for each in schema_of(node.target).arguments)  # type: ignore[arg-type]  # an operator
    for dims in combinations:
        if not any(dim is not None for dim in dims) and all(REPLICATED in kinds for kinds in read):
            for kinds in outputs:
                kinds.add(REPLICATED)
        whole = _whole_call(node, dims, num_ranks)
        if whole is None and takes_sizes:
            return None  # local ones: the call of whole sizes has others
        if whole is None or len(results_of(whole)) != len(outputs):
            continue
        allowed = [
            {k for k in kinds if _is_placement(k) and (k.dim if isinstance(k, Sharded) else None) == dim}
            for kinds, dim in zip(read, dims, strict=True)
        ]
        shards = [[k for k in kinds if isinstance(k, Sharded | Ragged)] for kinds in allowed]
        for rule in rules_of(Ways.from_node(whole), num_ranks, shards, [()] * len(outputs), plain=False):
            if any(placement not in kinds for placement, kinds in zip(rule.inputs, allowed, strict=True)):
                continue
            is_mean = node.target in _MEANS and rule.local is not None
            if rule.local is not None and not is_mean and node.target not in _WITH_SIZES:
                continue
            for kinds, placement in zip(outputs, rule.outputs, strict=True):
                if placement is not None:
                    kinds.add(Averaged() if is_mean and isinstance(placement, Partial) else placement)
    return tuple(frozenset(kinds) for kinds in outputs)


_SIZES = frozenset({"size", "sizes", "input_size", "input_sizes", "self_size", "shape", "output_size", "num_weights"})
_MEANS = frozenset({_aten.mean.dim, _aten.mean.default})
_WITH_SIZES = frozenset({_aten.convolution_backward.default})  # whose rules change sizes in its arguments alone


def _is_placement(kind: Kind) -> bool:
    return not isinstance(kind, Own | Averaged)


def _whole_call(node: fx.Node, dims: Sequence[int | None], num_ranks: int) -> fx.Node | None:
    """The global call: each argument's dimension of ``dims`` as long as on all ranks together; None if invalid."""
    graph, longer = fx.Graph(), iter(dims)

    def whole(source: fx.Node) -> fx.Node:
        given = value(source)
        copy = graph.placeholder(source.name)
        if isinstance(given, Tensor):
            shape, dim = list(given.shape), next(longer)
            if dim is not None:
                shape[dim] *= num_ranks
            given = empty_in_order(given, shape)
        return set_value(copy, given)

    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), whole)
    if node.target in _WITH_SIZES and dims[0] == 1 and args[3]:
        args = (*args[:3], [size * num_ranks for size in ints(args[3])], *args[4:])
    kwargs = {name: "meta" if isinstance(item, torch.device) else item for name, item in kwargs.items()}
    call = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]  # an operator
    given_args, given_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    try:
        return set_value(call, node.target(*given_args, **given_kwargs))  # type: ignore[operator]  # an operator
    except (RuntimeError, ValueError, AssertionError):  # torch's own word on shapes
        return None


def _where_kinds(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """The kinds of ``where``; with a number instead of a tensor torch has no rule for it, but it is elementwise."""
    if node.target is not _aten.where.ScalarOther:
        return _kinds_from_rules(node, read, num_ranks, {})
    shape, possible = shape_of(node), set[Kind]({REPLICATED} if all(REPLICATED in kinds for kinds in read) else ())
    for kind in any_part(shape, range(len(shape))):
        assert isinstance(kind, Sharded)
        from_end = len(shape) - kind.dim
        fits = True
        for kinds, source in zip(read, map(shape_of, read_tensors(node)), strict=True):
            is_part = len(source) >= from_end and source[-from_end] == shape[kind.dim]
            fits &= (Sharded(len(source) - from_end, kind.groups) if is_part else REPLICATED) in kinds
        possible |= {kind} if fits else set()
    return (frozenset(possible),)


def _div_kinds(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    if Averaged() not in read[0]:
        possible = _kinds_from_rules(node, read, num_ranks, {})
        return None if possible is None else possible[0]
    return frozenset({SUM}) if argument(node, 1, "other") == num_ranks else frozenset({Averaged()})


def _nll_kinds(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """Sums of this rank's losses, and their number, are partial sums; means are not."""
    possible = _kinds_from_rules(node, read, num_ranks, {})
    is_sum = argument(node, 3, "reduction") == _SUM_OF_LOSSES and argument(node, 2, "weight") is None
    if (
        is_sum
        and any(kind.dim == 0 for kind in parts_of(read[0] & read[1]))
        and len(shape_of(read_tensors(node)[0])) == 2
    ):
        return frozenset({SUM}), frozenset({SUM})
    return possible


_RULES: Mapping[str, KindsRule] = MappingProxyType(
    {**MOVES, "nll_loss_forward": _nll_kinds, "div": _div_kinds, "where": _where_kinds}
)
