"""Compute what treats each row for itself in the order of rows in which the fewest bytes are brought into another.

    z = mul(y, index(w, [q]))    y: 16 bits, z: 32    ->    z = mul(index(y, [p]), w)
    x = index(z, [p])            p: the inverse of q

    g = index_put(zeros, [p], d, True)                ->    c = _to_copy(mul(d, w), 16 bits)
    c = _to_copy(mul(g, index(w, [q])), 16 bits)            c = index_put(zeros, [p], c, True)
    s = index_put(zeros, [q], sum(mul(g, y), 1), True)      s = sum(mul(d, index(y, [p])), 1)

Rows of experts, of 16 bits, are weighted in 32 by many models, and then brought home to their tokens; backward brings
gradients of 32 bits to experts. Where the order of rows changes, ranks that share experts send rows to each other, and
all others read and write them. What comes out has the same bits, but for the sign of zeros.

Does not handle: calls that treat rows for themselves but are read elsewhere too, and rows that are summed by the same
call that brings them to their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.edit import erase_unread, insert_call
from zerofx.ir.facts import is_random, origin, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.table import facts_of
from zerofx.ir.sharding.exchanges import RowMoves, inverse_of, is_order, moves_of
from zerofx.ir.sharding.rule import dims_of, num_bytes, read_tensors, results_of, shape_of
from zerofx.torch_private.tensors import use_mode_of

_aten = torch.ops.aten
_SCALES = frozenset({_aten.mul.Tensor, _aten.mul.Scalar})
_SUMS = frozenset({_aten.sum.dim_IntList})
_VIEWS = frozenset(
    {_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims}
)


@dataclass(frozen=True)
class OrderRows:
    """Compute what treats each row for itself in the order of rows that brings the fewest bytes into another."""

    name: str = "order_rows"

    def run(self, step: StepGraph) -> None:
        with use_mode_of(tensor(step.loss)):
            order_rows(step)


def order_rows(step: StepGraph) -> None:
    """Take rows before calls that make more bytes of them, and put them after calls that make fewer; in place."""
    moves = _moves(step)
    rows = _Rows(step)
    for node, found in moves.items():
        if not found.adds:
            rows.take_before(node, found)
    erase_unread(step.graph)
    moves = _moves(step)
    rows = _Rows(step, {(found.rows, found.index): node for node, found in reversed(moves.items()) if not found.adds})
    for node, found in moves.items():
        if found.adds and is_order(found.index) and shape_of(found.rows) == shape_of(node):
            rows.put_after(node, found)
    erase_unread(step.graph)


def _moves(step: StepGraph) -> dict[fx.Node, RowMoves]:
    """The calls that move rows, in order."""
    found = {node: moves_of(node) for node in step.calls()}
    return {node: moves for node, moves in found.items() if moves is not None}


class _Rows:
    """A graph in which rows are taken and put elsewhere; ``taken``: those that it takes, by source and index."""

    def __init__(
        self, step: StepGraph, taken: Mapping[tuple[fx.Node, fx.Node], fx.Node] = MappingProxyType({})
    ) -> None:
        self._graph, self._place, self._taken = step.graph, step.positions(), dict(taken)

    def take_before(self, node: fx.Node, moves: RowMoves) -> None:
        """Take the rows of what a call reads, where these have fewer bytes than those of its result."""
        taken = self._take(moves.rows, moves.index, node)
        if taken is not node:
            node.replace_all_uses_with(taken)

    def put_after(self, node: fx.Node, moves: RowMoves) -> None:
        """Put what calls make of the rows, instead of these, where it has fewer bytes."""
        chains = [self._chain(node, user) for user in node.users]
        others = {
            (source, calls[0]) for calls in chains for call, read in zip(calls, [node, *calls], strict=False)
            for source in _rows_read(call) if source is not read
        }  # fmt: skip
        num_bytes = sum(self._bytes_to_take(source, moves.index, reader) for source, reader in others)
        num_bytes += sum(0 if self._returns(calls[-1], moves) else _num_bytes(calls[-1]) for calls in chains if calls)
        if not all(chains) or num_bytes >= _num_bytes(moves.rows):
            return
        for calls in chains:
            made, read = moves.rows, node
            for call in calls:
                again = {s: made if s is read else self._take(s, moves.index, call) for s in _rows_read(call)}
                made, read = self._call(call, again, call), call
            if back := self._returns(read, moves):
                back.replace_all_uses_with(made)
                continue
            fake, base = tensor(made), node.args[0]
            with self._graph.inserting_before(read):
                how = {"dtype": fake.dtype, "device": fake.device}
                zeros = insert_call(self._graph, _aten.zeros.default, (list(fake.shape),), origin(read), how)
                read.replace_all_uses_with(self._call(node, {base: zeros, moves.rows: made}, read))

    def _chain(self, node: fx.Node, user: fx.Node) -> list[fx.Node]:
        """The calls, from ``user`` on, that make the fewest bytes of the rows of ``node``, each of one row; empty if
        the first is none."""
        calls, best, source = list[fx.Node](), 0, node
        while _keeps_zeros(user, source):
            calls.append(user)
            if _num_bytes(user) <= _num_bytes(calls[best - 1] if best else user):
                best = len(calls)
            if len(user.users) != 1:
                break
            source, user = user, next(iter(user.users))
        return calls[:best]

    def _returns(self, made: fx.Node, moves: RowMoves) -> fx.Node | None:
        """The sole reader of what is made of rows, if it puts them where they came from."""
        reader = next(iter(made.users)) if len(made.users) == 1 else None
        back = None if reader is None else moves_of(reader)
        is_back = back is not None and back.adds and back.rows is made and _are_inverse(back.index, moves.index)
        return reader if is_back else None

    def _bytes_to_take(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> int:
        """The bytes of all rows that are newly taken where those of ``source`` are."""
        if self._find(source, index, reader) is not None:
            return 0
        inner, num_bytes = _inputs(source, index), _num_bytes(source, index)
        return min(num_bytes, sum(self._bytes_to_take(s, index, reader) for s in inner)) if inner else num_bytes

    def _take(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of ``source`` by ``index``, in front of ``reader``, or that itself, where it takes them."""
        known = self._find(source, index, reader)
        if known is not None:
            return known
        inner = _inputs(source, index)
        if inner and sum(self._bytes_to_take(each, index, reader) for each in inner) < _num_bytes(source, index):
            taken = self._call(source, {each: self._take(each, index, reader) for each in inner}, reader)
        elif (moves := moves_of(reader)) is not None and moves == RowMoves(source, index, adds=False):
            taken = reader
        else:
            with self._graph.inserting_before(reader):
                taken = insert_call(self._graph, _aten.index.Tensor, (source, [index]), origin(reader))
            self._place[taken] = self._place[reader]
        self._taken[source, index] = taken
        return taken

    def _find(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node | None:
        """Rows of ``source`` by ``index`` that are there where ``reader`` is, if any."""
        moves = moves_of(source)
        if moves is not None and not moves.adds and _are_inverse(moves.index, index):
            return moves.rows
        taken = self._taken.get((source, index))
        return taken if taken is not None and self._place[taken] <= self._place[reader] else None

    def _call(self, call: fx.Node, again: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The call in front of ``before``, with other arguments."""
        with self._graph.inserting_before(before):
            made = self._graph.node_copy(call, lambda source: again.get(source, source))
        args, kwargs = fx.map_arg((made.args, made.kwargs), lambda source: source.meta["val"])
        self._place[made] = self._place[before]
        return set_value(made, call.target(*args, **kwargs))  # type: ignore[operator]  # an operator


def _inputs(call: fx.Node, index: fx.Node) -> list[fx.Node]:
    """The tensors whose rows make those of a call that may as well be made of rows taken by ``index``."""
    if call.op != "call_function" or shape_of(index)[0] > shape_of(call)[0]:
        return []
    is_view = _keeps_rows(call) and shape_of(index)[0] == shape_of(call)[0]
    is_cast = call.target is _aten._to_copy.default  # which may as well be done twice
    is_own = facts_of(call.target).is_pointwise and (is_cast or len(call.users) == 1) and not is_random(call)
    return _rows_read(call) if is_view or is_own else []


def _rows_read(call: fx.Node) -> list[fx.Node]:
    """The tensors that a call reads row by row with its result, which is one tensor; empty if it reads otherwise."""
    given = results_of(call)
    if call.op != "call_function" or len(given) != 1 or given[0] is None or given[0].ndim == 0 or given[0].shape[0] < 2:
        return []
    sources = {source: tensor(source) for source in read_tensors(call)}
    same = [source for source, fake in sources.items() if fake.ndim > 0 and fake.shape[0] == given[0].shape[0]]
    if _keeps_rows(call) or call.target in _SUMS:
        return same
    return [source for source in same if sources[source].ndim == given[0].ndim]  # others are repeated for each row


def _keeps_rows(call: fx.Node) -> bool:
    """True for a view whose rows are those of what it views."""
    if call.op != "call_function" or call.target not in _VIEWS:
        return False
    old, given = shape_of(read_tensors(call)[0]), shape_of(call)
    return bool(old and given) and old[0] == given[0]


def _keeps_zeros(call: fx.Node, source: fx.Node) -> bool:
    """True if a call makes each row of the same one of ``source``, and nothing of zeros, of whatever sign."""
    if source not in _rows_read(call) or read_tensors(call).count(source) > 1 or not tensor(call).is_floating_point():
        return False
    if call.target in _SUMS:
        return 0 not in dims_of(call.args[1], len(shape_of(source)))
    is_cast = call.target is _aten._to_copy.default and tensor(call).device == tensor(source).device
    return call.target in _SCALES or is_cast or _keeps_rows(call)


def _are_inverse(one: fx.Node, other: fx.Node) -> bool:
    return inverse_of(one) is other or inverse_of(other) is one


def _num_bytes(node: fx.Node, index: fx.Node | None = None) -> int:
    """Bytes of a value, or of its rows that ``index`` takes."""
    shape = shape_of(node)
    return num_bytes(shape if index is None else (*shape_of(index), *shape[1:]), tensor(node).dtype)
