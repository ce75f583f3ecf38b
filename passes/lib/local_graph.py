"""One rank's graph, as it is written: calls of local sizes, and conversions of a value from one placement to another.

R -> S     index_select of this rank's part, by its number on the axis
S -> R     gather_values, wait, and the ranks' parts put in their places
S -> S     exchange_values: an all-to-all
P -> R     all_reduce_values
P -> S     reduce_scatter_values
R -> P     the value on rank 0, zeros on the others
R -> S[]   own_rows: this rank's rows first
S[] -> P   whole_rows: in their places, zeros elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.edit import insert_call, skip_getitems
from zerofx.ir.facts import Origin, is_random, known_origin, piece_of, set_piece, tensor
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.op_kernels.own_rows import own_rows, whole_rows
from zerofx.ir.op_kernels.row_routes import group_shares, row_shares, unlike_shares
from zerofx.ir.sharding.rule import Rule
from zerofx.scheduler.plan.placements import (
    REPLICATED,
    SUM,
    Partial,
    Placement,
    Ragged,
    Replicated,
    Sharded,
    local_shape,
)
from zerofx.torch_private.operators import OpOverload, pytree

_aten = torch.ops.aten
AXIS = "model"
_COUNTS = {"rows": row_shares, "groups": group_shares, "unlike": unlike_shares}


@dataclass
class LocalGraph:
    """Writes calls at the end of ``graph``; ``rank`` is the placeholder of this rank's number, int64 of shape [1].

    ``host_rank`` is that of the number on the host, of shape [], where a step draws. ``where`` is the origin of what is
    written, ``piece`` its piece. ``values`` gives, by its name in the whole graph, a value that all ranks have.
    ``counts`` are those of rows that are to find room.
    """

    graph: fx.Graph
    num_ranks: int
    rank: fx.Node
    host_rank: fx.Node | None
    where: Origin
    values: Callable[[str, LocalGraph], fx.Node] | None = None
    piece: str | None = None
    counts: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = insert_call(self.graph, target, args, self.where, kwargs)
        if self.piece is not None:
            set_piece(node, self.piece)
        return node

    def all_reduce(self, node: fx.Node, reduction: str = "sum") -> fx.Node:
        return self._collective(ops.all_reduce_values, self._dense(node), reduction)

    def exchange(self, parts: fx.Node) -> fx.Node:
        return self._collective(ops.exchange_values, self._dense(parts))

    def count_rows(self, what: str, args: tuple[Any, ...]) -> None:
        """Have rows counted where all that is read for it is there: what is read in forward is not computed again."""
        if (what, args) not in self.counts:
            last = max(arg for arg in args if isinstance(arg, fx.Node))
            where, piece = known_origin(last) or self.where, piece_of(last)
            with self.graph.inserting_before(skip_getitems(last).next):
                count = insert_call(self.graph, _COUNTS[what], args, where)
            self.counts[what, args] = count if piece is None else set_piece(count, piece)

    def start_shift(self, node: fx.Node) -> fx.Node:
        return self.call(ops.shift_values, self._dense(node), self.num_ranks, over=AXIS)

    def wait_shift(self, pending: fx.Node) -> fx.Node:
        sent = pending.args[0]
        return self.call(ops.wait, pending, sent)

    def convert(self, node: fx.Node, source: Placement, target: Placement, whole: tuple[int, ...] = ()) -> fx.Node:
        """Convert ``node`` from placement ``source`` to ``target``; ``whole``: the shape of a value of ragged rows."""
        if source == target:
            return node
        match source, target:
            case Replicated(), Sharded():
                return self._own_part(node, target)
            case Sharded(), Replicated():
                return self._gather(node, source)
            case Sharded(), Sharded():
                return self._exchange(node, source, target)
            case Partial(), Replicated():
                return self.all_reduce(node, source.reduction)
            case Partial("sum"), Sharded():
                return self._collective(ops.reduce_scatter_values, self._dense(self._ranks_first(node, target)))
            case Partial(), Sharded():
                return self._own_part(self.all_reduce(node, source.reduction), target)
            case Replicated(), Partial("sum"):
                return self._zero_elsewhere(node)
            case Replicated(), Partial():
                return node  # the largest, or smallest, of what is the same everywhere
            case Replicated(), Ragged():
                return self._own_rows(node, target)
            case Ragged(), Partial("sum"):
                return self._whole_rows(node, source, whole)
            case Ragged(), Replicated() | Sharded():
                terms = self._whole_rows(node, source, whole)
                if tensor(node).dtype is not torch.bool:
                    return self.convert(terms, SUM, target, whole)
                numbers = self.call(_aten._to_copy.default, terms, dtype=torch.uint8)  # truths do not add up
                total = self.convert(numbers, SUM, target, whole)
                return self.call(_aten._to_copy.default, total, dtype=torch.bool)
            case _, Partial() | Ragged():
                return self.convert(self.convert(node, source, REPLICATED, whole), REPLICATED, target, whole)
        raise AssertionError(f"{source} -> {target}: no such conversion")

    def reshape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """``node`` under another shape: a view, or of a copy if its strides allow none."""
        try:
            tensor(node).view(shape)
        except (RuntimeError, ValueError):  # torch's own word on strides
            node = self._dense(node)
        return self.call(_aten.view.default, node, shape)

    def match_format(self, node: fx.Node, whole: torch.Tensor) -> fx.Node:
        """``node``, or a copy of it, dense in the memory format of ``whole``."""
        formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        ranks = {torch.channels_last: 4, torch.channels_last_3d: 5}
        dense = (
            f for f in formats if ranks.get(f, whole.dim()) == whole.dim() and whole.is_contiguous(memory_format=f)
        )
        return self._dense(node, next(dense, torch.contiguous_format))

    def _dense(self, node: fx.Node, memory_format: torch.memory_format = torch.contiguous_format) -> fx.Node:
        if tensor(node).is_contiguous(memory_format=memory_format):
            return node
        return self.call(_aten.clone.default, node, memory_format=memory_format)

    def _split(self, node: fx.Node, placement: Sharded) -> fx.Node:
        """Dimension ``dim`` as groups, ranks, and what each rank has of each group."""
        shape = list(tensor(node).shape)
        size = shape[placement.dim] // (placement.groups * self.num_ranks)
        shape[placement.dim : placement.dim + 1] = [placement.groups, self.num_ranks, size]
        return self._ensure_shape(node, shape)

    def _ensure_shape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(tensor(node).shape) == shape:
            return node
        return self.reshape(node, shape)

    def _ranks_first(self, node: fx.Node, placement: Sharded) -> fx.Node:
        """With a first dimension of ranks: each one's part along ``placement``, of its local shape."""
        split, dim = self._split(node, placement), placement.dim
        rank = len(tensor(split).shape)
        order = [dim + 1, *(d for d in range(rank) if d != dim + 1)]
        front = self.call(_aten.permute.default, split, order) if dim or placement.groups > 1 else split
        shape = list(tensor(node).shape)
        shape[dim] //= self.num_ranks
        return self._ensure_shape(front, [self.num_ranks, *shape])

    def _from_ranks(self, parts: fx.Node, placement: Sharded) -> fx.Node:
        """Undo ``_ranks_first``."""
        shape, dim = list(tensor(parts).shape[1:]), placement.dim
        size = shape[dim] // placement.groups
        grouped = self._ensure_shape(parts, [self.num_ranks, *shape[:dim], placement.groups, size, *shape[dim + 1 :]])
        rank = len(shape) + 2
        order = [*range(1, dim + 2), 0, *range(dim + 2, rank)]
        joined = self.call(_aten.permute.default, grouped, order) if dim or placement.groups > 1 else grouped
        shape[dim] *= self.num_ranks
        return self._ensure_shape(joined, shape)

    def _own_part(self, node: fx.Node, placement: Sharded) -> fx.Node:
        picked = self.call(_aten.index_select.default, self._split(node, placement), placement.dim + 1, self.rank)
        shape = list(tensor(node).shape)
        shape[placement.dim] //= self.num_ranks
        return self._ensure_shape(picked, shape)

    def _gather(self, node: fx.Node, placement: Sharded) -> fx.Node:
        return self._from_ranks(self._collective(ops.gather_values, self._dense(node)), placement)

    def _exchange(self, node: fx.Node, source: Sharded, target: Sharded) -> fx.Node:
        if source.dim == target.dim:  # other groups: whole first, as parts of parts would have to be named
            return self._own_part(self._gather(node, source), target)
        parts = self._ranks_first(node, target)
        return self._from_ranks(self.exchange(parts), source)

    def _collective(self, target: OpOverload[..., Any], value: fx.Node, *more: Any) -> fx.Node:
        """The awaited result of a collective on a value, which is held until then, as the collective reads it."""
        return self.call(ops.wait, self.call(target, value, *more, self.num_ranks, over=AXIS), value)

    def _own_rows(self, node: fx.Node, target: Ragged) -> fx.Node:
        ends, shape = self.whole(target.ends), tuple(tensor(node).shape)
        num_rows = local_shape(shape, target, self.num_ranks)[target.dim]
        if target.capacity:
            self.count_rows("groups", (ends, self.num_ranks, num_rows, shape[target.dim]))
        return self.call(own_rows, node, ends, self.rank, self.num_ranks, target.dim, num_rows)

    def _whole_rows(self, node: fx.Node, source: Ragged, whole: tuple[int, ...]) -> fx.Node:
        ends, num_rows = self.whole(source.ends), whole[source.dim]
        return self.call(whole_rows, node, ends, self.rank, self.num_ranks, source.dim, num_rows)

    def whole(self, name: str) -> fx.Node:
        assert self.values is not None
        return self.values(name, self)

    def _zero_elsewhere(self, node: fx.Node) -> fx.Node:
        others = self.call(_aten.ne.Scalar, self.rank, 0)
        if not tensor(node).shape:
            others = self.call(_aten.view.default, others, [])
        return self.call(_aten.masked_fill.Scalar, node, others, 0)


