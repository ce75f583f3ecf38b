"""Kinds through calls that move, slice, concatenate or create elements, from local shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.facts import ints, value
from zerofx.ir.sharding.rule import argument, dims_of, read_tensors, shape_of
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Placement, Sharded, local_shape
from zerofx.torch_private.operators import base_name


@dataclass(frozen=True)
class Own:
    """A value computed from this rank's number: ``what`` names it, ``size`` is that of its part of a dimension."""

    what: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.what} of this rank"


@dataclass(frozen=True)
class Averaged:
    """Every rank has a tensor of the value's shape; the value is their mean."""

    def __str__(self) -> str:
        return "parts whose mean it is"


Kind = Placement | Own | Averaged
Kinds = frozenset[Kind]
"""Possible kinds of one value: shapes alone may leave several. Empty: none is possible."""

KindsRule = Callable[[fx.Node, Sequence[Kinds], int], Kinds | tuple[Kinds, ...] | None]
"""Kinds of a call's result, or of each of several, by those of its tensor arguments and the number of ranks; None where
nothing is known of such a call."""

NOTHING: Kinds = frozenset()
WHOLE: Kinds = frozenset({REPLICATED})


def parts_of(kinds: Kinds) -> frozenset[Sharded]:
    """The kinds in which a rank has a part of the value."""
    return frozenset(kind for kind in kinds if isinstance(kind, Sharded))


_aten = torch.ops.aten
_MOST_GROUPS = 64


