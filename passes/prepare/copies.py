"""Compute rows of the experts that have the most on all ranks, each of which gets a copy of these experts' weights.

    x = land_rows(all_to_all(pack_rows(tokens, row_routes(.., ends, ..))))
    h = grouped_mm(x, w, own_ends(ends))                      gw = grouped_mm(t(gh), x, own_ends(ends))

    rows, order, dealt, copied = deal_rows(.., ends, ..)      # the experts with the most rows, in this micro-batch
    x = land_rows(all_to_all(pack_rows(tokens, row_routes(.., dealt, .., rows=rows))))
    c = all_reduce(masked_fill(w[places], outside, 0))        # where a rank has them; of the others zeros are added
    h = grouped_mm(x, cat([w, c]), own_ends(dealt))
    g = grouped_mm(t(gh), x, own_ends(dealt))
    gw = index_add(g[:n], 0, places, masked_fill(all_reduce(g[n:]), outside, 0))

Weights come for forward and for backward, each time where they are multiplied. What is computed of each row is the
same, and rows are summed in the order that they had; weights' gradients of copied experts are each rank's sum over its
rows, rounded, and then the sum of those. The step's count of rows also says how many there would be for one rank if
none were dealt: when there are few, nothing needs to be copied.

Does not handle: experts whose rows are not sent, which all ranks compute with as they did.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.ir.edit import erase_unread
from zerofx.ir.facts import Phase, Role, origin, piece_of, set_value, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.own_rows import add_group_rows, group_rows, own_ends, own_rows, whole_rows
from zerofx.ir.op_kernels.row_copies import deal_rows, own_slots, undealt_shares
from zerofx.ir.op_kernels.row_routes import add_rows, group_shares, row_routes, row_shares, sum_order
from zerofx.ir.sharding.grouped import ends_of, letters_of
from zerofx.ir.sharding.rule import read_tensors, results_of, shape_of
from zerofx.passes.lib.local_graph import LocalGraph
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.torch_private.operators import OpOverload
from zerofx.torch_private.tensors import use_mode_of

_aten = torch.ops.aten
_LETTERS = {group_rows: (("en", ""), ("sn",)), add_group_rows: (("sn", ""), ("en",))}  # as of products
_ENDS = {row_routes: 1, row_shares: 1, own_rows: 1, whole_rows: 1, own_ends: 0, group_shares: 0}


@dataclass(frozen=True)
class Copies:
    """Compute rows of the experts that have the most on all ranks, with copies of their weights."""

    shardings: tuple[ShardingDecision, ...]
    num_parts: int
    name: str = "copies"

    def run(self, step: StepGraph) -> None:
        num_copies = max((decision.num_copies for decision in self.shardings), default=0)
        if num_copies:
            in_rounds = any(decision.num_rounds > 1 for decision in self.shardings)
            with use_mode_of(tensor(step.loss)):
                _Copies(step, self.num_parts, num_copies, in_rounds=in_rounds).run()


@dataclass(frozen=True)
class _Dealt:
    """Rows as they are dealt: nodes of what ``deal_rows`` and ``own_slots`` give."""

    rows: fx.Node
    order: fx.Node
    ends: fx.Node
    places: fx.Node
    outside: fx.Node
    num_groups: int
    num_copies: int


class _Copies:
    def __init__(self, step: StepGraph, num_ranks: int, num_copies: int, *, in_rounds: bool) -> None:
        self._step, self._graph, self._num_ranks, self._num_copies = step, step.graph, num_ranks, num_copies
        self._in_rounds = in_rounds  # which bring rows home in the order that they are summed in
        (self._rank,) = step.placeholders(Role.RANK)
        self._dealt: dict[fx.Node, _Dealt] = {}  # by where rows end
        self._joined: dict[tuple[fx.Node, Phase], fx.Node] = {}
        self._undealt: list[fx.Node] = []

    def run(self) -> None:
        calls = list(self._step.calls())
        for node in calls:
            if node.target is row_shares and node.args[1] not in self._dealt:
                self._deal(node)
        for node in calls:
            if isinstance(node.target, OpOverload) and node.target in _ENDS:
                dealt = self._dealt.get(node.args[_ENDS[node.target]])  # type: ignore[arg-type]  # a node
                if dealt is not None:
                    self._put_ends(node, _ENDS[node.target], dealt)
        for node in calls:
            if node.target is add_rows and not self._in_rounds:
                self._sum_in_order(node)
            elif (own := ends_of(node)) is not None:
                self._multiply(node, own)
            elif node.target in _LETTERS:
                self._multiply(node, node.args[1])  # type: ignore[arg-type]  # a node
        self._count_undealt()
        self._sort()
        erase_unread(self._graph)

    def _local(self, node: fx.Node) -> LocalGraph:
        return LocalGraph(self._graph, self._num_ranks, self._rank, None, origin(node), piece=piece_of(node))

    def _deal(self, count: fx.Node) -> None:
        """Deal the rows that are counted, in front of that."""
        places, ends, num_ranks, _, num_tokens, num_rows, by_group = count.args
        assert isinstance(ends, fx.Node)
        (num_groups,) = shape_of(ends)
        num_copies, size, write = min(self._num_copies, num_groups), num_groups // self._num_ranks, self._local(count)
        with self._graph.inserting_before(count):
            deal = write.call(deal_rows, places, ends, num_ranks, num_tokens, num_rows, num_copies, by_group)
            rows, order, all_ends, copied = (write.call(operator.getitem, deal, number) for number in range(4))
            slots = write.call(own_slots, copied, self._rank, size)
            own, outside = (write.call(operator.getitem, slots, number) for number in range(2))
            undealt = write.call(undealt_shares, places, ends, num_ranks, num_tokens, num_rows, by_group)
        self._undealt.append(undealt)
        self._dealt[ends] = _Dealt(rows, order, all_ends, own, outside, size, num_copies)

    def _put_ends(self, node: fx.Node, position: int, dealt: _Dealt) -> None:
        """Let a call be about rows as they are dealt."""
        node.update_arg(position, dealt.ends)
        write = self._local(node)
        if node.target in (row_routes, row_shares):
            node.update_kwarg("rows", dealt.rows)
        elif node.target is own_ends:
            _renew(node)
        elif node.target is own_rows:
            with self._graph.inserting_before(node):
                node.update_arg(0, write.call(_aten.index_select.default, node.args[0], node.args[4], dealt.order))
        elif node.target is whole_rows:
            with self._graph.inserting_before(node.next):
                whole = write.call(_aten.index_select.default, node, node.args[4], dealt.rows)
            _read_instead(node, whole, [user for user in node.users if user is not whole])

    def _sum_in_order(self, node: fx.Node) -> None:
        """Let rows that come from several ranks be summed in the order of their moves."""
        received, land, *_ = node.args
        routes = land.args[0]  # type: ignore[union-attr]  # a node
        if "rows" not in routes.kwargs:  # type: ignore[union-attr]  # a node
            return
        places, ends, rank, num_ranks, capacity, num_tokens, _, by_group, outward = routes.args  # type: ignore[union-attr]
        write, shape = self._local(node), list(shape_of(received))  # type: ignore[arg-type]  # a node
        how = (places, ends, rank, num_ranks, capacity, num_tokens, by_group, outward)
        with self._graph.inserting_before(node):
            order = write.call(sum_order, *how, **routes.kwargs)  # type: ignore[union-attr]  # a node
            flat = write.call(_aten.view.default, received, [shape[0] * shape[1], *shape[2:]])
            flat = write.call(_aten.index_select.default, flat, 0, order)
            node.update_arg(0, write.call(_aten.view.default, flat, shape))
            node.update_arg(1, write.call(_aten.index_select.default, land, 0, order))

    def _multiply(self, node: fx.Node, own: fx.Node) -> None:
        """Let a grouped product, or what each group has a row of, be one of copied groups too."""
        dealt = next((d for d in self._dealt.values() if own.target is own_ends and own.args[0] is d.ends), None)
        if dealt is None:
            return
        inputs, outputs = _LETTERS.get(node.target) or letters_of(node)  # type: ignore[call-overload]  # an operator
        for source, names in zip(read_tensors(node), inputs, strict=True):
            if "e" in names:
                with self._graph.inserting_before(node):
                    node.replace_input_with(source, self._join(node, source, dealt))
        _renew(node)
        for number, names in enumerate(outputs):
            if "e" in names and len(outputs) == 1:
                self._add(node, dealt)
            elif "e" in names:
                for user in [user for user in node.users if user.args[1] == number]:
                    set_value(user, results_of(node)[number])
                    self._add(user, dealt)

    def _join(self, node: fx.Node, weights: fx.Node, dealt: _Dealt) -> fx.Node:
        """The matrices of this rank's groups and of those that are copied; laid out as they are."""
        key, write = (weights, origin(node).phase), self._local(node)
        if key not in self._joined:
            row, column = tensor(weights).stride()[-2:]
            by_columns = row == 1 < column and tensor(weights).dim() > 2
            own = write.call(_aten.transpose.int, weights, -2, -1) if by_columns else weights
            picked = self._fill(write, write.call(_aten.index_select.default, own, 0, dealt.places), dealt)
            joined = write.call(_aten.cat.default, [own, write.all_reduce(picked)])
            self._joined[key] = write.call(_aten.transpose.int, joined, -2, -1) if by_columns else joined
        return self._joined[key]

    def _add(self, gradient: fx.Node, dealt: _Dealt) -> None:
        """Let readers of the matrices' gradient have that of this rank's groups, with what all ranks have of those that
        are copied."""
        readers, write = list(gradient.users), self._local(gradient)
        with self._graph.inserting_before(gradient.next):
            own = write.call(_aten.slice.Tensor, gradient, 0, 0, dealt.num_groups)
            end = dealt.num_groups + dealt.num_copies
            sums = write.all_reduce(write.call(_aten.slice.Tensor, gradient, 0, dealt.num_groups, end))
            sums = self._fill(write, sums, dealt)
            total = write.call(_aten.index_add.default, own, 0, dealt.places, sums)
        _read_instead(gradient, total, readers)

    def _fill(self, write: LocalGraph, copies: fx.Node, dealt: _Dealt) -> fx.Node:
        """``copies``, with zeros for those of other ranks' groups."""
        outside = write.call(_aten.view.default, dealt.outside, [-1, *(1,) * (tensor(copies).dim() - 1)])
        return write.call(_aten.masked_fill.Scalar, copies, outside, 0)

    def _count_undealt(self) -> None:
        most = self._step.extras[-1]
        write = self._local(most)
        with self._graph.inserting_before(self._step.output):
            undealt = write.call(_aten.amax.default, write.call(_aten.stack.default, self._undealt), [0])
            both = write.call(_aten.cat.default, [most, undealt])
        self._step.output.replace_input_with(most, both)

    def _sort(self) -> None:
        """Put each node after what it reads, where rows are dealt later than they end."""
        order = dict[fx.Node, None]()

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source not in order:
                    visit(source)
            order.setdefault(node)

        for node in self._graph.nodes:
            visit(node)
        for node in order:
            if node is not self._step.output:
                self._step.output.prepend(node)


def _renew(node: fx.Node) -> None:
    """Give a call the fake value of its arguments."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    set_value(node, node.target(*args, **kwargs))  # type: ignore[operator]  # an operator


def _read_instead(node: fx.Node, other: fx.Node, readers: Iterable[Any]) -> None:
    for reader in readers:
        reader.replace_input_with(node, other)
