"""Run a chain of operators a few rows at a time, in forward and in backward.

    up = addmm(b1, x, w1)                   for each tile of rows i:
    h = gelu(up)                                up = addmm(b1, x[i], w1);  h = gelu(up)
    y = addmm(b2, h, w2)                        y_i = addmm(b2, h, w2)
    ...                                     y = cat(y_0, ...)
    gw2 = mm(t(gy), h)                      ...
    gh = mm(gy, w2)                         for each tile of rows i:
    gup = gelu_backward(gh, up)                 up = addmm(b1, x[i], w1);  h = gelu(up)
    gw1 = mm(t(gup), x)                         gw2 = addmm(gw2, t(gy[i]), h)
    gx = mm(gup, w1)                            gup = gelu_backward(mm(gy[i], w2), up)
                                                gw1 = addmm(gw1, t(gup), x[i]);  gx_i = mm(gup, w1)
                                            gx = cat(gx_0, ...)

Backward computes a tile's forward again, so that at any time one tile of the large values is there. A row goes through
the same operators as before: its results, and its gradients, are what they were wherever a kernel's result for a row
does not depend on how many rows it is given. What is summed over the rows (gradients of weights) is summed tile by
tile, and equal only within rounding; parts in half precision are added up in float32.

Does not handle: chains with random operators (``scheduler/analysis/tile_chains.py`` does not find those).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.aliasing import storage_source
from zerofx.ir.edit import cast, insert_call
from zerofx.ir.facts import Origin, Phase, origin, set_tile, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.rows import SUM, Rows, tile_shape
from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.analysis.loss_heads import sum_dtype
from zerofx.scheduler.analysis.saved_values import value_node
from zerofx.scheduler.analysis.tile_chains import Chain, ChainHalf, stride_order

_aten = torch.ops.aten


def tile_chain(step: StepGraph, chain: Chain, num_tiles: int) -> None:
    """Put ``num_tiles`` tiles in the place of ``chain``; its own nodes go."""
    # Forward's nodes are what backward's tiles are copied from.
    for part in reversed(chain.parts):
        _PartTiler(step, chain, part).run(num_tiles)
        for node in reversed(part.nodes):
            step.graph.erase_node(node)


@dataclass
class _Tile:
    """Results for rows ``start`` to ``end`` so far: parts of values, and copies of nodes."""

    name: str
    start: int
    end: int
    slices: dict[tuple[fx.Node, Rows], fx.Node] = field(default_factory=dict)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _PartTiler:
    """Writes the tiles of one part after its last node."""

    def __init__(self, step: StepGraph, chain: Chain, part: ChainHalf) -> None:
        self._step, self._chain, self._part = step, chain, part
        self._again = frozenset(part.again)
        self._phase: Phase = origin(part.nodes[0]).phase

    def run(self, num_tiles: int) -> None:
        outputs = self._part.outputs(self._chain)
        rows: dict[fx.Node, list[fx.Node]] = {}
        sums: dict[fx.Node, fx.Node] = {}
        anchor = self._part.nodes[-1].next
        waiting = self._dependents()
        with self._step.graph.inserting_before(anchor):
            for number in range(num_tiles):
                start, end = (self._chain.num_rows * n // num_tiles for n in (number, number + 1))
                tile = _Tile(f"{self._chain.product.name} {self._phase} {number}", start, end)
                self._cut(tile)
                for node in self._part.nodes:
                    if self._chain.rows[node] is SUM and node in outputs:
                        sums[node] = self._add(node, sums.get(node), tile)
                    else:
                        self._copy(node, tile)
                for node in outputs:
                    if self._chain.rows[node] is not SUM:
                        rows.setdefault(node, []).append(tile.copies[node])
            joined = {node: self._join(node, parts) for node, parts in rows.items()}
            whole = {node: self._cast(node, total, tensor(node).dtype) for node, total in sums.items()}
        for node in waiting:
            anchor.prepend(node)
        for old, new in (*joined.items(), *whole.items()):
            for user in list(old.users):
                if user not in self._chain.members:
                    user.replace_input_with(old, new)

    def _dependents(self) -> list[fx.Node]:
        """The nodes between the part's nodes that depend on them."""
        members, depending = set(self._part.nodes), dict[fx.Node, None]()
        node, last = self._part.nodes[0], self._part.nodes[-1]
        while node is not last:
            if node not in members and any(s in members or s in depending for s in node.all_input_nodes):
                depending[node] = None
            node = node.next
        return list(depending)

    def _copy(self, node: fx.Node, tile: _Tile) -> fx.Node:
        """``node`` for the rows of a tile, with what it needs of what is computed again."""
        for source in node.all_input_nodes:
            if source in self._again and source not in tile.copies:
                self._copy(source, tile)
        args, kwargs = self._arguments(node, tile)
        rows = self._chain.rows[node]
        if facts_of(node.target).takes_shape:
            assert isinstance(rows, Rows)
            shape = tile_shape(tensor(node).shape, rows, tile.end - tile.start)
            if len(node.args) > 2 or node.target is _aten.expand.default:
                args = (args[0], shape, *args[2:])
            else:
                tile.copies[node] = self._view(node, args[0], shape, tile.name)
                return tile.copies[node]
        tile.copies[node] = set_tile(self._call(node, node.target, *args, **kwargs), tile.name)
        return tile.copies[node]

    def _add(self, node: fx.Node, total: fx.Node | None, tile: _Tile) -> fx.Node:
        """Add the sum of ``node`` over the rows of ``tile`` to that of the rows before, in float32 at least."""
        wide = sum_dtype(tensor(node).dtype)
        if node.target is _aten.mm.default and total is not None and wide == tensor(node).dtype:
            for source in node.all_input_nodes:
                if source in self._again and source not in tile.copies:
                    self._copy(source, tile)
            factors, _ = self._arguments(node, tile)
            return set_tile(self._call(node, _aten.addmm.default, total, *factors), tile.name)
        part = self._cast(node, self._copy(node, tile), wide)
        set_tile(part, tile.name)
        return part if total is None else set_tile(self._call(node, _aten.add.Tensor, total, part), tile.name)

    def _arguments(self, node: fx.Node, tile: _Tile) -> tuple[Any, Any]:
        rows_given = self._chain.given[node]

        def replacement(source: fx.Node) -> fx.Node:
            rows = rows_given[source]
            if source in tile.copies:
                return tile.copies[source]
            return source if rows is None else tile.slices[source, rows]

        return fx.map_arg((node.args, node.kwargs), replacement)

    def _cut(self, tile: _Tile) -> None:
        """Take the rows of a tile from all that enters it."""
        inside = frozenset((*self._part.nodes, *self._part.again))
        for node in (*self._part.again, *self._part.nodes):
            for source, rows in self._chain.given[node].items():
                if rows is None or source in inside or (source, rows) in tile.slices:
                    continue
                fake = tensor(source).view(tile_shape(tensor(source).shape, rows, self._chain.num_rows))
                fake = fake.narrow(rows.first, tile.start * rows.each, (tile.end - tile.start) * rows.each)
                owner = value_node(storage_source(source))
                offset = int(fake.storage_offset()) - int(tensor(owner).storage_offset())
                tile.slices[source, rows] = self._call(
                    node, ops.part, owner, list(fake.shape), list(fake.stride()), offset
                )

    def _view(self, node: fx.Node, source: fx.Node, shape: Sequence[int], tile: str | None = None) -> fx.Node:
        """``source`` in another shape: a view, or a copy where a tile's strides leave no other way."""
        fake = tensor(source)
        probe = torch.empty_strided(fake.shape, fake.stride(), device="meta")
        try:
            probe.view(shape)
        except RuntimeError:
            source = self._call(node, _aten.clone.default, source, memory_format=torch.contiguous_format)
            set_tile(source, tile)
        return self._call(node, _aten.view.default, source, list(shape))

    def _join(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        """The value of ``node``, in its shape and strides."""
        fake, rows = tensor(node), self._chain.rows[node]
        assert isinstance(rows, Rows)
        if fake.is_contiguous():
            whole = self._call(node, _aten.cat.default, parts, rows.first)
            return whole if rows.span == 1 else self._view(node, whole, list(fake.shape))
        order = stride_order(fake)
        permuted = [self._call(node, _aten.permute.default, part, order) for part in parts]
        whole = self._call(node, _aten.cat.default, permuted, order.index(rows.first))
        return self._call(node, _aten.permute.default, whole, [order.index(d) for d in range(fake.dim())])

    def _cast(self, node: fx.Node, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self._step.graph, source, dtype, Origin(origin(node).layer, self._phase))

    def _call(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call that belongs to the layer of ``node``."""
        return insert_call(self._step.graph, target, args, Origin(origin(node).layer, self._phase), kwargs)
