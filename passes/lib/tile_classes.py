"""Run a model's output layer and its loss a few classes at a time, so that the logits never exist whole.

    logits = mm(x, w)               for each tile of classes c:
    p = log_softmax(logits)             stats = softmax_chunk(mm(x, w[:, c]), target, stats)
    loss = nll_loss(p, target)      log_sums = log(sums) + maxima;  loss = (log_sums - picked) / number of targets
    ...                             for each tile of classes c:
    g = the gradient of logits          g = mm(x, w[:, c]);  softmax_gradient(g, target, log_sums, scale)
    gw = mm(t(g), x)                    gw_c = mm(t(g), x)
    gx = mm(g, t(w))                    gx = gx + mm(g, t(w)[c])
                                    gw = cat(gw_0, ...)

Unlike tiles of rows (``passes/tile.py``) no weight's gradient is summed up in float32 next to the whole one, and the
tiles' logits are made twice: it takes less memory where there are fewer rows than classes, and a third more products of
the output layer. The sums over classes, in the softmax and in the input's gradient, are taken tile by tile in float32,
so that results are equal within rounding.

Does not handle: a loss whose softmax is not taken in float32, and what ``passes/tile.py`` does not.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.edit import cast, insert_call
from zerofx.ir.facts import Origin, Phase, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.scheduler.analysis.loss_heads import MEAN, LossHead, sum_dtype

_aten = torch.ops.aten


def tile_classes(step: StepGraph, head: LossHead, num_tiles: int) -> None:
    """Put ``num_tiles`` runs of classes in the place of a head that ``head.has_classes`` is true of."""
    with step.graph.inserting_before(head.grad_loss):
        _Tiler(step, head, num_tiles).run()


class _Tiler:
    """Writes the tiles of one head at the insertion point, and gives the head's readers their results."""

    def __init__(self, step: StepGraph, head: LossHead, num_tiles: int) -> None:
        self._step, self._head = step, head
        self._layer = origin(head.product).layer
        bounds = [head.num_classes * n // num_tiles for n in range(num_tiles + 1)]
        self._tiles = list(itertools.pairwise(bounds))

    def run(self) -> None:
        head = self._head
        _, target, _, reduction, ignored = head.loss.args
        is_counted = self._call(_aten.ne.Scalar, target, ignored)
        count = self._call(_aten.sum.dim_IntList, is_counted, [0], dtype=torch.float32)
        log_sums, picked = self._statistics(target)
        losses = self._call(_aten.sub.Tensor, log_sums, picked)
        # Not a product with 0: an ignored row's loss need not be finite.
        nothing = self._call(_aten.zeros_like.default, losses)
        loss = self._call(_aten.sum.dim_IntList, self._call(_aten.where.self, is_counted, losses, nothing), [0])
        scale = head.grad_loss.args[0]
        if reduction == MEAN:
            loss, scale = (self._call(_aten.div.Tensor, value, count) for value in (loss, scale))
        gradients = self._gradients(target, log_sums, scale, ignored)
        for user in head.loss.users:
            if user.args[1] == 0:
                user.replace_all_uses_with(loss)
        for old, new in gradients.items():
            old.replace_all_uses_with(new)

    def _statistics(self, target: Any) -> tuple[fx.Node, fx.Node]:
        """The logarithm of each row's sum of exponentials, and its target's logit."""
        stats = None
        for start, end in self._tiles:
            stats = self._call(ops.softmax_chunk, self._logits(start, end), target, start, stats)
        largest, total, picked = (self._call(_aten.select.int, stats, 0, number) for number in range(3))
        return self._call(_aten.add.Tensor, self._call(_aten.log.default, total), largest), picked

    def _gradients(self, target: Any, log_sums: fx.Node, scale: Any, ignored: Any) -> dict[fx.Node, fx.Node]:
        """The new value of each product and sum that reads the gradient of the logits."""
        head = self._head
        sums: dict[fx.Node, fx.Node] = {}
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in head.over_rows}
        for start, end in self._tiles:
            grad = self._logits(start, end)
            self._call(ops.softmax_gradient, grad, target, start, log_sums, scale, ignored)
            for node in head.by_row:
                part = self._call(node.target, grad, self._call(_aten.slice.Tensor, node.args[1], 0, start, end))
                part = self._cast(part, sum_dtype(tensor(node).dtype))
                sums[node] = self._call(_aten.add.Tensor, sums[node], part) if node in sums else part
            for node in head.over_rows:
                is_product = node.target is _aten.mm.default
                left = self._call(_aten.t.default, grad) if is_product else grad
                parts[node].append(self._call(node.target, left, *node.args[1:], **node.kwargs))
        whole = {node: self._cast(total, tensor(node).dtype) for node, total in sums.items()}
        # Of what is summed over the rows, a matrix has the classes along its first axis, a sum along its last.
        axes = {node: 0 if node.target is _aten.mm.default else tensor(node).dim() - 1 for node in parts}
        joined = {node: self._call(_aten.cat.default, some, axes[node]) for node, some in parts.items()}
        return whole | joined

    def _logits(self, start: int, end: int) -> fx.Node:
        *bias, values, weight = self._head.product.args
        some = [self._call(_aten.slice.Tensor, vector, 0, start, end) for vector in bias]
        columns = self._call(_aten.slice.Tensor, weight, 1, start, end)
        return self._call(self._head.product.target, *some, values, columns)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self._step.graph, node, dtype, Origin(self._layer, Phase.BACKWARD))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self._step.graph, target, args, Origin(self._layer, Phase.BACKWARD), kwargs)
