"""Operators that move elements: which dimension of a result is which of the source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.facts import value
from zerofx.ir.sharding.pattern import Moved, Pattern, along, linear, same_dims
from zerofx.ir.sharding.rule import Local, argument, dims_of, read_tensors, shape_of
from zerofx.scheduler.plan.placements import Sharded

_aten = torch.ops.aten

PatternsOf = Callable[[fx.Node], list[Pattern]]


def _source_shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(read_tensors(node)[0])


def _permuted(node: fx.Node, order: list[int]) -> list[Pattern]:
    """``order`` has, for each dimension of the result, that of the source."""
    return [*along(node, enumerate(order)), linear(node)]


def transposed_matrix(node: fx.Node) -> list[Pattern]:
    """The patterns of ``t``, the transpose of a matrix."""
    return _permuted(node, list(range(len(_source_shape(node))))[::-1])


def transposed(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator in which two dimensions change places."""
    order = list(range(len(_source_shape(node))))
    first, second = (dims_of(argument(node, 1 + i, f"dim{i}"), len(order))[0] for i in range(2))
    order[first], order[second] = order[second], order[first]
    return _permuted(node, order)


def permuted(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that puts dimensions in another order."""
    return _permuted(node, list(dims_of(argument(node, 1, "dims"), len(_source_shape(node)))))


def expanded(node: fx.Node) -> list[Pattern]:
    """The patterns of an expansion: ranks share a dimension that is repeated too, as each repeats its part."""
    source, shape = _source_shape(node), tuple(value(node).shape)
    front = len(shape) - len(source)
    pairs = [(d, d - front if d >= front and source[d - front] == shape[d] else None) for d in range(len(shape))]
    return [*along(node, pairs), linear(node)]


def with_dim(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that puts one dimension in."""
    rank = len(_source_shape(node))
    dim = dims_of(argument(node, 1, "dim"), rank + 1)[0]
    return [*along(node, [(d + (d >= dim), d) for d in range(rank)]), linear(node)]


def without_dims(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that leaves out dimensions of one place; others that it names stay."""
    source = _source_shape(node)
    named = dims_of(argument(node, 1, "dim"), len(source))
    left = [d for d in range(len(source)) if d not in named or source[d] != 1]
    return [*along(node, enumerate(left)), linear(node)]


def same_places(node: fx.Node) -> list[Pattern]:
    """The patterns of a tensor under other strides that moves nothing, as they differ in dimensions of one place."""
    source, given = value(read_tensors(node)[0]), value(node)
    pairs = zip(given.shape, source.stride(), given.stride(), strict=True) if source.shape == given.shape else ()
    stays = source.shape == given.shape and source.storage_offset() == given.storage_offset()
    if not stays or any(size > 1 and old != new for size, old, new in pairs):
        return []
    return [replace(pattern, local=_as_it_is) for pattern in (*same_dims(node), linear(node))]


def _as_it_is(rank: Local) -> Any:
    return rank.call(_aten.view.default, rank.args[0], list(shape_of(rank.args[0])))


def picked(node: fx.Node) -> list[Pattern]:
    """The patterns of an operator that picks one place of a dimension, or all of them one by one."""
    rank = len(_source_shape(node))
    dim = dims_of(argument(node, 1, "dim", 0), rank)[0]
    left = [d for d in range(rank) if d != dim]
    return [*along(node, enumerate(left)), linear(node)]


def put_along(index: int) -> PatternsOf:
    """The patterns of tensors, or one among zeros, that are put along a dimension of their own, an argument."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(value(node).shape)
        dim = dims_of(argument(node, index, "dim", 0), rank)[0]
        left = [d for d in range(rank) if d != dim]
        return [*along(node, [(d, number) for number, d in enumerate(left)]), linear(node)]

    return patterns


def cut_along(index: int) -> PatternsOf:
    """The patterns of an operator that cuts or joins a dimension, which is an argument: all others may be sharded."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(_source_shape(node))
        return [*same_dims(node, dims_of(argument(node, index, "dim", 0), rank)), linear(node)]

    return patterns


def whole_along(index: int) -> PatternsOf:
    """The patterns of an operator that needs all of a dimension, which is an argument, and nothing of other rows: the
    others may be sharded, where all tensors have them."""

    def patterns(node: fx.Node) -> list[Pattern]:
        rank = len(_source_shape(node))
        return same_dims(node, dims_of(argument(node, index, "dim", -1), rank))

    return patterns


def joined_dims(node: fx.Node) -> list[Pattern]:
    """The patterns of tensors that are joined. Empty ones without dimensions, as caches begin with, are none."""
    shape, parts = tuple(value(node).shape), read_tensors(node)
    dim = dims_of(argument(node, 1, "dim", 0), len(shape))[0]
    joined_parts = [part for part in parts if shape_of(part) != (0,)]
    whole = [d for d in range(len(shape)) if d != dim or len(joined_parts) == 1]
    return [
        *(Pattern((d,), tuple(d if part in joined_parts else None for part in parts)) for d in whole),
        linear(node),
    ]


def reshaped(node: fx.Node) -> Moved:
    """The same elements in the same order: what is sharded has as many elements before it, and as many after."""
    old, new = _source_shape(node), tuple(value(node).shape)
    return Moved(lambda placement: _moved(placement, old, new), lambda placement: _moved(placement, new, old))


def _moved(placement: Sharded, old: tuple[int, ...], new: tuple[int, ...]) -> Sharded | None:
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


def joined(node: fx.Node) -> Moved | None:
    """Equal parts joined along a dimension: as many times the groups."""
    parts = read_tensors(node)
    dim = dims_of(argument(node, 1, "dim", 0), len(value(node).shape))[0]
    if len({shape_of(part) for part in parts}) != 1:
        return None
    num = len(parts)
    return Moved(lambda p: _times(p, dim, num), lambda p: _parts(p, dim, num))


def split(node: fx.Node) -> Moved | None:
    """A dimension cut into equal parts: each has its share of the groups."""
    shape, sizes = _source_shape(node), argument(node, 1, "split_size")
    dim = dims_of(argument(node, 2, "dim", 0), len(shape))[0]
    num = len(value(node))
    if shape[dim] % num or any(tuple(part.shape) != tuple(value(node)[0].shape) for part in value(node)):
        return None

    def local(rank: Local) -> Any:
        whole = rank.args[0]
        part = value(whole).shape[dim] // num
        return rank.call(node.target, whole, part if isinstance(sizes, int) else [part] * num, dim)

    return Moved(lambda p: _parts(p, dim, num), lambda p: _times(p, dim, num), local)


def sliced(node: fx.Node) -> Moved | None:
    """Whole groups of a dimension (``slice``), or put back among zeros (``slice_backward``)."""
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

    def inwards(placement: Sharded) -> Sharded | None:
        run = size // placement.groups
        if placement.dim != dim or start % run or end % run:
            return None
        return Sharded(dim, part // run)

    def outwards(placement: Sharded) -> Sharded | None:
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

    return Moved(outwards, inwards, local) if is_backward else Moved(inwards, outwards, local)


def _times(placement: Sharded, dim: int, num: int) -> Sharded:
    return Sharded(dim, placement.groups * num) if placement.dim == dim else placement


def _parts(placement: Sharded, dim: int, num: int) -> Sharded | None:
    if placement.dim != dim:
        return placement
    return None if placement.groups % num else Sharded(dim, placement.groups // num)


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "t": transposed_matrix,
        "transpose": transposed,
        "permute": permuted,
        "expand": expanded,
        "unsqueeze": with_dim,
        "as_strided": same_places,
        "squeeze": without_dims,
        "select": picked,
        "unbind": picked,
        "select_backward": put_along(2),
        "stack": put_along(1),
        "slice": cut_along(1),
        "slice_backward": cut_along(2),
        "cat": joined_dims,
        "split": cut_along(2),
        "split_with_sizes": cut_along(2),
        "view": lambda node: [linear(node)],
        "_unsafe_view": lambda node: [linear(node)],
        "reshape": lambda node: [linear(node)],
    }
)
MOVED: Mapping[str, Callable[[fx.Node], Moved | None]] = MappingProxyType(
    {
        "view": reshaped,
        "_unsafe_view": reshaped,
        "reshape": reshaped,
        "cat": joined,
        "split": split,
        "split_with_sizes": split,
        "slice": sliced,
        "slice_backward": sliced,
    }
)
