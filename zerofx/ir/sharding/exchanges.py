"""Rows that are taken, or put, by an index: from tokens to their groups, and back, by all-to-all.

    rows = index(x, [token])             x in equal parts of tokens, rows in groups, of which each rank has some
    y = index(rows, [place])             the other way: y in equal parts
    g = index_put(zeros, [token], rows)  a gradient: rows go to their tokens, where they are summed in their order

A rank sends each other rank the rows that it is to have, in a buffer for a number of them (``Ragged.capacity``), and
computes what it would of whole values: a row travels as it is, and sums stay in one order on one rank
(``zerofx/ir/op_kernels/row_routes.py``). Which row goes where every rank knows, as all have the index.

    rows = index(bias, [group])          of each row its group's, where a rank has the rows of the same groups of both

Rows of what each group has one of, named by the groups in order, are where they are needed, and none is sent, unless
there is to be room for whatever the index may name.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.op_kernels.own_rows import add_group_rows, group_rows, own_ends
from zerofx.ir.op_kernels.row_routes import add_rows, land_rows, pack_rows, row_routes
from zerofx.ir.sharding.rule import Local, Rule, ShareCost, argument, num_bytes, read_tensors, shape_of
from zerofx.scheduler.plan.placements import REPLICATED, Ragged, Sharded, divides, local_shape
from zerofx.torch_private.operators import OpOverload, base_name

_TOKENS = Sharded(0)
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class RowMoves:
    """A call that moves rows of ``rows`` by ``index``; where ``adds``, to the rows that it names, else from these."""

    rows: fx.Node
    index: fx.Node
    adds: bool


def exchange_rules(
    node: fx.Node,
    num_ranks: int,
    read: Sequence[Collection[Sharded | Ragged]],
    given: Sequence[Collection[Sharded | Ragged]],
) -> Iterator[Rule]:
    """The rules of a call by which rows go to the ranks of their groups, or come from there."""
    moves = moves_of(node)
    if moves is None:
        return
    sources, shapes = read_tensors(node), (shape_of(moves.rows), shape_of(node))
    position = sources.index(moves.rows)
    to_groups = [(p, True) for p in given[0] if divides(shapes[0], _TOKENS, num_ranks)]
    to_tokens = [(p, False) for p in read[position] if divides(shapes[1], _TOKENS, num_ranks)]
    for placement, outward in sorted((p, o) for p, o in (*to_groups, *to_tokens) if _is_bounded(p)):
        own = num_bytes(local_shape(shapes[outward], placement, num_ranks), tensor(node).dtype)
        taken, result = (_TOKENS, placement) if outward else (placement, _TOKENS)
        inputs = tuple(taken if source is moves.rows else REPLICATED for source in sources)
        if moves.adds:  # to zeros, which a rank makes for itself
            inputs = (_TOKENS, *inputs[1:])
        stays = _may_stay(moves, placement, num_ranks, outward=outward)
        extra = ShareCost() if stays else ShareCost(exchanged_bytes=own, traffic_bytes=6 * own)
        yield Rule((result,), inputs, _exchange, extra)


def _is_bounded(placement: Sharded | Ragged) -> bool:
    return isinstance(placement, Ragged) and placement.dim == 0 and placement.capacity > 0


def _may_stay(moves: RowMoves, placement: Sharded | Ragged, num_ranks: int, *, outward: bool) -> bool:
    """True if rows are named in order, as groups name what each has one of, and there is no room for all else."""
    is_less = isinstance(placement, Ragged) and placement.capacity < num_ranks**2
    return is_less and moves.adds != outward and _sort_of(moves.index, 0) is not None


def moves_of(node: fx.Node) -> RowMoves | None:
    """The moves of a call; None for one that is none, or that does anything else."""
    name = base_name(node.target) if isinstance(node.target, OpOverload) else ""
    first = node.args[0] if node.args else None
    if name in _TAKES:
        index = _sole_index(node) if _TAKES[name] is None else argument(node, 2, "index")
        is_along_rows = _TAKES[name] is None or argument(node, 1, "dim") == 0
        moves = RowMoves(first, index, adds=False)  # type: ignore[arg-type]  # nodes
    elif name == "index_put":
        index, values = _sole_index(node), argument(node, 2, "values")
        is_sum = argument(node, 3, "accumulate", False) or is_order(index)
        is_along_rows = is_sum and _is_zero(first)
        moves = RowMoves(values, index, adds=True)
    elif name == "index_add":
        is_along_rows = argument(node, 1, "dim") == 0 and node.kwargs.get("alpha", 1) == 1 and _is_zero(first)
        index = argument(node, 2, "index")
        moves = RowMoves(argument(node, 3, "source"), index, adds=True)
    else:
        return None
    if not is_along_rows or not isinstance(index, fx.Node) or len(shape_of(index)) != 1:
        return None
    named = first if moves.adds else node
    assert isinstance(named, fx.Node)
    is_integer = tensor(index).dtype in _INTEGERS
    fits = shape_of(moves.rows)[1:] == shape_of(node)[1:]
    counts = shape_of(moves.rows if moves.adds else node)[0] == shape_of(index)[0]
    return moves if is_integer and fits and counts and tensor(node).is_floating_point() else None


_TAKES = {"index": None, "index_select": "dim"}


def _sole_index(node: fx.Node) -> Any:
    indices = argument(node, 1, "indices")
    return indices[0] if len(indices) == 1 else None


def _is_zero(node: Any) -> bool:
    """True if all elements are made zeros."""
    is_call = isinstance(node, fx.Node) and isinstance(node.target, OpOverload)
    return is_call and base_name(node.target) in ("zeros", "new_zeros", "zeros_like")


def is_order(index: Any) -> bool:
    """True for the order that a sort gives, and for the inverse of one: no row is named twice, and none left out."""
    return isinstance(index, fx.Node) and (_sort_of(index) is not None or inverse_of(index) is not None)


def inverse_of(index: fx.Node) -> fx.Node | None:
    """The order of rows that ``index`` is the inverse of, if it is made as one: by a sort of that order, or by numbers
    that are each put where it says."""
    if (sort := _sort_of(index)) is not None:
        of = sort.args[0]
        return of if is_order(of) and not argument(sort, 2, "descending", False) else None  # type: ignore[return-value]  # a node
    if not isinstance(index.target, OpOverload) or base_name(index.target) != "index_put":
        return None
    of, numbers = _sole_index(index), argument(index, 2, "values")
    is_count = isinstance(numbers, fx.Node) and numbers.target is torch.ops.aten.arange.default
    is_all = is_count and numbers.args[0] == shape_of(index)[0] and not argument(index, 3, "accumulate", False)
    return of if is_all and is_order(of) and shape_of(of) == shape_of(index) else None


def _sort_of(index: fx.Node, result: int = 1) -> fx.Node | None:
    """The sort that gives ``index`` as its order, if one does, or as another ``result`` of it."""
    source, place = index.args if index.target is operator.getitem else (index, 1)
    is_call = isinstance(source, fx.Node) and isinstance(source.target, OpOverload)
    return source if is_call and place == result and base_name(source.target) in ("sort", "argsort") else None  # type: ignore[union-attr, return-value, arg-type]  # an operator


def _exchange(rank: Local) -> fx.Node:
    moves, num_ranks = moves_of(rank.node), rank.num_ranks
    assert moves is not None
    given = rank.rule.outputs[0]
    outward = isinstance(given, Ragged)
    sources = read_tensors(rank.node)
    ragged = given if outward else rank.rule.inputs[sources.index(moves.rows)]
    assert isinstance(ragged, Ragged) and given is not None
    of_groups, of_tokens = (rank.node, moves.rows) if outward else (moves.rows, rank.node)
    capacity = ragged.rows_for_each(shape_of(of_groups)[0], num_ranks)
    num_rows = local_shape(shape_of(rank.node), given, num_ranks)[0]
    rows, index = rank.own(moves.rows), rank.own(moves.index)
    facts = (index, rank.whole(ragged.ends))
    how = (num_ranks, capacity, shape_of(of_tokens)[0])
    by_group = moves.adds != outward
    if _may_stay(moves, ragged, num_ranks, outward=outward) and shape_of(facts[1]) == shape_of(of_tokens)[:1]:
        num_own = local_shape(shape_of(of_groups), ragged, num_ranks)[0]
        own = rank.call(own_ends, facts[1], rank.rank(), num_ranks, num_own)
        rank.count_rows("unlike", (*facts, num_ranks))
        return rank.call(group_rows, rows, own, num_own) if outward else rank.call(add_group_rows, rows, own)
    rank.count_rows("rows", (*facts, *how, shape_of(of_groups)[0], by_group))
    routes = rank.call(row_routes, *facts, rank.rank(), *how, num_rows, by_group, outward)
    send, land = (rank.call(operator.getitem, routes, number) for number in range(2))
    received = rank.exchange(rank.call(pack_rows, rows, send, num_ranks))
    if moves.adds:
        return rank.call(add_rows, received, land, num_rows)
    return rank.call(land_rows, received, land)
