"""Reductions, and what needs whole rows: over a dimension that is sharded, parts that add up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import tensor
from zerofx.ir.sharding.pattern import Lies, Pattern, everywhere, linear, same_dims
from zerofx.ir.sharding.rule import (
    Local,
    argument,
    dims_of,
    num_bytes,
    read_tensors,
    results_of,
    shape_of,
)
from zerofx.ir.sharding.shapes import PatternsOf, whole_along
from zerofx.scheduler.plan.placements import Reduction

_aten = torch.ops.aten


def _reduced(over: Reduction, *, mean: bool = False) -> PatternsOf:
    """The patterns of reductions over the dimensions of the second argument, or all, kept or not as the third says."""

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
    """The last dimension, the classes, sharded: numbers of each row are summed over the ranks."""
    shape = shape_of(node)
    dim = dims_of(argument(node, index, "dim"), len(shape))[0]
    if dim != len(shape) - 1:
        return []
    per_row = num_bytes(shape[:-1], tensor(node).dtype)
    whole = everywhere(node, dim)
    return [Pattern(whole.outputs, whole.inputs, local, (per_row,) * num_reductions)]


def _log_softmax_of_classes(rank: Local) -> Any:
    logits, dim = rank.args[0], rank.args[1]
    largest = rank.all_reduced(rank.call(_aten.amax.default, logits, [dim], True), "max")
    shifted = rank.call(_aten.sub.Tensor, logits, largest)
    exponentials = rank.call(_aten.sum.dim_IntList, rank.call(_aten.exp.default, shifted), [dim], True)
    return rank.call(_aten.sub.Tensor, shifted, rank.call(_aten.log.default, rank.all_reduced(exponentials)))


def _log_softmax_backward_of_classes(rank: Local) -> Any:
    gradient, output, dim = rank.args[0], rank.args[1], rank.args[2]
    total = rank.all_reduced(rank.call(_aten.sum.dim_IntList, gradient, [dim], True))
    return rank.call(
        _aten.sub.Tensor, gradient, rank.call(_aten.mul.Tensor, rank.call(_aten.exp.default, output), total)
    )


def _last_two_whole(node: fx.Node) -> list[Pattern]:
    rank = len(shape_of(node))
    return [*same_dims(node, (rank - 2, rank - 1)), linear(node)]


def _without_input(node: fx.Node) -> list[Pattern]:
    """Of operators that read a shape at most: what they make lies in any way, whatever lies there."""
    outputs, inputs = results_of(node), read_tensors(node)
    rank = len(outputs[0].shape) if outputs[0] is not None else 0
    reads: list[Lies] = [None, "sum"] if inputs else [None]
    makes = [Pattern((dim,), (lies,) * len(inputs)) for dim in range(rank) for lies in reads]
    return [*makes, *([Pattern((None,), ("sum",))] if len(inputs) == 1 else [])]


def _like_input(node: fx.Node) -> list[Pattern]:
    """The patterns of operators that make something in the shape of their input."""
    return [*same_dims(node), Pattern((None,), ("sum",))]


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "sum.dim_IntList": _reduced("sum"),
        "sum.default": _reduced("sum"),
        "mean.dim": _reduced("sum", mean=True),
        "mean.default": _reduced("sum", mean=True),
        "amax": _reduced("max"),
        "amin": _reduced("min"),
        "max.default": _reduced("max"),
        "min.default": _reduced("min"),
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
        "full": _without_input,
        "zeros": _without_input,
        "ones": _without_input,
        "empty": _without_input,
        "new_zeros": _without_input,
        "new_ones": _without_input,
        "new_full": _without_input,
        "new_empty": _without_input,
        "zeros_like": _like_input,
        "ones_like": _like_input,
        "full_like": _like_input,
        "empty_like": _like_input,
        "scalar_tensor": lambda node: [],
        "arange": lambda node: [],
    }
)
