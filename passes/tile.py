"""Run a model's output layer and its loss a few rows at a time, so that the logits never exist whole.

    logits = mm(x, w)                           for each tile of rows i:
    p = log_softmax(logits)                         logits = mm(x[i], w);  p = log_softmax(logits)
    loss = nll_loss(p, target)                      loss_i = nll_loss(p, target[i])
    ...                                             g = the gradient of logits
    g = the gradient of logits                      gw = addmm(gw, t(g), x[i])
    gw = mm(t(g), x)                                gx_i = mm(g, t(w))
    gx = mm(g, t(w))                            gx = cat(gx_0, ...);  loss = (loss_0 + ...) / number of targets

Forward and backward of a tile run together, where backward begins: nothing is computed twice. A row's gradient is what
it was; what is summed over the rows (the loss, the weight's gradient) is summed tile by tile, so that it is equal only
within rounding; parts of a sum in bfloat16 are added up in float32. That is why a plan tiles only where the user allows
it.

In an evaluation, whose logits are read for their loss alone, tiles have a forward alone, where the loss is.

Does not handle: a loss with class weights or without a reduction, label smoothing, logits that anything else reads, and
a loss that forward goes on computing with (``scheduler/analysis/loss_heads.py`` does not find those). Tiles of classes
are written by ``passes/lib/tile_classes.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zerofx.errors import PlanError
from zerofx.ir.edit import cast, erase_unread, insert_call
from zerofx.ir.facts import Origin, Phase, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.lib.tile_chain import tile_chain
from zerofx.passes.lib.tile_classes import tile_classes
from zerofx.scheduler.analysis.loss_heads import (
    MEAN,
    SUM,
    ForwardHead,
    LossHead,
    find_forward_heads,
    find_heads,
    sum_dtype,
)
from zerofx.scheduler.analysis.tile_chains import Chain, find_chains
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.plan import Plan

_aten = torch.ops.aten


@dataclass(frozen=True)
class Tile:
    """Tile every loss and every chain of operators that the plan tiles."""

    name: str = "tile"

    def run(self, step: StepGraph, plan: Plan) -> None:
        tile(step, plan.tiles)


def tile(step: StepGraph, decisions: Sequence[TileDecision]) -> None:
    """Carry out ``decisions``.

    Raises:
        PlanError: a decision is about nothing in this graph that can be tiled, or about too many tiles.
    """
    if not decisions:
        return
    heads = {head.product.name: head for head in (*find_heads(step), *find_forward_heads(step))}
    chains = {chain.product.name: chain for chain in find_chains(step)}
    for decision in decisions:
        target = heads.get(decision.value) or chains.get(decision.value)
        if isinstance(target, Chain) and not target.is_current:
            # It reads what another's tiles were joined to.
            chains = {chain.product.name: chain for chain in find_chains(step)}
            target = chains.get(decision.value)
        if target is None or not 2 <= decision.num_tiles <= _most_tiles(target, decision):
            raise PlanError(
                f"expected a plan to tile logits of this graph ({', '.join(heads) or 'there are none'}), or large "
                f"values between operators ({', '.join(chains) or 'there are none'}), into 2 tiles up to one for each "
                f"row, found {decision.value} into {decision.num_tiles} over {decision.over}"
            )
        if isinstance(target, LossHead):
            for node in target.late:
                target.grad_loss.prepend(node)
        if isinstance(target, LossHead) and decision.over == "classes":
            tile_classes(step, target, decision.num_tiles)
        elif isinstance(target, LossHead):
            _Tiler(step, target).run(decision.num_tiles)
        elif isinstance(target, ForwardHead):
            _Forward(step, target, Phase.FORWARD).run(decision.num_tiles)
        else:
            tile_chain(step, target, decision.num_tiles)
    erase_unread(step.graph)


def _most_tiles(target: ForwardHead | Chain, decision: TileDecision) -> int:
    if decision.over == "rows":
        return target.num_rows
    return target.num_classes if isinstance(target, LossHead) and target.has_classes else 0


class _Forward:
    """Writes the tiles of one head's forward in front of its loss, and takes the head away."""

    def __init__(self, step: StepGraph, head: ForwardHead, phase: Phase) -> None:
        self._step, self._head, self._where = step, head, Origin(origin(head.product).layer, phase)

    def run(self, num_tiles: int) -> None:
        with self._step.graph.inserting_before(self._head.loss):
            count, losses = self._num_targets(), list[fx.Node]()
            for number in range(num_tiles):
                loss, *_ = self._loss(*self._span(number, num_tiles))
                losses = self._sum(losses, self._cast(loss, tensor(count).dtype))
            self._replace_loss(losses[0], count)

    def _span(self, number: int, num_tiles: int) -> tuple[int, int]:
        """The first row of a tile, and the one after its last."""
        return self._head.num_rows * number // num_tiles, self._head.num_rows * (number + 1) // num_tiles

    def _sum(self, losses: list[fx.Node], loss: fx.Node) -> list[fx.Node]:
        return [self._call(_aten.add.Tensor, losses[0], loss) if losses else loss]

    def _replace_loss(self, summed: fx.Node, count: fx.Node) -> None:
        """Put the loss of all rows in the place of the head's."""
        loss = self._call(_aten.div.Tensor, summed, count) if self._head.loss.args[3] == MEAN else summed
        loss = self._cast(loss, tensor(self._head.softmax).dtype)
        for user in self._head.loss.users:
            if user.args[1] == 0:
                user.replace_all_uses_with(loss)

    def _num_targets(self) -> fx.Node:
        """The number of targets that are not ignored; a float32 holds it exactly, the loss's own dtype may not."""
        _, target, _, _, ignored = self._head.loss.args
        dtype = sum_dtype(tensor(self._head.softmax).dtype)
        counted = self._call(_aten.ne.Scalar, target, ignored)
        return self._call(_aten.sum.dim_IntList, counted, [0], dtype=dtype)

    def _loss(self, start: int, end: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The sum of the loss of rows ``start`` to ``end``, the log-softmax of their logits, and their targets."""
        head = self._head
        *before, values, weight = head.product.args
        logits = self._call(head.product.target, *before, self._rows(values, start, end), weight)
        if head.cast is not None:
            logits = self._call(head.cast.target, logits, **head.cast.kwargs)
        softmax = self._call(head.softmax.target, logits, *head.softmax.args[1:])
        _, target, weights, _, ignored = head.loss.args
        rows = self._rows(target, start, end)
        summed = self._call(head.loss.target, softmax, rows, weights, SUM, ignored)
        return self._call(operator.getitem, summed, 0), softmax, rows

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self._step.graph, node, dtype, self._where)

    def _rows(self, matrix: Any, start: int, end: int) -> fx.Node:
        return self._call(_aten.slice.Tensor, matrix, 0, start, end)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self._step.graph, target, args, self._where, kwargs)


class _Tiler(_Forward):
    """Writes the tiles of one head in front of its backward, and takes the head away."""

    _head: LossHead

    def __init__(self, step: StepGraph, head: LossHead) -> None:
        super().__init__(step, head, Phase.BACKWARD)

    def run(self, num_tiles: int) -> None:
        head = self._head
        with self._step.graph.inserting_before(head.grad_loss):
            count = self._num_targets()
            total = self._cast(count, tensor(head.softmax).dtype)
            losses: list[fx.Node] = []
            rows: dict[fx.Node, list[fx.Node]] = {node: [] for node in head.by_row}
            sums: dict[fx.Node, fx.Node] = {}
            for number in range(num_tiles):
                start, end = self._span(number, num_tiles)
                loss, grad = self._tile(start, end, total)
                losses = self._sum(losses, self._cast(loss, tensor(count).dtype))
                for node in head.by_row:
                    rows[node].append(self._call(node.target, grad, *node.args[1:]))
                for node in head.over_rows:
                    sums[node] = self._add(node, sums.get(node), grad, start, end)
            self._replace_loss(losses[0], count)
            sums = {node: self._cast(whole, tensor(node).dtype) for node, whole in sums.items()}
            joined = {node: self._call(_aten.cat.default, parts) for node, parts in rows.items()}
        for old, new in (*joined.items(), *sums.items()):
            old.replace_all_uses_with(new)

    def _tile(self, start: int, end: int, total: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The sum of the loss of rows ``start`` to ``end``, and the gradient of their logits."""
        head = self._head
        loss, softmax, rows = self._loss(start, end)
        _, _, weights, reduction, ignored = head.loss.args
        inputs = (softmax, rows, weights)
        grad = self._call(head.grad_loss.target, head.grad_loss.args[0], *inputs, reduction, ignored, total)
        grad = self._call(head.grad_softmax.target, grad, softmax, *head.grad_softmax.args[2:])
        if head.grad_cast is not None:
            grad = self._call(head.grad_cast.target, grad, **head.grad_cast.kwargs)
        return loss, grad

    def _add(self, node: fx.Node, total: fx.Node | None, grad: fx.Node, start: int, end: int) -> fx.Node:
        """Add the sum of ``node`` over the rows up to row ``end`` to that of the rows before, in float32 at least."""
        wide = sum_dtype(tensor(node).dtype)
        if node.target is _aten.mm.default:
            factors = self._call(_aten.t.default, grad), self._rows(node.args[1], start, end)
            if total is not None and wide == tensor(node).dtype:
                return self._call(_aten.addmm.default, total, *factors)
            part = self._call(_aten.mm.default, *factors)
        else:
            part = self._call(node.target, grad, *node.args[1:])
        return self._cast(part, wide) if total is None else self._call(_aten.add.Tensor, total, part)
