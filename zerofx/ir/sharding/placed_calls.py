"""How the result of one rank's call may lie, by how what it reads does: what the check of placements knows of calls.

Three sources: how elements move through views, cuts and joins of local shapes; what a rank's number becomes on its way
to a mask (``Own``); and of all other calls the rules of ``zerofx/ir/sharding`` whose share of the work is the call
itself, asked of the call with whole sizes. What a rule writes in the place of a call is thus followed operator by
operator, and not taken from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.facts import ints, is_random, set_value, value
from zerofx.ir.op_kernels.own_draws import OWN_DRAWS
from zerofx.ir.sharding.rule import argument, dims_of, outputs_of, read_tensors, shape_of
from zerofx.ir.sharding.rules import Ways, rules_of
from zerofx.scheduler.plan.placements import REPLICATED, SUM, Partial, Placement, Sharded, local_shape
from zerofx.torch_private.operators import OpOverload, schema_of

_aten = torch.ops.aten
_MOST_COMBINATIONS = 64
_MOST_GROUPS = 64
_SUM_OF_LOSSES = 2  # as torch counts reductions


@dataclass(frozen=True)
class Own:
    """What follows from this rank's number: ``what`` says how, ``size`` is that of its part of a dimension."""

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
"""How one value may lie: of some calls several ways are right as far as shapes tell. None: nothing that makes sense."""

Rule = Callable[[fx.Node, Sequence[Kinds], int], Kinds | tuple[Kinds, ...] | None]
"""Kinds of a call's result, or of each of several, by those of its tensor arguments and the number of ranks; None where
nothing is known of such a call."""

_NOTHING: Kinds = frozenset()
_WHOLE: Kinds = frozenset({REPLICATED})


def kinds_of_call(
    node: fx.Node, read: Sequence[Kinds], num_ranks: int, known: dict[Any, Any]
) -> tuple[Kinds, ...] | None:
    """Kinds of each result; None where nothing is known of such a call. ``known`` remembers calls that are alike."""
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    if target in _OWN_DRAWS:
        return (frozenset.intersection(*(_parts(kinds) for kinds in read[:1])),) * len(outputs_of(node))
    if is_random(node):
        return (_WHOLE if all(REPLICATED in kinds for kinds in read) else _NOTHING,) * len(outputs_of(node))
    name = schema_of(target).name.removeprefix("aten::")
    rule = RULES.get(name)
    if any(isinstance(kind, Own) for kinds in read for kind in kinds):
        rule = _OF_OWN.get(name)
        if rule is None:
            return None
    possible = _by_rules(node, read, num_ranks, known) if rule is None else rule(node, read, num_ranks)
    return (possible,) if isinstance(possible, frozenset) else possible


_OWN_DRAWS = frozenset(OWN_DRAWS.values())


def _parts(kinds: Kinds) -> frozenset[Sharded]:
    return frozenset(kind for kind in kinds if isinstance(kind, Sharded))


# ------------------------------------------------------------------------------------------- by the operators' rules


def _by_rules(node: fx.Node, read: Sequence[Kinds], num_ranks: int, known: dict[Any, Any]) -> tuple[Kinds, ...] | None:
    def described(source: fx.Node) -> Any:
        given = value(source)
        return (tuple(given.shape), given.dtype) if isinstance(given, Tensor) else source.name

    key = (node.target, repr(fx.map_arg((node.args, node.kwargs), described)), tuple(read))
    if key not in known:
        known[key] = _asked(node, read, num_ranks)
    possible: tuple[Kinds, ...] | None = known[key]
    return possible


