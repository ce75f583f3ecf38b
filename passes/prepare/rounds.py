"""Send rows of experts in several rounds, each within the room that a rank has for one.

    routes = row_routes(tokens, ends, ...)         rounds = row_rounds(tokens, ends, ...)
    x = land_rows(all_to_all(pack_rows(...)))      routes_0 = round_routes(..., rounds, 0); x_0 = land_rows(...)
    h = grouped_mm(x, w, own_ends(ends))           h_0 = grouped_mm(x_0, w, own_ends(round_ends(ends, rounds, 0)))
    y = land_rows(all_to_all(pack_rows(h)))        y_0 = land_more(zeros, all_to_all(pack_rows(h_0)))
                                                   ...                       # x_1, h_1
                                                   y = land_more(y_0, all_to_all(pack_rows(h_1)))

Between the exchange that brings rows to their experts and the one that takes them home stands one round after another.
At home there is a place for each of a rank's rows, whatever the routing: what rows are summed to is so once all are
there, in the order that they have in one round. Backward has rounds of its own, in which it computes again what forward
has of their rows, so that no such value is held between the two:

    gw = grouped_mm(t(gh), x)                      x_0 = ...; h_0 = ...; gw_0 = grouped_mm(t(gh_0), x_0)
                                                   x_1 = ...; h_1 = ...; gw = add(gw_0, grouped_mm(t(gh_1), x_1))

A group's rows are all in one round if they fit, and the sums over them are then those of one round, and zeros.

Does not handle: draws between the exchanges, and sums over rows that are not products of groups. A group with more rows
of one rank than there is room for is summed round by round, each sum rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.edit import erase_unread, insert_call
from zerofx.ir.facts import Phase, is_random, origin, piece_of, set_piece, tensor, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.op_kernels.own_rows import add_group_rows, group_rows, own_ends, own_rows, whole_rows
from zerofx.ir.op_kernels.row_rounds import (
    add_home_rows,
    land_more,
    round_ends,
    round_own_rows,
    round_routes,
    round_shares,
    round_whole_rows,
    row_rounds,
)
from zerofx.ir.op_kernels.row_routes import add_rows, group_shares, land_rows, pack_rows, row_shares
from zerofx.ir.sharding.grouped import GROUPED
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.torch_private.operators import OpOverload, base_name

_aten = torch.ops.aten
_OF_ROUND = {own_rows: round_own_rows, whole_rows: round_whole_rows}
_SUMS = (whole_rows, add_group_rows)
_Key = tuple[fx.Node, Phase]


@dataclass(frozen=True)
class Rounds:
    """Send rows of experts in several rounds."""

    shardings: tuple[ShardingDecision, ...]
    name: str = "rounds"

    def run(self, step: StepGraph) -> None:
        num_rounds = max((decision.num_rounds for decision in self.shardings), default=1)
        if num_rounds > 1:
            _Rounds(step, {decision.node: decision for decision in self.shardings}, num_rounds).run()


@dataclass(frozen=True)
class _Route:
    """An exchange of rows, from the call that says where they go to the one that puts them there."""

    land: fx.Node
    wait: fx.Node
    exchange: fx.Node
    pack: fx.Node
    routes: fx.Node

    @property
    def is_outward(self) -> bool:
        return bool(self.routes.args[8])

    @property
    def ends(self) -> fx.Node:
        return self.routes.args[1]  # type: ignore[return-value]  # a node

    @property
    def rows(self) -> fx.Node:
        return self.pack.args[0]  # type: ignore[return-value]  # a node


def _route_of(node: fx.Node) -> _Route | None:
    if node.target not in (land_rows, add_rows):
        return None
    wait: Any = node.args[0]
    exchange = wait.args[0]
    pack = exchange.args[0]
    return _Route(node, wait, exchange, pack, pack.args[1].args[0])


@dataclass(eq=False)
class _Group:
    """Calls on rows that end at ``ends`` in one phase: ``nodes`` in order, the last call of each exchange for
    it, and ``results``, sums over rows. ``members`` are all, with the other calls of exchanges."""

    ends: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    results: set[fx.Node] = field(default_factory=set)
    members: list[fx.Node] = field(default_factory=list)


class _Rounds:
    def __init__(self, step: StepGraph, decided: Mapping[str, ShardingDecision], num_rounds: int) -> None:
        self._step, self._graph, self._decided, self._num_rounds = step, step.graph, decided, num_rounds
        self._rounds: dict[fx.Node, fx.Node] = {}  # of rows, by where they end
        self._counts: dict[fx.Node, fx.Node] = {}  # likewise, one of several
        self._rows: dict[fx.Node, fx.Node] = {}  # values of rows, with where these end
        self._groups: dict[_Key, _Group] = {}
        self._routes: dict[fx.Node, _Route] = {}

    def run(self) -> None:
        for node in list(self._step.calls()):
            self._find(node)
        for node in [node for node in self._step.calls() if node.target is row_shares]:
            self._count(node)
        for node in self._step.calls():
            if node.target is group_shares:  # no more are a rank's than all have for it
                node.replace_all_uses_with(self._counts[node.args[0]])  # type: ignore[index]  # a node
        self._sort()
        for (_, phase), group in self._groups.items():
            self._write(group, phase)
        erase_unread(self._graph)

    def _find(self, node: fx.Node) -> None:
        """Put a call into the group of the rows that it is about, if it is."""
        route = _route_of(node)
        read = next((source for source in node.all_input_nodes if source in self._rows), None)
        if route is not None:
            self._routes[node] = route
            if route.is_outward:
                self._rows[node] = route.ends
            self._group(route.ends, node).nodes.append(node)
            return
        if node.target in (own_rows, group_rows):
            ends = _node(node.args[1])
            self._rows[node] = ends = ends if node.target is own_rows else _node(ends.args[0])
            self._group(ends, node).nodes.append(node)
            return
        if read is None or node.target is pack_rows:
            return
        ends = self._rows[read]
        if is_random(node):
            raise PlanError(f"{node.name} draws numbers for rows of experts: they cannot be sent in rounds")
        if not self._is_of_rows(node):
            if not self._is_sum(node):
                raise PlanError(f"{node.name} is none of the sums over rows that rounds add up")
            self._group(ends, node).results.add(node)
        else:
            self._rows[node] = ends
        self._group(ends, node).nodes.append(node)

    def _is_of_rows(self, node: fx.Node) -> bool:
        if node.target in _SUMS:
            return False
        call, index = (_node(node.args[0]), node.args[1]) if node.target is operator.getitem else (node, None)
        decision = self._decided.get(call.name)
        if decision is None:
            return True
        outputs = [decision.outputs[index]] if isinstance(index, int) else decision.outputs
        return any("[" in (text or "") for text in outputs)

    def _is_sum(self, node: fx.Node) -> bool:
        call: Any = node.args[0] if node.target is operator.getitem else node
        is_product = isinstance(call.target, OpOverload) and base_name(call.target) in GROUPED
        return is_product or node.target in _SUMS

    def _group(self, ends: fx.Node, node: fx.Node) -> _Group:
        return self._groups.setdefault((ends, origin(node).phase), _Group(ends))

    def _count(self, node: fx.Node) -> None:
        """Count the rows of each round in the place of all at once."""
        places, ends, num_ranks, capacity, num_tokens, num_rows, by_group = node.args
        assert isinstance(places, fx.Node) and isinstance(ends, fx.Node)
        how = (num_ranks, capacity, num_tokens, num_rows, self._num_rounds, by_group)
        with self._graph.inserting_before(node):
            if ends not in self._rounds:
                args = (places, ends, *how)
                call = insert_call(self._graph, row_rounds, args, origin(node), dict(node.kwargs))
                self._rounds[ends] = _keep_piece(call, node)
            counted = (places, ends, self._rounds[ends], *how)
            call = insert_call(self._graph, round_shares, counted, origin(node), dict(node.kwargs))
            self._counts[ends] = _keep_piece(call, node)
        node.replace_all_uses_with(self._counts[ends])

    def _sort(self) -> None:
        """Put the nodes of each group together, where the first stands or all is there that they read."""
        group_of = {node: group for group in self._groups.values() for node in group.nodes}
        for group in self._groups.values():
            for node in group.nodes:
                if (route := self._routes.get(node)) is not None:
                    group_of |= dict.fromkeys((route.wait, route.exchange, route.pack), group)
        for node in self._graph.nodes:
            if node in group_of:
                group_of[node].members.append(node)
        order, begun = dict[fx.Node, None](), list[_Group]()

        def visit(node: fx.Node) -> None:
            if node in order:
                return
            group = group_of.get(node)
            if group is None:
                for source in node.all_input_nodes:
                    visit(source)
                order.setdefault(node)
                return
            if group in begun:
                raise PlanError(f"{node.name} is computed of what rows of experts give: they cannot be sent in rounds")
            begun.append(group)
            for member in group.members:
                for source in member.all_input_nodes:
                    if group_of.get(source) is not group:
                        visit(source)
            order.update(dict.fromkeys(group.members))

        for node in self._graph.nodes:
            visit(node)
        output = self._step.output
        for node in order:
            if node is not output:
                output.prepend(node)

    def _write(self, group: _Group, phase: Phase) -> None:
        """Write the rounds of a group in front of it, and have their results read instead."""
        at_home, sums = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
        with self._graph.inserting_before(group.members[0]):
            for number in range(self._num_rounds):
                _Round(self, group, phase, number, at_home, sums).run()
            for node, rows in at_home.items():
                sums[node] = self._finish(node, rows)
        for node, total in sums.items():
            node.replace_all_uses_with(total)

    def _finish(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """The result of an exchange home, of the rows that have come."""
        if node.target is land_rows:
            return rows
        places, _, rank, num_ranks, _, num_tokens, *_ = self._routes[node].routes.args
        args = (rows, places, rank, num_ranks, num_tokens)
        return _keep_piece(insert_call(self._graph, add_home_rows, args, origin(node)), node)


@dataclass
class _Round:
    """Writer of one round of a group. ``at_home`` are rows that have come home, and ``sums`` results, so far."""

    all: _Rounds
    group: _Group
    phase: Phase
    number: int
    at_home: dict[fx.Node, fx.Node]
    sums: dict[fx.Node, fx.Node]
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        for node in self.group.nodes:
            route = self.all._routes.get(node)
            if route is not None and not route.is_outward:
                self._send_home(route)
            elif node in self.group.results:
                self._add(node, self._value(node))
            else:
                self._value(node)

    def _add(self, node: fx.Node, term: fx.Node) -> None:
        total = self.sums.get(node)
        self.sums[node] = term if total is None else self._call(node, _aten.add.Tensor, total, term)

    def _value(self, node: fx.Node) -> fx.Node:
        """The round's value for one of rows, or of where they end; computed again in backward where forward has it."""
        if node not in self.values:
            route = self.all._routes.get(node)
            if route is not None and node in self.all._rows:
                _, land, received = self._exchange(route, route.rows)
                self.values[node] = self._call(node, land_rows, received, land)
            elif node.target in _OF_ROUND:
                rows, ends, *how = node.args
                args = (self._value(_node(rows)), ends, self.all._rounds[self.group.ends], *how, self.number)
                self.values[node] = self._call(node, _OF_ROUND[node.target], *args)
            elif node in self.all._rows or node in self.group.results:
                self.values[node] = self._copy(node)
            elif node.target is own_ends and node.args[0] is self.group.ends:
                args = (self.group.ends, self.all._rounds[self.group.ends], self.number)
                ends = self.values.get(self.group.ends) or self._call(node, round_ends, *args)
                self.values[self.group.ends] = ends
                self.values[node] = self._call(node, own_ends, ends, *node.args[1:])
            else:
                return node
        return self.values[node]

    def _exchange(self, route: _Route, rows: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        places, ends, rank, num_ranks, capacity, num_tokens, num_rows, by_group, outward = route.routes.args
        if not outward:
            num_rows = tensor(places).shape[0] // num_ranks  # type: ignore[arg-type,operator]  # a node, and a number
        rounds = self.all._rounds[route.ends]
        how = (num_ranks, capacity, num_tokens, num_rows, by_group, outward, self.number)
        routes = self._call(route.land, round_routes, places, ends, rounds, rank, *how, **route.routes.kwargs)
        send, land = (self._call(route.land, operator.getitem, routes, which) for which in range(2))
        packed = self._call(route.land, pack_rows, rows, send, num_ranks)
        sent = self._call(route.land, route.exchange.target, packed, num_ranks, **route.exchange.kwargs)
        return send, land, self._call(route.land, route.wait.target, sent, packed)

    def _send_home(self, route: _Route) -> None:
        _, land, received = self._exchange(route, self._value(route.rows))
        at_home = self.at_home.get(route.land)
        if at_home is None:
            shape = [*tensor(land).shape, *tensor(received).shape[2:]]
            at_home = self._call(route.land, _aten.new_zeros.default, received, shape)
        self.at_home[route.land] = self._call(route.land, land_more, at_home, received, land)

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
        copy = self._call(node, node.target, *args, **kwargs)
        assert value(copy) is not None
        return copy

    def _call(self, of: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        where = replace(origin(of), phase=self.phase)
        return _keep_piece(insert_call(self.all._graph, target, args, where, kwargs), of)


def _node(argument: object) -> fx.Node:
    assert isinstance(argument, fx.Node)
    return argument


def _keep_piece(call: fx.Node, node: fx.Node) -> fx.Node:
    """``call``, of the piece that ``node`` is of."""
    piece = piece_of(node)
    return call if piece is None else set_piece(call, piece)
