"""Check that one rank's graph computes, on all ranks together, what the whole graph does: a type for every value.

Every value of a rank's graph lies somehow on the axis: whole, and alike on all ranks (R); a part of a dimension (S); a
tensor of the value's shape, of which the ranks' sum, or largest or smallest elements, are the value (P). How, follows
here from the placeholders on, operator by operator (``zerofx/ir/sharding/placed_calls.py``), without a look at what was
decided:

    y: S1 = mm(x: R, w: S1)        z: P = mm(y: S1, v: S0)        add(z: P, bias: R)        # adds as many as ranks

Where a shape allows several ways, all of them are followed. What has the name of a node of the whole graph has that
one's shape on all ranks together, which leaves few. In the end losses and all else that a step gives are whole, the
gradient of a parameter in parts lies as it does, and that of a whole parameter adds up: its bucket is summed.

It finds what is added on every rank before a sum is taken, sums that are not taken or taken twice, means over this
rank's elements, draws that are alike on parts and unlike on what is whole, and numbers in a call that are other than
the whole graph's.

Does not see: in which order the parts of a gathered value are put together, and what is attended to a run of tokens at
a time (``zerofx/ir/sharding/tokens.py``), whose parts are no part of any value. Of what it knows nothing it says
nothing, but for ``unknown``, where it is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor, fx

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.table import facts_of
from zerofx.ir.sharding.attention import is_attention
from zerofx.ir.sharding.placed_calls import kinds_of_call
from zerofx.ir.sharding.placed_moves import Kind, Kinds, Own, chunk_placements
from zerofx.ir.sharding.placed_numbers import RECEIVED, SENT
from zerofx.ir.sharding.rule import read_tensors, results_of
from zerofx.ir.text import node_text
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Partial, Ragged, Sharded, local_shape
from zerofx.torch_private.operators import pytree

_NEIGHBOURS = 6


@dataclass(frozen=True)
class WholeCall:
    """A node of the whole graph: what it calls, the shapes of its results, and the numbers among its arguments."""

    target: object
    shapes: tuple[tuple[int, ...] | None, ...]
    numbers: tuple[float, ...]


def whole_calls(step: StepGraph) -> Mapping[str, WholeCall]:
    """The nodes of a graph of whole values, by name: what ``check_placements`` is to compare with."""
    return {node.name: _describe(node) for node in step.graph.nodes if node.op != "output"}


def check_placements(step: StepGraph, whole: Mapping[str, WholeCall], num_ranks: int) -> list[fx.Node]:
    """Check the graph of one of ``num_ranks`` ranks; returns the nodes of which nothing is known.

    Raises:
        InvalidGraphError: a value can lie in no way; shows it, what it reads, and how that lies.
    """
    check = _Check(step, whole, num_ranks)
    check.run()
    return check.unknown


@dataclass
class _Check:
    step: StepGraph
    whole: Mapping[str, WholeCall]
    num_ranks: int
    unknown: list[fx.Node] = field(default_factory=list)
    values: dict[fx.Node, tuple[Kinds, ...] | None] = field(default_factory=dict)
    known: dict[Any, Any] = field(default_factory=dict)

    def run(self) -> None:
        parts = {info.name: info.part for info in self.step.parameters}
        for node in self.step.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = (frozenset({_input_kind(node, parts)}),)
            elif node.op == "call_function":
                self._check_numbers(node)
                self.values[node] = self._select(node, self._call(node))
        self._check_results(parts)

    def _call(self, node: fx.Node) -> tuple[Kinds, ...] | None:
        if node.target is operator.getitem:
            source, index = node.args
            given = self.values[source]  # type: ignore[index]  # a node
            return None if given is None else (given[index],)  # type: ignore[index]  # an int
        read = [self.values[source] for source in read_tensors(node)]
        if any(kinds is None for kinds in read):
            return None
        kinds = [kinds[0] for kinds in read if kinds is not None]
        # Several calls together attend from a rank's tokens to all others.
        attends_to_some = node.name not in self.whole and is_attention(node.target)
        if node.target is ops.shift_values or attends_to_some:
            self.unknown.append(node)
            return None
        if node.target in ops.VALUE_COLLECTIVES:
            return (self._collective(node, kinds[0]),)
        if node.target is ops.wait:
            return (kinds[0],)
        possible = kinds_of_call(node, kinds, self.num_ranks, self.known)
        if possible is None:
            self.unknown.append(node)
        elif any(not kinds for kinds, result in zip(possible, results_of(node), strict=True) if result is not None):
            self._fail(node, "no way in which its result could lie follows from what it reads")
        return possible

    def _collective(self, node: fx.Node, kinds: Kinds) -> Kinds:
        """Kinds of a collective's result."""
        if node.target is ops.gather_values:
            return self._if(node, kinds, Sharded, frozenset({REPLICATED}), "parts")
        if node.target is ops.all_reduce_values:
            asked = Partial(node.args[1])  # type: ignore[arg-type]  # as the operator takes it
            return self._if(node, kinds, asked, frozenset({REPLICATED}), f"terms ({asked})")
        parts = node.args[0]
        assert isinstance(parts, fx.Node)
        if (own := next(iter(kinds), None)) and isinstance(own, Own) and own.what.startswith(SENT):
            return frozenset({Own(RECEIVED + own.what.removeprefix(SENT))})
        received = chunk_placements(parts, self.num_ranks)
        if node.target is ops.reduce_scatter_values:
            return self._if(node, kinds, SUM, received, f"terms ({SUM})")
        from_each = frozenset(Sharded(k.dim + 1, k.groups) for k in received if isinstance(k, Sharded))
        return self._if(node, kinds, Sharded, from_each, "parts")

    def _if(self, node: fx.Node, kinds: Kinds, asked: Kind | type[Sharded], possible: Kinds, what: str) -> Kinds:
        fits = any(isinstance(k, asked) if isinstance(asked, type) else k == asked for k in kinds)
        if not fits:
            self._fail(node, f"a collective of {what} is given none")
        return possible

    def _select(self, node: fx.Node, possible: tuple[Kinds, ...] | None) -> tuple[Kinds, ...] | None:
        """Those kinds of results that give the whole graph's shapes."""
        whole = self.whole.get(node.name)
        if whole is None or possible is None:
            return possible
        left = []
        for kinds, result, shape in zip(possible, results_of(node), whole.shapes, strict=True):
            fitting = kinds
            if result is not None and shape is not None:
                fitting = frozenset(k for k in kinds if self._fits(k, tuple(result.shape), shape))
                if not fitting:
                    said = ", ".join(map(str, sorted(kinds, key=str)))
                    self._fail(node, f"as {said} it would not be {list(shape)} on all ranks together")
            left.append(fitting)
        return tuple(left)

    def _fits(self, kind: Kind, local: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        if isinstance(kind, Own):
            return False
        if isinstance(kind, Sharded):
            return len(local) == len(whole) and local_shape(whole, kind, self.num_ranks) == local != whole
        if isinstance(kind, Ragged):  # with room for all rows, or for some
            rows = local[kind.dim]
            return rows <= whole[kind.dim] and (*whole[: kind.dim], rows, *whole[kind.dim + 1 :]) == local
        return local == whole

    def _check_numbers(self, node: fx.Node) -> None:
        whole = self.whole.get(node.name)
        if whole is None or whole.target is not node.target or not facts_of(node.target).is_pointwise:
            return
        if (own := _describe(node).numbers) != whole.numbers:
            self._fail(node, f"numbers among its arguments are {own}, and {whole.numbers} in the whole graph")

    def _check_results(self, parts: Mapping[str, Sharded | None]) -> None:
        outputs = self.step.output.args[0]
        assert isinstance(outputs, tuple)
        names = self.step.gradient_names
        num_values = len(outputs) - len(names)
        for number, node in enumerate(outputs):
            if not isinstance(node, fx.Node) or self.values[node] is None:
                continue
            (kinds,) = self.values[node] or ()
            part = None if number < num_values else parts[names[number - num_values]]
            asked: Kind = REPLICATED if number < num_values else SUM if part is None else part
            if asked not in kinds:
                what = "what a step gives" if number < num_values else f"the gradient of {names[number - num_values]}"
                self._fail(node, f"{what} is to lie as {asked}")

    def _fail(self, node: fx.Node, what: str) -> NoReturn:
        nodes = list(self.step.graph.nodes)
        at = nodes.index(node)
        around = [*node.all_input_nodes, *(n for n in nodes[max(0, at - _NEIGHBOURS) : at] if n not in node.args), node]
        lines = [f"{'>' if n is node else ' '} {node_text(n)}  # {self._text(n)}" for n in dict.fromkeys(around)]
        raise InvalidGraphError(f"placements: {node.name}: {what}\n" + "\n".join(lines))

    def _text(self, node: fx.Node) -> str:
        kinds: Sequence[Kinds] | None = self.values.get(node)
        return "?" if kinds is None else "; ".join(" or ".join(map(str, sorted(each, key=str))) for each in kinds)


def _input_kind(node: fx.Node, parts: Mapping[str, Sharded | None]) -> Kind:
    facts = placeholder(node)
    if facts.role in (Role.RANK, Role.HOST_RANK):
        return Own("number")
    part = parts.get(facts.name) if facts.role is Role.PARAMETER else None
    return REPLICATED if part is None else part


def _describe(node: fx.Node) -> WholeCall:
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    numbers = tuple(leaf for leaf in arguments if isinstance(leaf, int | float) and not isinstance(leaf, bool))
    shapes = tuple(tuple(t.shape) if isinstance(t, Tensor) else None for t in results_of(node))
    return WholeCall(node.target, shapes, numbers)