def _asked(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """For each way in which dimensions of arguments may be longer on all ranks together, the rules of that call."""
    choices = [{k.dim if isinstance(k, Sharded) else None for k in kinds if _is_placement(k)} for kinds in read]
    combinations = list(itertools.product(*choices)) if prod(map(len, choices)) <= _MOST_COMBINATIONS else []
    # Of many, those in which arguments have the same dimension in parts, all that may.
    for dim in set().union(*choices) if not combinations else ():
        combinations.append(tuple(next(d for d in (dim, None, *each) if d in each) for each in choices if each))
    outputs: list[set[Kind]] = [set() for _ in outputs_of(node)]
    takes_sizes = any(each.name in _SIZES for each in schema_of(node.target).arguments)  # type: ignore[arg-type]  # an operator
    for dims in combinations:
        if not any(dim is not None for dim in dims) and all(REPLICATED in kinds for kinds in read):
            for kinds in outputs:
                kinds.add(REPLICATED)
        whole = _whole_call(node, dims, num_ranks)
        if whole is None and takes_sizes:
            return None  # local ones: the call of whole sizes has others
        if whole is None or len(outputs_of(whole)) != len(outputs):
            continue
        allowed = [
            {k for k in kinds if _is_placement(k) and (k.dim if isinstance(k, Sharded) else None) == dim}
            for kinds, dim in zip(read, dims, strict=True)
        ]
        shards = [[k for k in kinds if isinstance(k, Sharded)] for kinds in allowed]
        for rule in rules_of(Ways.of(whole), num_ranks, shards, [()] * len(outputs), plain=False):
            if any(placement not in kinds for placement, kinds in zip(rule.inputs, allowed, strict=True)):
                continue
            is_mean = node.target in _MEANS and rule.local is not None
            if rule.local is not None and not is_mean and node.target not in _WITH_SIZES:
                continue
            for kinds, placement in zip(outputs, rule.outputs, strict=True):
                if placement is not None:
                    kinds.add(Averaged() if is_mean and isinstance(placement, Partial) else placement)
    return tuple(frozenset(kinds) for kinds in outputs)


_SIZES = frozenset({"size", "sizes", "input_size", "input_sizes", "self_size", "shape", "output_size", "num_weights"})
_MEANS = frozenset({_aten.mean.dim, _aten.mean.default})
_WITH_SIZES = frozenset({_aten.convolution_backward.default})  # whose rules change sizes in its arguments alone


def _is_placement(kind: Kind) -> bool:
    return not isinstance(kind, Own | Averaged)


def _whole_call(node: fx.Node, dims: Sequence[int | None], num_ranks: int) -> fx.Node | None:
    """The call with arguments that are as long in ``dims`` as on all ranks together; None where it cannot be made."""
    graph, longer = fx.Graph(), iter(dims)

    def whole(source: fx.Node) -> fx.Node:
        given = value(source)
        copy = graph.placeholder(source.name)
        if isinstance(given, Tensor):
            shape, dim = list(given.shape), next(longer)
            if dim is not None:
                shape[dim] *= num_ranks
            given = torch.empty(shape, dtype=given.dtype, device="meta")
        return set_value(copy, given)

    args, kwargs = fx.map_arg((tuple(node.args), dict(node.kwargs)), whole)
    if node.target in _WITH_SIZES and dims[0] == 1 and args[3]:
        args = (*args[:3], [size * num_ranks for size in ints(args[3])], *args[4:])
    kwargs = {name: "meta" if isinstance(item, torch.device) else item for name, item in kwargs.items()}
    call = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]  # an operator
    given_args, given_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    try:
        return set_value(call, node.target(*given_args, **given_kwargs))  # type: ignore[operator]  # an operator
    except (RuntimeError, ValueError, AssertionError):  # torch's own word on shapes
        return None


# ---------------------------------------------------------------------------------------------- how elements move


