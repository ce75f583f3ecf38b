"""Compute what treats each row for itself in the order of rows in which the fewest bytes are brought into another.

    z = mul(y, index(w, [q]))    y: 16 bits, z: 32    ->    z = mul(index(y, [p]), w)
    x = index(z, [p])            p: the inverse of q

    g = index_put(zeros, [p], d, True)                ->    c = _to_copy(mul(d, w), 16 bits)
    c = _to_copy(mul(g, index(w, [q])), 16 bits)            c = index_put(zeros, [p], c, True)
    s = index_put(zeros, [q], sum(mul(g, y), 1), True)      s = sum(mul(d, index(y, [p])), 1)

Rows of experts, of 16 bits, are weighted in 32 by many models, and then brought back to their tokens; backward brings
gradients of 32 bits to experts. Where the order of rows changes, ranks that share experts send rows to each other, and
all others read and write them. Results have the same bits, but for the sign of zeros.

Does not handle: values that others read too, and rows that are summed by the call that brings them to their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.aliasing import is_view
from zerofx.ir.edit import erase_unread, insert_call
from zerofx.ir.facts import origin, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.rows import Rows
from zerofx.ir.operators.table import facts_of
from zerofx.ir.sharding.exchanges import RowMoves, inverse_of, is_order, moves_of
from zerofx.ir.sharding.rule import num_bytes, read_tensors, results_of, shape_of
from zerofx.scheduler.analysis.tile_chains import rows_of_result
from zerofx.torch_private.tensors import use_mode_of

_aten = torch.ops.aten
_FIRST = Rows(0, 1, 1)


@dataclass(frozen=True)
class OrderRows:
    """Compute what treats each row for itself in the order of rows that brings the fewest bytes into another."""

    name: str = "order_rows"

    def run(self, step: StepGraph) -> None:
        with use_mode_of(tensor(step.loss)):
            order_rows(step)


def order_rows(step: StepGraph) -> None:
    """Take rows before calls that make more bytes of them, and put them after calls that make fewer; in place."""
    moving = _moves(step)
    if not moving:
        return
    rows = _Rows(step)
    for node, moves in moving.items():
        if not moves.adds:
            rows.take_before(node, moves)
    erase_unread(step.graph)
    moving = _moves(step)
    rows = _Rows(step, {(m.rows, m.index): node for node, m in reversed(moving.items()) if not m.adds})
    for node, moves in moving.items():
        if moves.adds and is_order(moves.index) and shape_of(moves.rows) == shape_of(node):
            rows.put_after(node, moves)
    erase_unread(step.graph)


def _moves(step: StepGraph) -> dict[fx.Node, RowMoves]:
    """The calls that move rows, in order."""
    moves = {node: moves_of(node) for node in step.calls()}
    return {node: each for node, each in moves.items() if each is not None}


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
        size = sum(self._bytes_to_take(source, moves.index, reader) for source, reader in others)
        size += sum(0 if self._reader_back(calls[-1], moves) else _num_bytes(calls[-1]) for calls in chains if calls)
        if not all(chains) or size >= _num_bytes(moves.rows):
            return
        for calls in chains:
            result, read = moves.rows, node
            for call in calls:
                again = {s: result if s is read else self._take(s, moves.index, call) for s in _rows_read(call)}
                result, read = self._call(call, again, call), call
            if back := self._reader_back(read, moves):
                back.replace_all_uses_with(result)
                continue
            fake, base = tensor(result), node.args[0]
            assert isinstance(base, fx.Node)
            with self._graph.inserting_before(read):
                how = {"dtype": fake.dtype, "device": fake.device}
                zeros = insert_call(self._graph, _aten.zeros.default, (list(fake.shape),), origin(read), how)
            read.replace_all_uses_with(self._call(node, {base: zeros, moves.rows: result}, read))

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

    def _reader_back(self, node: fx.Node, moves: RowMoves) -> fx.Node | None:
        """The sole reader of what is computed of rows, if it puts them where they came from."""
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        back = None if reader is None else moves_of(reader)
        is_back = back is not None and back.adds and back.rows is node and _are_inverse(back.index, moves.index)
        return reader if is_back else None

    def _bytes_to_take(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> int:
        """The bytes of all rows that are newly taken where those of ``source`` are."""
        if self._find(source, index, reader) is not None:
            return 0
        inner, size = _inputs(source, index), _num_bytes(source, index)
        return min(size, sum(self._bytes_to_take(s, index, reader) for s in inner)) if inner else size

    def _take(self, source: fx.Node, index: fx.Node, reader: fx.Node) -> fx.Node:
        """Rows of ``source`` by ``index``, in front of ``reader``, or that itself, where it takes them."""
        known = self._find(source, index, reader)
        if known is not None:
            return known
        inner = _inputs(source, index)
        if inner and sum(self._bytes_to_take(each, index, reader) for each in inner) < _num_bytes(source, index):
            taken = self._call(source, {each: self._take(each, index, reader) for each in inner}, reader)
        elif moves_of(reader) == RowMoves(source, index, adds=False):
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

    def _call(self, call: fx.Node, again: Mapping[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        """The call in front of ``before``, with other arguments."""
        with self._graph.inserting_before(before):
            copy = self._graph.node_copy(call, lambda source: again.get(source, source))
        args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda source: source.meta["val"])
        self._place[copy] = self._place[before]
        return set_value(copy, call.target(*args, **kwargs))  # type: ignore[operator]  # an operator


def _inputs(call: fx.Node, index: fx.Node) -> list[fx.Node]:
    """The tensors whose rows make those of a call that may as well be made of rows taken by ``index``."""
    rows = _rows_read(call)
    if not rows or shape_of(index)[0] > shape_of(call)[0]:
        return []
    if is_view(call):
        return rows if shape_of(index)[0] == shape_of(call)[0] else []
    is_cheap = call.target is _aten._to_copy.default or len(call.users) == 1  # to be done twice, or done once
    return rows if is_cheap and facts_of(call.target).is_pointwise else []


def _rows_read(call: fx.Node) -> list[fx.Node]:
    """The tensors whose rows make those of a call's result, one of one; empty if it needs several at once."""
    results = results_of(call) if call.op == "call_function" else ()
    if len(results) != 1 or results[0] is None or results[0].ndim == 0 or results[0].shape[0] < 2:
        return []
    num_rows, ndim = results[0].shape[0], results[0].ndim
    sources = {source: shape_of(source) for source in read_tensors(call)}
    has_rows = {
        s: shape[:1] == (num_rows,) and (len(sources) == 1 or len(shape) == ndim) for s, shape in sources.items()
    }
    is_by_row = rows_of_result(call, {s: _FIRST if has else None for s, has in has_rows.items()}) == _FIRST
    return [source for source, has in has_rows.items() if has and is_by_row]


def _keeps_zeros(call: fx.Node, source: fx.Node) -> bool:
    """True if a call makes each row of the same one of ``source``, and zeros of zeros, of whatever sign."""
    if source not in _rows_read(call) or read_tensors(call).count(source) > 1 or not tensor(call).is_floating_point():
        return False
    is_cast = call.target is _aten._to_copy.default and tensor(call).device == tensor(source).device
    is_scaled = call.target in (_aten.mul.Tensor, _aten.mul.Scalar)
    return is_cast or is_scaled or call.target is _aten.sum.dim_IntList or is_view(call)


def _are_inverse(first: fx.Node, second: fx.Node) -> bool:
    return inverse_of(first) is second or inverse_of(second) is first


def _num_bytes(node: fx.Node, index: fx.Node | None = None) -> int:
    """Bytes of a value, or of its rows that ``index`` takes."""
    shape = shape_of(node)
    return num_bytes(shape if index is None else (*shape_of(index), *shape[1:]), tensor(node).dtype)
