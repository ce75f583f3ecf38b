"""Kinds of values computed from a rank's number: masks, indices, and the rank's part of a dimension.

    first = number * size; shifted = indices - first; inside = (shifted >= 0) & (shifted < size)
    picked = embedding(part, masked_fill(shifted, ~inside, 0)); masked_fill(picked, ~inside, 0)      # a partial sum

Each intermediate has a name (``Own``) and the size of this rank's part; only a value derived in exactly this way counts
as a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from zerofx.ir.sharding.grouped import GROUPED, group_placements
from zerofx.ir.sharding.placed_moves import NOTHING, Kind, Kinds, KindsRule, Own, dim_of, same
from zerofx.ir.sharding.rule import argument, read_tensors, shape_of
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Ragged, Sharded

_aten = torch.ops.aten
_ENDS = "ends in "
_TO, _FROM = "to the groups of ", "from the groups of "
SENT, RECEIVED = "sent ", "received "


def _index_select(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """Selection by the rank's number: its part of a dimension with one element for each rank."""
    dim = dim_of(node, 1)
    (index,) = read[1]
    is_own = isinstance(index, Own) and index.what in ("number", "head")
    fits = index == Own("head") or shape_of(read_tensors(node)[0])[dim] == num_ranks
    return frozenset({Sharded(dim)}) if is_own and fits and REPLICATED in read[0] else NOTHING


def _sole(kinds: Kinds) -> Own | None:
    own = [kind for kind in kinds if isinstance(kind, Own)]
    return own[0] if len(own) == len(kinds) == 1 else None


def _one(what: str, size: int = 0) -> Kinds:
    return frozenset({Own(what, size)})