@dataclass
class LocalCallOf:
    """Writer of one rank's share of ``node``, for a rule (``zerofx/ir/sharding/rule.py``)."""

    node: fx.Node
    rule: Rule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: LocalGraph

    @property
    def num_ranks(self) -> int:
        return self.graph.num_ranks

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call; what ``node`` draws of this rank's part is drawn by this rank alone."""
        if target is self.node.target and self.rule.shards and is_random(self.node):
            assert isinstance(target, OpOverload)
            return self.graph.call(OWN_DRAWS[target], *args, **kwargs, rank=self.graph.host_rank)
        return self.graph.call(target, *args, **kwargs)

    def rank(self) -> fx.Node:
        return self.graph.rank

    def all_reduce(self, node: fx.Node, reduction: str = "sum") -> fx.Node:
        return self.graph.all_reduce(node, reduction)

    def exchange(self, parts: fx.Node) -> fx.Node:
        return self.graph.exchange(parts)

    def own(self, node: fx.Node) -> fx.Node:
        given = pytree.tree_leaves((self.args, self.kwargs))
        read = zip(pytree.tree_leaves((self.node.args, dict(self.node.kwargs))), given, strict=True)
        return next(own for source, own in read if source is node and isinstance(own, fx.Node))

    def whole(self, name: str) -> fx.Node:
        return self.graph.whole(name)

    def count_rows(self, what: str, args: tuple[Any, ...]) -> None:
        self.graph.count_rows(what, args)

    def start_shift(self, node: fx.Node) -> fx.Node:
        return self.graph.start_shift(node)

    def wait_shift(self, pending: fx.Node) -> fx.Node:
        return self.graph.wait_shift(pending)