def same(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """The kinds of the source: the result has its placement."""
    return read[0]


def _view(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """The same elements in the same order: this rank's are the same number of equally long contiguous runs."""
    old, new = shape_of(read_tensors(node)[0]), shape_of(node)
    possible: set[Kind] = set()
    for kind in read[0]:
        if not isinstance(kind, Sharded):
            possible.add(kind)
            continue
        num_runs = prod(old[: kind.dim]) * kind.groups
        for dim, size in enumerate(new):
            groups, rest = divmod(num_runs, prod(new[:dim]))
            if (
                not rest
                and groups
                and size % groups == 0
                and num_runs * (size // groups) * prod(new[dim + 1 :]) == prod(old)
            ):
                possible.add(Sharded(dim, groups))
    return frozenset(possible)


def chunk_placements(parts: fx.Node, num_ranks: int) -> Kinds:
    """Placements of each rank's chunk in the tensor that was split into ``parts``, ranks first."""
    shape, kinds, node = shape_of(parts)[1:], {Sharded(0)}, parts
    while True:
        possible = {kind for kind in kinds if local_shape(shape_of(node), kind, num_ranks) == shape}
        if possible and node is not parts:
            return frozenset(possible)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.target not in _MOVING:
            return frozenset(any_part(shape, range(len(shape))))
        if node.target is _aten.permute.default:
            kinds = {Sharded(ints(node.args[1])[kind.dim], kind.groups) for kind in kinds}
        elif node.target is _aten.view.default:
            whole = shape_of(source)
            kinds = {
                kind
                for kind in any_part(whole, range(len(whole)))
                if isinstance(kind, Sharded)
                and _runs(whole, kind, num_ranks) in {_runs(shape_of(node), each, num_ranks) for each in kinds}
            }
        node = source


_MOVING = frozenset({_aten.clone.default, _aten.permute.default, _aten.view.default})


def _runs(shape: Sequence[int], kind: Sharded, num_ranks: int) -> tuple[int, int]:
    """The number of contiguous runs that one rank has of a value of ``shape``, and their length, if they are equal."""
    after = prod(shape[kind.dim + 1 :])
    size, rest = divmod(shape[kind.dim], kind.groups * num_ranks)
    return (0, 0) if rest else (prod(shape[: kind.dim]) * kind.groups, size * after)


def _expand(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    source, shape = shape_of(read_tensors(node)[0]), shape_of(node)
    front = len(shape) - len(source)
    repeated = [d for d in range(len(shape)) if d < front or source[d - front] == 1]
    possible: set[Kind] = set()
    for kind in read[0]:
        if not isinstance(kind, Sharded):
            possible.add(kind)
        elif source[kind.dim] == shape[kind.dim + front]:
            possible.add(Sharded(kind.dim + front, kind.groups))
    if REPLICATED in read[0]:  # each rank may repeat it for its own part
        possible |= any_part(shape, repeated)
    return frozenset(possible)


def any_part(shape: Sequence[int], dims: Sequence[int]) -> set[Kind]:
    """All shardings along one of ``dims`` that a tensor of local ``shape`` can have."""
    return {
        Sharded(dim, groups)
        for dim in dims
        for groups in range(1, min(shape[dim], _MOST_GROUPS) + 1)
        if shape[dim] % groups == 0
    }


def _fill(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """The kinds of a constant tensor: all; zeros are a partial sum, too."""
    shape, target = shape_of(node), node.target
    name = base_name(target)  # type: ignore[arg-type]  # an operator
    numbers = [item for item in node.args if isinstance(item, int | float)]
    is_zero = "zeros" in name or ("full" in name and numbers[-1:] == [0])
    return frozenset({REPLICATED, *any_part(shape, range(len(shape))), *([SUM] if is_zero else [])})


def _whole_alone(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    return WHOLE


def dim_of(node: fx.Node, index: int) -> int:
    """The dimension in a call's argument, counted from the front."""
    return dims_of(argument(node, index, "dim", 0), len(shape_of(read_tensors(node)[0])))[0]


def _cut(kinds: Kinds, dim: int, size: int, parts: Sequence[tuple[int, int]]) -> tuple[Kinds, ...]:
    """The kinds of ``parts``, each a start and an end in a dimension of ``size``."""
    possible: list[set[Kind]] = [set() for _ in parts]
    for kind in kinds:
        for part, (start, end) in zip(possible, parts, strict=True):
            if not isinstance(kind, Sharded) or kind.dim != dim:
                part.add(kind)
            elif (run := size // kind.groups) and start % run == 0 == end % run and end > start:
                part.add(Sharded(dim, (end - start) // run))
    return tuple(map(frozenset, possible))


def _split(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...]:
    dim = dim_of(node, 2)
    ends = list(itertools.accumulate(part.shape[dim] for part in value(node)))
    return _cut(read[0], dim, shape_of(read_tensors(node)[0])[dim], list(zip([0, *ends], ends, strict=False)))


def _bounds(node: fx.Node, first: int, size: int) -> tuple[int, int]:
    start, end = argument(node, first, "start") or 0, argument(node, first + 1, "end")
    end = size if end is None else min(end, size)
    return (start % size if start < 0 else start), (end % size if end < 0 else end)


def _slice(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = dim_of(node, 1)
    size = shape_of(read_tensors(node)[0])[dim]
    if argument(node, 4, "step", 1) != 1:
        return frozenset(kind for kind in read[0] if not isinstance(kind, Sharded) or kind.dim != dim)
    return _cut(read[0], dim, size, [_bounds(node, 2, size)])[0]


def _slice_gradient(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim, size = dim_of(node, 2), shape_of(node)[dim_of(node, 2)]
    part = shape_of(read_tensors(node)[0])[dim]
    start, _ = _bounds(node, 3, size)
    possible: set[Kind] = set()
    for kind in read[0]:
        if not isinstance(kind, Sharded) or kind.dim != dim:
            possible.add(kind)
        elif argument(node, 5, "step", 1) == 1 and size % (run := part // kind.groups) == 0 == start % run:
            possible.add(Sharded(dim, size // run))
    return frozenset(possible)


def _cat(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = dims_of(argument(node, 1, "dim", 0), len(shape_of(node)))[0]
    listed = [(k, shape_of(s)) for k, s in zip(read, read_tensors(node), strict=True) if shape_of(s) != (0,)]
    alike = frozenset.intersection(*(kinds for kinds, _ in listed))
    possible = {kind for kind in alike if not isinstance(kind, Sharded) or kind.dim != dim or len(listed) == 1}
    runs = [
        {shape[dim] // k.groups: k.groups for k in kinds if isinstance(k, Sharded) and k.dim == dim}
        for kinds, shape in listed
    ]
    for run in sorted(set.intersection(*(set(each) for each in runs))):
        possible.add(Sharded(dim, sum(each[run] for each in runs)))
    return frozenset(possible)


def _select_gradient(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = dims_of(argument(node, 2, "dim"), len(shape_of(node)))[0]
    return frozenset(
        Sharded(kind.dim + (kind.dim >= dim), kind.groups) if isinstance(kind, Sharded) else kind for kind in read[0]
    )


MOVES: Mapping[str, KindsRule] = MappingProxyType(
    {
        **dict.fromkeys(("clone", "_to_copy", "detach", "alias", "lift_fresh_copy"), same),
        **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
        **dict.fromkeys(
            (
                "full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                "ones_like", "full_like", "empty_like",
            ),
            _fill,
        ),
        **dict.fromkeys(("arange", "scalar_tensor"), _whole_alone),
        "expand": _expand,
        "split": _split,
        "split_with_sizes": _split,
        "slice": _slice,
        "slice_backward": _slice_gradient,
        "cat": _cat,
        "select_backward": _select_gradient,
    }
)  # fmt: skip
