"""Operators that move elements: maps between dimensions of the source and of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import value
from zerofx.ir.sharding.pattern import DimMap, Pattern, linear, pair_patterns, same_dims
from zerofx.ir.sharding.rule import Local, argument, dims_of, read_tensors, shape_of
from zerofx.scheduler.plan.placements import Sharded

_aten = torch.ops.aten

PatternsOf = Callable[[fx.Node], list[Pattern]]


def _source_shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(read_tensors(node)[0])


def _reorder(node: fx.Node, order: list[int]) -> list[Pattern]:
    """Patterns of a permutation; ``order`` has, for each dimension of the result, that of the source."""
    return [*pair_patterns(node, enumerate(order)), linear(node)]


def matrix_transpose(node: fx.Node) -> list[Pattern]:
    """The patterns of ``t``, the transpose of a matrix."""
    return _reorder(node, list(range(len(_source_shape(node))))[::-1])


def transpose(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that swaps two dimensions."""
    order = list(range(len(_source_shape(node))))
    first, second = (dims_of(argument(node, 1 + i, f"dim{i}"), len(order))[0] for i in range(2))
    order[first], order[second] = order[second], order[first]
    return _reorder(node, order)


def permute(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that reorders dimensions."""
    return _reorder(node, list(dims_of(argument(node, 1, "dims"), len(_source_shape(node)))))


def expand(node: fx.Node) -> list[Pattern]:
    """The patterns of an expansion; a repeated dimension can be sharded too, as each rank repeats for its part."""
    source, shape = _source_shape(node), tuple(value(node).shape)
    front = len(shape) - len(source)
    pairs = [(d, d - front if d >= front and source[d - front] == shape[d] else None) for d in range(len(shape))]
    return [*pair_patterns(node, pairs), linear(node)]


def zeros(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that makes zeros: any part of them, or terms, is zeros too."""
    return [*(Pattern((dim,), ()) for dim in range(len(value(node).shape))), linear(node)]


def unsqueeze(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that inserts a dimension of size 1."""
    rank = len(_source_shape(node))
    dim = dims_of(argument(node, 1, "dim"), rank + 1)[0]
    return [*pair_patterns(node, [(d + (d >= dim), d) for d in range(rank)]), linear(node)]


def squeeze(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that removes dimensions of size 1; of those it names, longer ones stay."""
    source = _source_shape(node)
    named = dims_of(argument(node, 1, "dim"), len(source))
    left = [d for d in range(len(source)) if d not in named or source[d] != 1]
    return [*pair_patterns(node, enumerate(left)), linear(node)]


def same_places(node: fx.Node) -> list[Pattern]:
    """The patterns of ``as_strided`` that is an identity: strides differ in dimensions of size 1 only."""
    source, given = value(read_tensors(node)[0]), value(node)
    pairs = zip(given.shape, source.stride(), given.stride(), strict=True) if source.shape == given.shape else ()
    stays = source.shape == given.shape and source.storage_offset() == given.storage_offset()
    if not stays or any(size > 1 and old != new for size, old, new in pairs):
        return []
    return [replace(pattern, local=_identity_view) for pattern in (*same_dims(node), linear(node))]


def _identity_view(rank: Local) -> Any:
    return rank.call(_aten.view.default, rank.args[0], list(shape_of(rank.args[0])))


def select(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that takes one index of a dimension, or each of them (``unbind``)."""
    rank = len(_source_shape(node))
    dim = dims_of(argument(node, 1, "dim", 0), rank)[0]
    left = [d for d in range(rank) if d != dim]
    return [*pair_patterns(node, enumerate(left)), linear(node)]


def put_along(index: int) -> PatternsOf:
    """The patterns of ``stack`` and ``select_backward``, which insert the dimension in argument ``index``."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(value(node).shape)
        dim = dims_of(argument(node, index, "dim", 0), rank)[0]
        left = [d for d in range(rank) if d != dim]
        return [*pair_patterns(node, [(d, number) for number, d in enumerate(left)]), linear(node)]

    return patterns


def cut_along(index: int) -> PatternsOf:
    """The patterns of an operator that cuts or joins the dimension in argument ``index``: the others can be sharded."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(_source_shape(node))
        return [*same_dims(node, dims_of(argument(node, index, "dim", 0), rank)), linear(node)]

    return patterns


def whole_along(index: int) -> PatternsOf:
    """The patterns of an operator that works along the dimension in argument ``index``, for each row independently: the
    others can be sharded, if all tensors have them."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(_source_shape(node))
        return same_dims(node, dims_of(argument(node, index, "dim", -1), rank))

    return patterns


def cat(node: fx.Node) -> list[Pattern]:
    """The patterns of ``cat``; empty tensors of shape ``[0]``, as initial caches are, do not count."""
    shape, parts = tuple(value(node).shape), read_tensors(node)
    dim = dims_of(argument(node, 1, "dim", 0), len(shape))[0]
    joined_parts = [part for part in parts if shape_of(part) != (0,)]
    whole = [d for d in range(len(shape)) if d != dim or len(joined_parts) == 1]
    return [*(Pattern((d,), tuple(d if part in joined_parts else None for part in parts)) for d in whole), linear(node)]


def reshape_map(node: fx.Node) -> DimMap:
    """The map of a reshape: the sharded dimension keeps the number of elements before it and after it."""
    old, new = _source_shape(node), tuple(value(node).shape)
    return DimMap(
        lambda placement: _reshape_placement(placement, old, new),
        lambda placement: _reshape_placement(placement, new, old),
    )


def _reshape_placement(placement: Sharded, old: tuple[int, ...], new: tuple[int, ...]) -> Sharded | None:
    before, after = prod(old[: placement.dim]) * placement.groups, prod(old[placement.dim + 1 :])
    inner = old[placement.dim] // placement.groups * after  # elements of one run, all ranks' parts of it
    for dim, size in enumerate(new):
        ahead, rest = prod(new[:dim]), prod(new[dim + 1 :])
        groups = before // ahead
        if before % ahead or size % groups:
            continue
        run = size // groups
        if run > 1 and run * rest == inner:
            return Sharded(dim, groups)
    return None


def cat_map(node: fx.Node) -> DimMap | None:
    """The map of ``cat`` of equal parts: the number of groups is multiplied by the number of parts."""
    parts = read_tensors(node)
    dim = dims_of(argument(node, 1, "dim", 0), len(value(node).shape))[0]
    if len({shape_of(part) for part in parts}) != 1:
        return None
    num = len(parts)
    return DimMap(lambda p: _times(p, dim, num), lambda p: _parts(p, dim, num))


def split_map(node: fx.Node) -> DimMap | None:
    """The map of a split into equal parts: each has its share of the groups."""
    shape, sizes = _source_shape(node), argument(node, 1, "split_size")
    dim = dims_of(argument(node, 2, "dim", 0), len(shape))[0]
    num = len(value(node))
    if shape[dim] % num or any(tuple(part.shape) != tuple(value(node)[0].shape) for part in value(node)):
        return None

    def local(rank: Local) -> Any:
        whole = rank.args[0]
        part = value(whole).shape[dim] // num
        return rank.call(node.target, whole, part if isinstance(sizes, int) else [part] * num, dim)

    return DimMap(lambda p: _parts(p, dim, num), lambda p: _times(p, dim, num), local)


def slice_map(node: fx.Node) -> DimMap | None:
    """The map of ``slice``, of whole groups of a dimension, or of ``slice_backward``, which pads them with zeros."""
    is_backward = node.target is _aten.slice_backward.default
    shape = tuple(value(node).shape) if is_backward else _source_shape(node)
    dim = dims_of(argument(node, 1 + is_backward, "dim", 0), len(shape))[0]
    start, end = (argument(node, 2 + is_backward, "start"), argument(node, 3 + is_backward, "end"))
    size, start = shape[dim], (start or 0)
    end = size if end is None else min(end, size)
    start, end = (position % size if position < 0 else position for position in (start, end))
    if argument(node, 4 + is_backward, "step", 1) != 1 or end <= start:
        return None
    part = end - start

    def to_part(placement: Sharded) -> Sharded | None:
        run = size // placement.groups
        if placement.dim != dim or start % run or end % run:
            return None
        return Sharded(dim, part // run)

    def to_whole(placement: Sharded) -> Sharded | None:
        run = part // placement.groups
        if placement.dim != dim or part % placement.groups or size % run or start % run:
            return None
        return Sharded(dim, size // run)

    def local(rank: Local) -> Any:
        first, last = start // rank.num_ranks, end // rank.num_ranks
        if is_backward:
            whole = list(shape)
            placement = rank.rule.outputs[0]
            assert isinstance(placement, Sharded)
            whole[dim] //= rank.num_ranks
            return rank.call(node.target, rank.args[0], whole, dim, first, last, 1)
        return rank.call(node.target, rank.args[0], dim, first, last)

    return DimMap(to_whole, to_part, local) if is_backward else DimMap(to_part, to_whole, local)


def _times(placement: Sharded, dim: int, num: int) -> Sharded:
    return Sharded(dim, placement.groups * num) if placement.dim == dim else placement


def _parts(placement: Sharded, dim: int, num: int) -> Sharded | None:
    if placement.dim != dim:
        return placement
    return None if placement.groups % num else Sharded(dim, placement.groups // num)


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "zeros": zeros,
        "t": matrix_transpose,
        "transpose": transpose,
        "permute": permute,
        "expand": expand,
        "unsqueeze": unsqueeze,
        "as_strided": same_places,
        "squeeze": squeeze,
        "select": select,
        "unbind": select,
        "select_backward": put_along(2),
        "stack": put_along(1),
        "slice": cut_along(1),
        "slice_backward": cut_along(2),
        "cat": cat,
        "split": cut_along(2),
        "split_with_sizes": cut_along(2),
        "view": lambda node: [linear(node)],
        "_unsafe_view": lambda node: [linear(node)],
        "reshape": lambda node: [linear(node)],
    }
)
DIM_MAPS: Mapping[str, Callable[[fx.Node], DimMap | None]] = MappingProxyType(
    {
        "view": reshape_map,
        "_unsafe_view": reshape_map,
        "reshape": reshape_map,
        "cat": cat_map,
        "split": split_map,
        "split_with_sizes": split_map,
        "slice": slice_map,
        "slice_backward": slice_map,
    }
)