def _same(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    return read[0]


def _viewed(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """The same elements in the same order: those of this rank are as many runs of as many elements."""
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


def of_ranks_first(parts: fx.Node, num_ranks: int) -> Kinds:
    """Where what each rank is sent lies in the value that ``parts``, with a first dimension of ranks, was made of."""
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
    """How many runs of elements one rank has of a value of ``shape``, and how long they are, if all are alike."""
    after = prod(shape[kind.dim + 1 :])
    size, rest = divmod(shape[kind.dim], kind.groups * num_ranks)
    return (0, 0) if rest else (prod(shape[: kind.dim]) * kind.groups, size * after)


def _expanded(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
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
    """Parts of a local ``shape`` along one of ``dims``."""
    return {
        Sharded(dim, groups)
        for dim in dims
        for groups in range(1, min(shape[dim], _MOST_GROUPS) + 1)
        if shape[dim] % groups == 0
    }


def _filled(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """The same number everywhere lies in any way; zeros add up to zeros, too."""
    shape, target = shape_of(node), node.target
    name = schema_of(target).name.removeprefix("aten::")  # type: ignore[arg-type]  # an operator
    numbers = [item for item in node.args if isinstance(item, int | float)]
    is_zero = "zeros" in name or ("full" in name and numbers[-1:] == [0])
    return frozenset({REPLICATED, *any_part(shape, range(len(shape))), *([SUM] if is_zero else [])})


def _whole_alone(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    return _WHOLE


def _dim(node: fx.Node, index: int, default: int = 0) -> int:
    return dims_of(node, argument(node, index, "dim", default), len(shape_of(read_tensors(node)[0])))[0]


def _cut(kinds: Kinds, dim: int, size: int, parts: Sequence[tuple[int, int]]) -> tuple[Kinds, ...]:
    """Of ``parts`` of a dimension of ``size``, from their first places to their ends."""
    possible: list[set[Kind]] = [set() for _ in parts]
    for kind in kinds:
        for part, (start, end) in zip(possible, parts, strict=True):
            if not isinstance(kind, Sharded) or kind.dim != dim:
                part.add(kind)
            elif (run := size // kind.groups) and start % run == 0 == end % run and end > start:
                part.add(Sharded(dim, (end - start) // run))
    return tuple(map(frozenset, possible))


def _split(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...]:
    dim = _dim(node, 2)
    ends = list(itertools.accumulate(part.shape[dim] for part in value(node)))
    return _cut(read[0], dim, shape_of(read_tensors(node)[0])[dim], list(zip([0, *ends], ends, strict=False)))


def _bounds(node: fx.Node, first: int, size: int) -> tuple[int, int]:
    start, end = argument(node, first, "start") or 0, argument(node, first + 1, "end")
    end = size if end is None else min(end, size)
    return (start % size if start < 0 else start), (end % size if end < 0 else end)


def _sliced(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = _dim(node, 1)
    size = shape_of(read_tensors(node)[0])[dim]
    if argument(node, 4, "step", 1) != 1:
        return frozenset(kind for kind in read[0] if not isinstance(kind, Sharded) or kind.dim != dim)
    return _cut(read[0], dim, size, [_bounds(node, 2, size)])[0]


def _slice_gradient(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim, size = _dim(node, 2), shape_of(node)[_dim(node, 2)]
    part = shape_of(read_tensors(node)[0])[dim]
    start, _ = _bounds(node, 3, size)
    possible: set[Kind] = set()
    for kind in read[0]:
        if not isinstance(kind, Sharded) or kind.dim != dim:
            possible.add(kind)
        elif argument(node, 5, "step", 1) == 1 and size % (run := part // kind.groups) == 0 == start % run:
            possible.add(Sharded(dim, size // run))
    return frozenset(possible)


def _joined(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = dims_of(node, argument(node, 1, "dim", 0), len(shape_of(node)))[0]
    listed = [(k, shape_of(s)) for k, s in zip(read, read_tensors(node), strict=True) if shape_of(s) != (0,)]
    alike = frozenset.intersection(*(kinds for kinds, _ in listed))
    possible = {kind for kind in alike if not isinstance(kind, Sharded) or kind.dim != dim or len(listed) == 1}
    runs = [
        {shape[dim] // k.groups: k.groups for k in kinds if isinstance(k, Sharded) and k.dim == dim}
        for kinds, shape in listed
    ]
    for run in set.intersection(*(set(each) for each in runs)):
        possible.add(Sharded(dim, sum(each[run] for each in runs)))
    return frozenset(possible)


def _picked_gradient(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    dim = dims_of(node, argument(node, 2, "dim"), len(shape_of(node)))[0]
    return frozenset(
        Sharded(kind.dim + (kind.dim >= dim), kind.groups) if isinstance(kind, Sharded) else kind for kind in read[0]
    )


def _index_select(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds:
    """With a rank's number as the index: its part of a dimension that has one place for each."""
    dim = _dim(node, 1)
    (index,) = read[1]
    is_own = isinstance(index, Own) and index.what in ("number", "head")
    fits = index == Own("head") or shape_of(read_tensors(node)[0])[dim] == num_ranks
    return frozenset({Sharded(dim)}) if is_own and fits and REPLICATED in read[0] else _NOTHING


def _where(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """Of a number in the place of a tensor torch has no rule: what lies there is elementwise."""
    if node.target is not _aten.where.ScalarOther:
        return _by_rules(node, read, num_ranks, {})
    shape, possible = shape_of(node), set[Kind]({REPLICATED} if all(REPLICATED in kinds for kinds in read) else ())
    for kind in any_part(shape, range(len(shape))):
        assert isinstance(kind, Sharded)
        behind = len(shape) - kind.dim
        fits = True
        for kinds, source in zip(read, map(shape_of, read_tensors(node)), strict=True):
            is_part = len(source) >= behind and source[-behind] == shape[kind.dim]
            fits &= (Sharded(len(source) - behind, kind.groups) if is_part else REPLICATED) in kinds
        possible |= {kind} if fits else set()
    return (frozenset(possible),)


def _divided(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    if Averaged() not in read[0]:
        possible = _by_rules(node, read, num_ranks, {})
        return None if possible is None else possible[0]
    return frozenset({SUM}) if argument(node, 1, "other") == num_ranks else frozenset({Averaged()})


def _nll(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> tuple[Kinds, ...] | None:
    """Losses of this rank's rows, and how many count, add up; means of them do not."""
    possible = _by_rules(node, read, num_ranks, {})
    is_sum = argument(node, 3, "reduction") == _SUM_OF_LOSSES and argument(node, 2, "weight") is None
    if (
        is_sum
        and any(kind.dim == 0 for kind in _parts(read[0] & read[1]))
        and len(shape_of(read_tensors(node)[0])) == 2
    ):
        return frozenset({SUM}), frozenset({SUM})
    return possible


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("clone", "_to_copy", "detach", "alias", "lift_fresh_copy"), _same),
        **dict.fromkeys(("view", "_unsafe_view", "reshape"), _viewed),
        **dict.fromkeys(
            (
                "full", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like",
                "ones_like", "full_like", "empty_like",
            ),
            _filled,
        ),
        **dict.fromkeys(("arange", "scalar_tensor"), _whole_alone),
        "expand": _expanded,
        "split": _split,
        "split_with_sizes": _split,
        "slice": _sliced,
        "slice_backward": _slice_gradient,
        "cat": _joined,
        "select_backward": _picked_gradient,
        "nll_loss_forward": _nll,
        "div": _divided,
        "where": _where,
    }
)  # fmt: skip

# ------------------------------------------------------------------------------- what becomes of a rank's number


def _only(kinds: Kinds) -> Own | None:
    own = [kind for kind in kinds if isinstance(kind, Own)]
    return own[0] if len(own) == len(kinds) == 1 else None


def _one(what: str, size: int = 0) -> Kinds:
    return frozenset({Own(what, size)})


def _product(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    size = argument(node, 1, "other")
    return _one("first place", size) if read == [_one("number")] and isinstance(size, int) else None


def _difference(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    first = _only(read[-1])
    is_place = first is not None and first.what == "first place" and REPLICATED in read[0]
    return _one("shifted index", first.size) if first is not None and is_place else None


def _at_least(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _only(read[0])
    is_bound = own is not None and own.what == "shifted index" and argument(node, 1, "other") == 0
    return _one("lower bound", own.size) if own is not None and is_bound else None


def _below(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _only(read[0])
    is_bound = own is not None and own.what == "shifted index" and argument(node, 1, "other") == own.size
    return _one("upper bound", own.size) if own is not None and is_bound else None


def _both(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = {kind.what: kind.size for kinds in read if (kind := _only(kinds)) is not None}
    if own.keys() == {"lower bound", "upper bound"} and len(set(own.values())) == 1:
        return _one("place inside", own["lower bound"])
    if own.keys() == {"place inside"} and REPLICATED in read[0] | read[1]:
        return _one("place inside", own["place inside"])
    if own.keys() == {"hit", "place inside"} and len(set(own.values())) == 1:
        return frozenset({Sharded(len(shape_of(node)) - 1)})
    return None


def _not(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _only(read[0])
    return _one("place elsewhere", own.size) if own is not None and own.what == "place inside" else None


def _unequal(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    return _one("later rank") if read == [_one("number")] and argument(node, 1, "other") == 0 else None


def _equal(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """An index among this rank's places next to all of them."""
    own, places = _only(read[0]), read_tensors(node)[-1]
    is_hit = own is not None and own.what == "own index" and places.target is _aten.arange.default
    return _one("hit", own.size) if own is not None and is_hit and shape_of(places) == (own.size,) else None


def _masked(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """Zeros where another rank has the place: what is left adds up."""
    mask, source = _only(read[1]), _only(read[0])
    if mask is None or mask.what not in ("place elsewhere", "later rank") or argument(node, 2, "value") != 0:
        return None
    if source == Own("shifted index", mask.size):
        return _one("own index", mask.size)
    is_picked = source == Own("picked", mask.size) and mask.what == "place elsewhere"
    return frozenset({SUM}) if is_picked or REPLICATED in read[0] else _NOTHING


def _rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _only(read[1])
    table = read_tensors(node)[0]
    fits = own is not None and own.what == "own index" and shape_of(table)[0] == own.size and Sharded(0) in read[0]
    return _one("picked", own.size) if own is not None and fits else None


def _gathered(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own, dim = _only(read[1]), _dim(node, 1)
    fits = own is not None and own.what == "own index" and Sharded(dim) in read[0]
    return _one("picked", own.size) if own is not None and fits else None


def _gradient_of_rows(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    own = _only(read[1])
    fits = own is not None and own.what == "own index" and shape_of(node)[0] == own.size and SUM in read[0]
    return frozenset({Sharded(0)}) if fits else None


def _head(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    return _one("head") if read == [_one("number")] else None


def _put(node: fx.Node, read: Sequence[Kinds], num_ranks: int) -> Kinds | None:
    """A rank's part among zeros, several ranks' in the same place, too."""
    dim, (zeros, index, part) = _dim(node, 1), read
    return frozenset({SUM}) if SUM in zeros and _only(index) == Own("head") and Sharded(dim) in part else None


_OF_OWN: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("view", "expand", "clone", "unsqueeze", "squeeze", "_to_copy"), _same),
        "mul": _product,
        "sub": _difference,
        "ge": _at_least,
        "lt": _below,
        "bitwise_and": _both,
        "logical_not": _not,
        "ne": _unequal,
        "eq": _equal,
        "masked_fill": _masked,
        "embedding": _rows,
        "gather": _gathered,
        "embedding_dense_backward": _gradient_of_rows,
        "floor_divide": _head,
        "index_select": _index_select,
        "index_copy": _put,
    }
)