def _product(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    size = argument(node, 1, "other")
    return _one("first place", size) if read == [_one("number")] and isinstance(size, int) else None


def _difference(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    first = _sole(read[-1])
    is_place = first is not None and first.what == "first place" and REPLICATED in read[0]
    return _one("shifted index", first.size) if first is not None and is_place else None


def _greater_equal(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _sole(read[0])
    is_bound = own is not None and own.what == "shifted index" and argument(node, 1, "other") == 0
    return _one("lower bound", own.size) if own is not None and is_bound else None


def _less(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _sole(read[0])
    is_bound = own is not None and own.what == "shifted index" and argument(node, 1, "other") == own.size
    return _one("upper bound", own.size) if own is not None and is_bound else None


def _both(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = {kind.what: kind.size for kinds in read if (kind := _sole(kinds)) is not None}
    if own.keys() == {"lower bound", "upper bound"} and len(set(own.values())) == 1:
        return _one("place inside", own["lower bound"])
    if own.keys() == {"place inside"} and REPLICATED in read[0] | read[1]:
        return _one("place inside", own["place inside"])
    if own.keys() == {"hit", "place inside"} and len(set(own.values())) == 1:
        return frozenset({Sharded(len(shape_of(node)) - 1)})
    return None


def _not(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _sole(read[0])
    return _one("place elsewhere", own.size) if own is not None and own.what == "place inside" else None


def _unequal(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    return _one("later rank") if read == [_one("number")] and argument(node, 1, "other") == 0 else None


def _equal(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """Comparison of this rank's indices with all of its positions (one-hot)."""
    own, places = _sole(read[0]), read_tensors(node)[-1]
    is_hit = own is not None and own.what == "own index" and places.target is _aten.arange.default
    return _one("hit", own.size) if own is not None and is_hit and shape_of(places) == (own.size,) else None


def _fill_mask(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """Zeros at other ranks' positions: the result is a partial sum."""
    mask, source = _sole(read[1]), _sole(read[0])
    if mask is None or mask.what not in ("place elsewhere", "later rank") or argument(node, 2, "value") != 0:
        return None
    if source == Own("shifted index", mask.size):
        return _one("own index", mask.size)
    is_picked = source == Own("picked", mask.size) and mask.what == "place elsewhere"
    return frozenset({SUM}) if is_picked or REPLICATED in read[0] else NOTHING


def _rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _sole(read[1])
    table = read_tensors(node)[0]
    fits = own is not None and own.what == "own index" and shape_of(table)[0] == own.size and Sharded(0) in read[0]
    return _one("picked", own.size) if own is not None and fits else None


def _gather(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own, dim = _sole(read[1]), dim_of(node, 1)
    fits = own is not None and own.what == "own index" and Sharded(dim) in read[0]
    return _one("picked", own.size) if own is not None and fits else None


def _gradient_of_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _sole(read[1])
    fits = own is not None and own.what == "own index" and shape_of(node)[0] == own.size and SUM in read[0]
    return frozenset({Sharded(0)}) if fits else None


def _head(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    return _one("head") if read == [_one("number")] else None


def _put(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """A rank's part among zeros: a partial sum; several ranks may write to the same position."""
    dim, (zeros, index, part) = dim_of(node, 1), read
    return frozenset({SUM}) if SUM in zeros and _sole(index) == Own("head") and Sharded(dim) in part else None


def _own_ends(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    is_own = read[1] == _one("number") and REPLICATED in read[0] and argument(node, 2, "num_ranks") == num_ranks
    return _one(_ENDS + read_tensors(node)[0].name, argument(node, 3, "num_rows")) if is_own else None


def _own_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    rows, _, rank = read
    is_own = rank == _one("number") and argument(node, 3, "num_ranks") == num_ranks
    return frozenset({_row_placement(node)}) if is_own and REPLICATED in rows else NOTHING


def _whole_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    rows, _, rank = read
    is_own = rank == _one("number") and argument(node, 3, "num_ranks") == num_ranks
    return frozenset({SUM}) if is_own and _row_placement(node) in rows else NOTHING


def _group_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    groups, ends = read[0], _sole(read[1])
    is_own = ends is not None and ends.what.startswith(_ENDS) and Sharded(0) in groups
    fits = is_own and ends.size == shape_of(node)[0]  # type: ignore[union-attr]  # it is some
    return frozenset({Ragged(0, ends.what.removeprefix(_ENDS))}) if fits else NOTHING  # type: ignore[union-attr]


def _add_group_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    rows, ends = read[0], _sole(read[1])
    name = "" if ends is None else ends.what.removeprefix(_ENDS)
    return frozenset({Sharded(0)}) if Ragged(0, name) in rows else NOTHING


def _row_placement(node: fx.Node) -> Ragged:
    return Ragged(dim_of(node, 4), read_tensors(node)[1].name)


def _row_routes(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """The rows that a rank sends, and the places of those that it receives."""
    places, ends, rank = read
    is_own = rank == _one("number") and REPLICATED in places & ends and argument(node, 3, "num_ranks") == num_ranks
    route = f"{_TO if argument(node, 8, 'outward') else _FROM}{read_tensors(node)[1].name}"
    return (_one(f"send {route}"), _one(f"land {route}")) if is_own else (NOTHING, NOTHING)


def _pack_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    rows, send = read[0], _sole(read[1])
    route = "" if send is None else send.what.removeprefix("send ")
    source = Sharded(0) if route.startswith(_TO) else Ragged(0, route.removeprefix(_FROM))
    return _one(SENT + route) if source in rows else NOTHING


def _land_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    received, land = map(_sole, read)
    route = "" if received is None else received.what.removeprefix(RECEIVED)
    if not route or land is None or land.what != f"land {route}":
        return NOTHING
    return frozenset({Ragged(0, route.removeprefix(_TO)) if route.startswith(_TO) else Sharded(0)})


def _group_product(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """A grouped product of this rank's groups: their matrices and their rows."""
    ends = _sole(read[2])
    if ends is None or not ends.what.startswith(_ENDS):
        return None
    outputs, inputs = group_placements(node, ends.what.removeprefix(_ENDS))
    fits = all(
        lies is None
        or (_kind(lies) in kinds and (not isinstance(lies, Ragged) or shape_of(source)[lies.dim] == ends.size))
        for lies, kinds, source in zip(inputs, read, read_tensors(node), strict=True)
    )
    return tuple(frozenset({_kind(lies)}) if fits else NOTHING for lies in outputs)


def _kind(lies: object) -> Kind:
    assert isinstance(lies, int | Ragged)
    return Sharded(lies) if isinstance(lies, int) else lies


RANK_NUMBER_RULES: Mapping[str, KindsRule] = MappingProxyType(
    {
        **dict.fromkeys(("view", "expand", "clone", "unsqueeze", "squeeze", "_to_copy"), same),
        "mul": _product,
        "sub": _difference,
        "ge": _greater_equal,
        "lt": _less,
        "bitwise_and": _both,
        "logical_not": _not,
        "ne": _unequal,
        "eq": _equal,
        "masked_fill": _fill_mask,
        "embedding": _rows,
        "gather": _gather,
        "embedding_dense_backward": _gradient_of_rows,
        "floor_divide": _head,
        "index_select": _index_select,
        "index_copy": _put,
        "zerofx::row_routes": _row_routes,
        "zerofx::pack_rows": _pack_rows,
        "zerofx::land_rows": _land_rows,
        "zerofx::add_rows": _land_rows,
        "zerofx::own_ends": _own_ends,
        "zerofx::own_rows": _own_rows,
        "zerofx::group_rows": _group_rows,
        "zerofx::add_group_rows": _add_group_rows,
        "zerofx::whole_rows": _whole_rows,
        **dict.fromkeys(GROUPED, _group_product),
    }
)
