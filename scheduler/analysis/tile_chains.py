"""Find chains of operators with inner values much larger than what enters and leaves, and with independent rows.

    up = addmm(b1, x, w1)                   # [tokens, 4 dim]
    h = gelu(up)
    y = addmm(b2, h, w2)                    # [tokens, dim]
    ...
    gh = mm(gy, w2);  gup = gelu_backward(gh, up);  gx = mm(gup, w1)
    gw2 = mm(t(gy), h);  gw1 = mm(t(gup), x)

A chain begins at a matrix product that gives at least twice what it reads, and has all that reads or makes a value of
about that size, in forward and in backward: in between nothing else needs such a value whole. Chains are found by data
flow and shapes: the first part of an MLP, gated or not, with its activation and down-projection; the projection to
queries, keys and values with its attention; the logits of attention that is not fused. ``passes/lib/tile_chain.py``
runs them a few rows at a time.

Not found: chains with random operators (dropout), and those that leave their layer.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from zerofx.ir.aliasing import mutated_inputs, storage_bytes, storage_source, tensors_of
from zerofx.ir.facts import Phase, Role, is_random, origin, slice_of, tensor, value
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators import row_rules
from zerofx.ir.operators.operator import Given, OperatorKind
from zerofx.ir.operators.rows import OWN, Kind, RowKinds, Rows, group_rows
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.analysis.loss_heads import MIN_ROWS
from zerofx.torch_private.operators import OpOverload

_TOWERS = 2  # how many times as large as what it reads a value must be
_MAX_ASKED = 4  # values of which a node's rule is asked whether they are split or whole


@dataclass(frozen=True)
class ChainHalf:
    """The forward or the backward nodes of a chain, in order.

    ``again`` are forward nodes that backward's part computes again, a tile at a time.
    """

    nodes: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...] = ()

    def outputs(self, chain: Chain) -> list[fx.Node]:
        """The values that something outside the chain reads."""
        return [
            node
            for node in self.nodes
            if isinstance(value(node), torch.Tensor) and any(user not in chain.members for user in node.users)
        ]


@dataclass(frozen=True, eq=False)
class Chain:
    """Operators that can be run ``num_rows`` rows in any tiles.

    ``product`` makes the first of the large values, ``num_bytes`` large. ``given`` and ``found`` have where the rows
    lie in what each node reads and gives.
    """

    product: fx.Node
    num_rows: int
    num_bytes: int
    forward: ChainHalf
    backward: ChainHalf
    given: Mapping[fx.Node, Given] = field(repr=False)
    rows: Mapping[fx.Node, RowKinds] = field(repr=False)

    @property
    def members(self) -> frozenset[fx.Node]:
        return frozenset((*self.forward.nodes, *self.backward.nodes))

    @property
    def parts(self) -> tuple[ChainHalf, ...]:
        """Those that are not empty."""
        return tuple(part for part in (self.forward, self.backward) if part.nodes)

    @property
    def is_current(self) -> bool:
        """True if the chain's nodes still have the inputs that they had when it was found."""
        nodes = (*self.forward.nodes, *self.backward.nodes)
        return all(source in self.given[node] for node in nodes for source in node.all_input_nodes)

    def most_tiles(self) -> int:
        """The largest number of tiles that leaves enough rows to matrix products."""
        rows, shape = self.rows[self.product], tensor(self.product).shape
        assert isinstance(rows, Rows)
        each = rows.each * (int(shape[1]) if len(shape) > 2 else 1)
        return min(self.num_rows, max(1, self.num_rows * each // MIN_ROWS))


def find_chains(step: StepGraph) -> list[Chain]:
    """All chains of ``step``, in order; no two have a node in common."""
    finder = _Finder(step)
    chains: list[Chain] = []
    taken: set[fx.Node] = set()
    for product in [n for n in step.calls() if facts_of(n.target).kind is OperatorKind.PRODUCT]:
        if origin(product).phase is not Phase.FORWARD or product in taken or not finder.towers(product):
            continue
        for num_rows in _row_counts(product):
            chain = finder.chain(product, num_rows)
            if chain is not None and not taken & chain.members:
                chains.append(chain)
                taken |= chain.members
                break
    return chains


def _row_counts(product: fx.Node) -> Iterator[int]:
    """Candidates for the number of rows, largest first, from the shapes of the product and of its views."""
    counts: set[int] = set()
    pending = [product]
    while pending:
        node = pending.pop()
        shape = tuple(tensor(node).shape)
        counts.update(prod(shape[:end]) for end in range(1, len(shape)))
        pending += [u for u in node.users if facts_of(u.target).kind is OperatorKind.RESHAPE]
    whole = int(tensor(product).shape[0])
    yield from sorted((n for n in counts if 2 <= n <= whole and whole % n == 0), reverse=True)


class _Finder:
    """Grows chains; remembers where rows lie, by their number, in each layer."""

    def __init__(self, step: StepGraph) -> None:
        self._step = step
        self._units: dict[str, list[fx.Node]] = {}
        self._weights = set(step.placeholders(Role.PARAMETER))
        for node in step.calls():
            self._units.setdefault(step.unit_of(node), []).append(node)
            sources = node.all_input_nodes
            if sources and all(source in self._weights for source in sources):
                self._weights.add(node)
        self._order = step.positions()
        self._labels: dict[tuple[str, int], _Labels] = {}

    def towers(self, product: fx.Node) -> bool:
        read = [_bytes(source) for source in product.all_input_nodes if source not in self._weights]
        return bool(read) and _bytes(product) >= _TOWERS * max(read)

    def chain(self, product: fx.Node, num_rows: int) -> Chain | None:
        """The chain that begins at ``product``, or None where something in it needs all rows at once."""
        unit = self._step.unit_of(product)
        labels = self._labels.get((unit, num_rows))
        if labels is None:
            labels = self._labels[unit, num_rows] = _Labels(self._units[unit], self._weights, num_rows)
        members = _grow(product, labels)
        if members is None:
            return None
        ordered = sorted(members, key=self._order.__getitem__)
        forward = ChainHalf(tuple(n for n in ordered if origin(n).phase is Phase.FORWARD))
        backward = [n for n in ordered if origin(n).phase is Phase.BACKWARD]
        again = _needs(backward, set(forward.nodes))
        chain = Chain(
            product, num_rows, _bytes(product), forward,
            ChainHalf(tuple(backward), tuple(n for n in forward.nodes if n in again)), labels.given, labels.rows,
        )  # fmt: skip
        return chain if self._can_stand_together(chain) and _is_worth_it(chain) else None

    def _can_stand_together(self, chain: Chain) -> bool:
        """True if each part can run in one place: none of its inputs depends on its results."""
        for part in chain.parts:
            dependent: set[fx.Node] = set()
            node, last, members = part.nodes[0], part.nodes[-1], set(part.nodes)
            if self._step.unit_of(node) != self._step.unit_of(last):
                return False
            while node is not last.next:
                reads_dependent = any(source in dependent for source in node.all_input_nodes)
                if node in members and reads_dependent:
                    return False
                if node not in members and (reads_dependent or any(s in members for s in node.all_input_nodes)):
                    dependent.add(node)
                node = node.next
        return True


class _Labels:
    """Rows of the values of one layer."""

    def __init__(self, nodes: list[fx.Node], weights: set[fx.Node], num_rows: int) -> None:
        self._weights, self._num_rows = weights, num_rows
        self.given: dict[fx.Node, Given] = {}
        self.rows: dict[fx.Node, RowKinds] = {}
        for node in nodes:
            if node not in weights:
                self._label(node)

    def kind(self, node: fx.Node) -> Kind:
        """Of a value that a rule has found, or that enters the layer."""
        if node in self.rows:
            rows = self.rows[node]
            return None if isinstance(rows, tuple) else rows
        fake = value(node)
        if node in self._weights or not isinstance(fake, torch.Tensor):
            return None
        return group_rows(tuple(fake.shape), 0, self._num_rows)

    def _label(self, node: fx.Node) -> None:
        if slice_of(node) is not None:
            return  # its weight would have to be there for all tiles
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            rows = self.rows.get(source)
            if isinstance(rows, tuple) and isinstance(index, int):
                kind = self.rows[node] = rows[index]
                self.given[node] = {source: kind if isinstance(kind, Rows) else None}
            return
        sources = node.all_input_nodes
        if not sources or any(not isinstance(value(source), torch.Tensor) for source in sources):
            return
        kinds = [self.kind(source) for source in sources]
        # A value may look as if it had rows, and be the same for all of them: a mask, a table.
        options: list[tuple[Rows | None, ...]] = [(kind, None) if isinstance(kind, Rows) else (None,) for kind in kinds]
        if sum(len(option) for option in options) > len(options) + _MAX_ASKED:
            options = [option[:1] for option in options]
        for kinds_given in sorted(itertools.product(*options), key=lambda choice: sum(kind is None for kind in choice)):
            given = dict(zip(sources, kinds_given, strict=True))
            rows = rows_of_result(node, given)
            if rows is not None:
                self.given[node], self.rows[node] = given, rows
                return


def rows_of_result(node: fx.Node, given: Given) -> RowKinds:
    """Rows of each output of ``node``, by its operator's rule; None where it needs all rows at once.

    ``given`` has the rows of what it reads; None is for what every tile reads whole.
    """
    if not isinstance(node.target, OpOverload) or is_random(node) or mutated_inputs(node) or not any(given.values()):
        return None
    facts = facts_of(node.target)
    rule = facts.rows or (row_rules.elementwise if facts.is_pointwise else None)
    return None if rule is None else rule(node, given)


def _grow(product: fx.Node, labels: _Labels) -> set[fx.Node] | None:
    """All that reads or makes a value about as large as the product's, or None where one of these needs all rows."""
    least = _bytes(product) / 2
    unit_nodes = labels.rows
    members: set[fx.Node] = set()
    pending = [product]
    while pending:
        node = pending.pop()
        if node in members:
            continue
        if node.op != "call_function" or node not in unit_nodes:
            return None
        members.add(node)
        if node.target is operator.getitem:
            pending += node.all_input_nodes
        is_tuple = isinstance(value(node), list | tuple)
        if is_tuple or (isinstance(unit_nodes[node], Rows) and _bytes(node) >= least):
            pending += node.users
        else:
            pending += [user for user in node.users if _makes_large(user, labels, least)]
        for source, rows in labels.given[node].items():
            if rows is None and source in members and OWN not in (labels.rows[node], labels.rows[source]):
                return None
            if isinstance(value(source), torch.Tensor) and rows is not None and _bytes(source) >= least:
                pending.append(source)
    # What one member reads whole, no other may give in tiles.
    if any(
        rows is None and s in members and labels.rows[s] is not OWN
        for n in members
        for s, rows in labels.given[n].items()
        if isinstance(value(s), torch.Tensor)
    ):
        return None
    return members


def _makes_large(node: fx.Node, labels: _Labels, least: float) -> bool:
    return isinstance(labels.rows.get(node), Rows) and isinstance(value(node), torch.Tensor) and _bytes(node) >= least


def _needs(nodes: list[fx.Node], available: set[fx.Node]) -> set[fx.Node]:
    """The nodes of ``available`` that ``nodes`` depend on."""
    needed: set[fx.Node] = set()
    pending = [source for node in nodes for source in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in available and node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def _is_worth_it(chain: Chain) -> bool:
    """True if tiles can be cut from the inputs and joined to outputs of at most half the chain's bytes."""
    for part in chain.parts:
        inside = {*part.nodes, *part.again}
        entering = {
            (source, rows)
            for node in inside
            for source, rows in chain.given[node].items()
            if rows is not None and source not in inside
        }
        if any(not is_mergeable(tensor(source), rows) for source, rows in entering):
            return False
        if any(chain.rows[output] is OWN for output in part.outputs(chain)):
            return False  # there is one for each tile, and outside one is wanted for all
        joined = {output: rows for output in part.outputs(chain) if isinstance(rows := chain.rows[output], Rows)}
        if not all(is_restorable(tensor(output), rows) for output, rows in joined.items()):
            return False
        if sum(_bytes(output) for output in joined) > chain.num_bytes / 2:
            return False
    return True


def is_mergeable(fake: torch.Tensor, rows: Rows) -> bool:
    """True if a view can merge the dimensions of the rows."""
    strides, shape = fake.stride(), fake.shape
    dims = [d for d in rows.dims if shape[d] != 1]
    return all(strides[a] == strides[b] * shape[b] for a, b in itertools.pairwise(dims))


def is_restorable(fake: torch.Tensor, rows: Rows) -> bool:
    """True if a value joined from tiles can have the strides of ``fake``."""
    if fake.is_contiguous():
        return True
    return rows.span == 1 and fake.permute(stride_order(fake)).is_contiguous()


def stride_order(fake: torch.Tensor) -> list[int]:
    """The dimensions of a value in the order of memory, the outermost first."""
    strides = fake.stride()
    return sorted(range(fake.dim()), key=lambda d: (-strides[d], d))


def _bytes(node: fx.Node) -> int:
    """Bytes of the storage that a value lives in."""
    owner, index = storage_source(node)
    tensors = tensors_of(owner)
    if isinstance(value(owner), torch.Tensor):
        return storage_bytes(tensors[0])
    outputs = value(owner)
    return storage_bytes(outputs[index])
