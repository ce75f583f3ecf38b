"""Classification losses, sharded by rows or by classes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.sharding.indexing import own_indices, zero_elsewhere
from zerofx.ir.sharding.pattern import Pattern
from zerofx.ir.sharding.rule import Local, ShareCost, argument, read_tensors, shape_of
from zerofx.ir.sharding.shapes import PatternsOf

_aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)  # how torch counts reductions


def _nll(node: fx.Node) -> list[Pattern]:
    """The sum of the ranks' losses, divided by the number of targets of all ranks for a mean.

    Losses with class weights, or of images, are not shared.
    """
    if argument(node, 2, "weight") is not None or len(shape_of(read_tensors(node)[0])) != 2:
        return []
    scores = tensor(read_tensors(node)[0])
    if argument(node, 3, "reduction") == _NONE:
        return [Pattern((0, "sum"), (0, 0))]
    return [
        Pattern(("sum", None), (0, 0), _loss_of_rows, extra=lambda _: ShareCost(reduced_bytes=scores.element_size())),
        Pattern(("sum", None), (1, None), _loss_of_classes, in_groups=False),
    ]


def _loss_of_rows(rank: Local) -> Any:
    scores, target, weight, reduction, ignored = rank.args
    both = rank.call(rank.node.target, scores, target, weight, _SUM, ignored)
    loss, num = (rank.call(operator.getitem, both, index) for index in range(2))
    total = rank.all_reduce(num)
    return (rank.call(_aten.div.Tensor, loss, total) if reduction == _MEAN else loss), total


def _loss_of_classes(rank: Local) -> Any:
    scores, target, _, reduction, ignored = rank.args
    own, inside = own_indices(rank, target, shape_of(scores)[1])
    counted = rank.call(_aten.ne.Scalar, target, ignored)
    inside = rank.call(_aten.bitwise_and.Tensor, inside, counted)
    picked = rank.call(_aten.gather.default, scores, 1, rank.call(_aten.unsqueeze.default, own, 1))
    picked = zero_elsewhere(rank, rank.call(_aten.squeeze.dim, picked, 1), inside)
    loss = rank.call(_aten.neg.default, rank.call(_aten.sum.default, picked))
    total = rank.call(_aten.sum.default, rank.call(_aten._to_copy.default, counted, dtype=tensor(scores).dtype))
    return (rank.call(_aten.div.Tensor, loss, total) if reduction == _MEAN else loss), total


def _nll_backward(node: fx.Node) -> list[Pattern]:
    """Tensor arguments: the loss's gradient, scores, target, the number of targets that are not ignored."""
    if argument(node, 3, "weight") is not None or len(shape_of(node)) != 2:
        return []
    if argument(node, 4, "reduction") == _NONE:
        return [Pattern((0,), (0, 0, 0, None))]
    return [
        Pattern((0,), (None, 0, 0, None)),
        Pattern((1,), (None, 1, None, None), _gradient_of_classes, in_groups=False),
    ]


def _gradient_of_classes(rank: Local) -> Any:
    gradient, scores, target, _, reduction, ignored, total = rank.args
    size = shape_of(scores)[1]
    own, inside = own_indices(rank, target, size)
    inside = rank.call(_aten.bitwise_and.Tensor, inside, rank.call(_aten.ne.Scalar, target, ignored))
    share = rank.call(_aten.neg.default, gradient)
    share = rank.call(_aten.div.Tensor, share, total) if reduction == _MEAN else share
    classes = rank.call(_aten.arange.default, size, device=tensor(scores).device)
    hit = rank.call(_aten.eq.Tensor, rank.call(_aten.unsqueeze.default, own, 1), classes)
    hit = rank.call(_aten.bitwise_and.Tensor, hit, rank.call(_aten.unsqueeze.default, inside, 1))
    return rank.call(_aten.where.ScalarOther, hit, share, 0)


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType({"nll_loss_forward": _nll, "nll_loss_backward": _nll_backward})
