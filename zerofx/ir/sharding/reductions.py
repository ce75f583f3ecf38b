"""Reductions, which give partial results over a sharded dimension, and operators that need whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.sharding.pattern import Lies, Pattern, linear, same_dims, uniform_pattern
from zerofx.ir.sharding.rule import Local, argument, dims_of, num_bytes, read_tensors, results_of, shape_of
from zerofx.ir.sharding.shapes import PatternsOf, whole_along
from zerofx.scheduler.plan.placements import Reduction

_aten = torch.ops.aten


def _reduction(over: Reduction, *, mean: bool = False) -> PatternsOf:
    """Patterns of reductions over the dimensions in the second argument, or all; the third is ``keepdim``."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(shape_of(read_tensors(node)[0]))
        named = dims_of(argument(node, 1, "dim"), rank)
        keeps = bool(argument(node, 2, "keepdim", False))
        left = list(range(rank)) if keeps else [d for d in range(rank) if d not in named]
        along = [Pattern((left.index(d),), (d,)) for d in range(rank) if d not in named]
        parts: list[Pattern] = [Pattern((over,), (d,), _part_of_mean if mean else None) for d in named]
        return [*along, *parts, *([linear(node)] if over == "sum" else [])]

    return patterns


def _part_of_mean(rank: Local) -> Any:
    return rank.call(_aten.div.Scalar, rank.call(rank.node.target, *rank.args, **rank.kwargs), rank.num_ranks)


def _log_softmax(node: fx.Node) -> list[Pattern]:
    return [*whole_along(1)(node), *_classes(node, _log_softmax_of_classes, num_reductions=2)]


def _log_softmax_backward(node: fx.Node) -> list[Pattern]:
    return [*whole_along(2)(node), *_classes(node, _log_softmax_backward_of_classes, num_reductions=1, index=2)]


def _classes(node: fx.Node, local: Any, num_reductions: int, index: int = 1) -> list[Pattern]:
    """The pattern that shards the last dimension, the classes: one number a row is all-reduced, or several."""
    shape = shape_of(node)
    dim = dims_of(argument(node, index, "dim"), len(shape))[0]
    if dim != len(shape) - 1:
        return []
    per_row = num_bytes(shape[:-1], tensor(node).dtype)
    whole = uniform_pattern(node, dim)
    return [Pattern(whole.outputs, whole.inputs, local, (per_row,) * num_reductions)]


def _log_softmax_of_classes(rank: Local) -> Any:
    logits, dim = rank.args[0], rank.args[1]
    largest = rank.all_reduce(rank.call(_aten.amax.default, logits, [dim], True), "max")
    shifted = rank.call(_aten.sub.Tensor, logits, largest)
    exponentials = rank.call(_aten.sum.dim_IntList, rank.call(_aten.exp.default, shifted), [dim], True)
    return rank.call(_aten.sub.Tensor, shifted, rank.call(_aten.log.default, rank.all_reduce(exponentials)))


def _log_softmax_backward_of_classes(rank: Local) -> Any:
    gradient, output, dim = rank.args[0], rank.args[1], rank.args[2]
    total = rank.all_reduce(rank.call(_aten.sum.dim_IntList, gradient, [dim], True))
    return rank.call(
        _aten.sub.Tensor, gradient, rank.call(_aten.mul.Tensor, rank.call(_aten.exp.default, output), total)
    )


def _last_two_whole(node: fx.Node) -> list[Pattern]:
    rank = len(shape_of(node))
    return [*same_dims(node, (rank - 2, rank - 1)), linear(node)]


def _factory(node: fx.Node) -> list[Pattern]:
    """Patterns of factories, which read at most a shape: any placement of the result, for any of the argument."""
    outputs, inputs = results_of(node), read_tensors(node)
    rank = len(outputs[0].shape) if outputs[0] is not None else 0
    reads: list[Lies] = [None, "sum"] if inputs else [None]
    makes = [Pattern((dim,), (lies,) * len(inputs)) for dim in range(rank) for lies in reads]
    return [*makes, *([Pattern((None,), ("sum",))] if len(inputs) == 1 else [])]


def _factory_like(node: fx.Node) -> list[Pattern]:
    """Patterns of factories with the shape of their input (``zeros_like``)."""
    return [*same_dims(node), Pattern((None,), ("sum",))]


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "sum.dim_IntList": _reduction("sum"),
        "sum.default": _reduction("sum"),
        "mean.dim": _reduction("sum", mean=True),
        "mean.default": _reduction("sum", mean=True),
        "amax": _reduction("max"),
        "amin": _reduction("min"),
        "max.default": _reduction("max"),
        "min.default": _reduction("min"),
        "max.dim": whole_along(1),
        "min.dim": whole_along(1),
        "argmax": lambda node: [],
        "_softmax": whole_along(1),
        "_safe_softmax": whole_along(1),
        "_softmax_backward_data": whole_along(2),
        "_log_softmax": _log_softmax,
        "_log_softmax_backward_data": _log_softmax_backward,
        "cumsum": whole_along(1),
        "cumprod": whole_along(1),
        "sort": whole_along(1),
        "topk": whole_along(2),
        "tril": _last_two_whole,
        "triu": _last_two_whole,
        "full": _factory,
        "zeros": _factory,
        "ones": _factory,
        "empty": _factory,
        "new_zeros": _factory,
        "new_ones": _factory,
        "new_full": _factory,
        "new_empty": _factory,
        "zeros_like": _factory_like,
        "ones_like": _factory_like,
        "full_like": _factory_like,
        "empty_like": _factory_like,
        "scalar_tensor": lambda node: [],
        "arange": lambda node: [],
    }
)
