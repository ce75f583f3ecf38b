"""Attention with queries sharded by tokens: context parallelism.

Keys and values are whole on every rank, or sharded by tokens too and passed around (ring attention: 2310.01889): each
rank attends from its queries to the keys that it has, sends these on meanwhile, and merges the results by their
log-sum-exps. Gradients of keys and values travel with them and return to their rank with a last shift.

With a causal mask, the last ranks would have the most work. A dimension sharded in groups gives every rank tokens from
all along the sequence: of g groups, a rank's first part attends to at most the first g-th of the keys, its second part
to two g-ths, and so on. All ranks do the same work, (g + 1) / 2g of that of all pairs. A mask, of positions computed
from the rank's number, decides at the boundaries.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.facts import tensor, value
from zerofx.ir.sharding.pattern import Lies, Pattern
from zerofx.ir.sharding.rule import Local, ShareCost, argument, num_bytes, read_tensors, results_of, shape_of
from zerofx.scheduler.plan.placements import Sharded
from zerofx.torch_private.operators import OpOverload, schema_of


def places(node: fx.Node) -> dict[str, int]:
    """The position of each argument of a call's operator, by name."""
    assert isinstance(node.target, OpOverload)
    return {argument.name: number for number, argument in enumerate(schema_of(node.target).arguments)}


def find_argument(node: fx.Node, name: str) -> Any:
    """An argument of a call; None if it is not passed or its operator has none of this name."""
    place = places(node)
    return argument(node, place[name], name) if name in place else None


def queries_and_keys(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Queries ``[samples, heads, tokens, size]``, keys and values."""
    return find_argument(node, "query"), find_argument(node, "key"), find_argument(node, "value")


def is_backward(node: fx.Node) -> bool:
    """True for a call of a backward operator."""
    return not places(node).keys().isdisjoint(("grad_out", "grad_out_"))


def mask_name(node: fx.Node) -> str | None:
    """The name of the operator's argument that is added to the scores; None if it takes none."""
    return next((name for name in ("attn_mask", "attn_bias") if name in places(node)), None)


def tensor_names(node: fx.Node) -> list[str]:
    """The names of a call's tensor arguments, in the order of ``read_tensors``."""
    names = list(places(node))
    given = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    return [name for name, source in given if isinstance(source, fx.Node) and isinstance(value(source), Tensor)]


def arguments(node: fx.Node, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange ``given``, arguments by name, as args and kwargs of a call's operator; the rest have their defaults."""
    assert isinstance(node.target, OpOverload)
    args, kwargs = [], {}
    for entry in schema_of(node.target).arguments:
        known = given.get(entry.name, entry.default_value)
        if entry.kwarg_only:
            kwargs[entry.name] = known
        else:
            args.append(known)
    return tuple(args), kwargs


_aten = torch.ops.aten
_TOKENS = 2  # the dimension, of queries, keys, values, results and sums of exponentials
_GROUPS = 4  # of a sequence whose tokens see those before them: 5/8 of all pairs are computed, where 1/2 are needed


def token_patterns(node: fx.Node) -> list[Pattern]:
    """The ways to shard a call by its queries' tokens."""
    queries, keys, _ = (shape_of(source) for source in queries_and_keys(node))
    names, sources, outputs = tensor_names(node), read_tensors(node), results_of(node)
    num_tokens, causal, mask = queries[_TOKENS], bool(find_argument(node, "is_causal")), mask_name(node)
    by_query = {
        name
        for name, source in zip(names, sources, strict=True)
        if name not in ("key", "value", mask) and len(shape_of(source)) > _TOKENS
    }
    asks_for_bias = is_backward(node) and len(outputs) > 3 and outputs[3] is not None
    if (
        find_argument(node, "dropout_p")
        or asks_for_bias
        or any(
            shape_of(source)[_TOKENS] != num_tokens
            for name, source in zip(names, sources, strict=True)
            if name in by_query
        )
    ):
        return []
    if causal and (mask is None or keys[_TOKENS] != num_tokens):
        return []

    def pattern(keys_lie: Lies, gradients_lie: Lies, **how: Any) -> Pattern:
        def read(name: str, source: fx.Node) -> Lies:
            if name == mask:
                rows = len(shape_of(source)) - 2
                return rows if shape_of(source)[rows] == num_tokens > 1 else None
            return keys_lie if name in ("key", "value") else _TOKENS if name in by_query else None

        given: list[Lies] = [_TOKENS if t is not None and t.dim() > _TOKENS else None for t in outputs]
        if is_backward(node):
            given[1:3] = [gradients_lie, gradients_lie]
        return Pattern(tuple(given), tuple(map(read, names, sources)), **how)

    groups = (_GROUPS,) if causal else ()
    work = partial(_work, causal)
    patterns = [
        pattern(None, "sum", local=_attend if causal else None, groups=groups, extra=lambda g: ShareCost(work=work(g)))
    ]
    if find_argument(node, mask or "") is None and keys[_TOKENS] == num_tokens:
        dtype = tensor(queries_and_keys(node)[1]).dtype
        shifted, joined = 2 * num_bytes(keys, dtype), num_bytes(queries, _wide(dtype))
        if is_backward(node):
            gradients = 2 * num_bytes(keys, _wide(dtype))
            shifted, joined = shifted + gradients, joined + gradients

        def extra(num_groups: int) -> ShareCost:
            # Joining reads what was joined and what is added, and writes both; each hand of each rank has a part.
            return ShareCost(shifted_bytes=shifted, traffic_bytes=4 * joined, work=work(num_groups))

        patterns.append(pattern(_TOKENS, _TOKENS, local=_attend_in_ring, groups=groups, extra=extra))
    return patterns


def _work(causal: bool, groups: int) -> float:
    # Of calls whose tokens see those before them all pairs are counted, where half of them are computed.
    return (groups + 1) / groups if causal else 1.0


@dataclass(frozen=True)
class _Share:
    """One rank's share of a call: writes calls for some of its queries and some of the keys that it has."""

    rank: Local
    given: Mapping[str, Any]  # arguments by name
    by_query: tuple[str, ...]
    groups: int
    causal: bool

    @staticmethod
    def from_rank(rank: Local) -> _Share:
        names = tensor_names(rank.node)
        lies = dict(zip(names, rank.rule.inputs, strict=True))
        by_query = tuple(n for n in names if n not in ("key", "value") and isinstance(lies[n], Sharded))
        queries = lies["query"]
        assert isinstance(queries, Sharded)
        given = {**dict(zip(places(rank.node), rank.args, strict=False)), **rank.kwargs}
        causal = bool(given.get("is_causal"))
        return _Share(rank, given, by_query, queries.groups if causal else 1, causal)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return shape_of(self.given["query"])[_TOKENS]

    def attend(self, key: fx.Node, value: fx.Node, positions: fx.Node, seen: Sequence[int]) -> list[fx.Node]:
        """The call's results for all of this rank's queries, and keys at ``positions``.

        The n-th part of its queries attends to the first ``seen[n]`` keys. Keys and values that no query attends to
        have zero gradients.
        """
        own, size = self.positions(self.rank.rank(), self.groups), self.num_tokens // self.groups
        parts = []
        for number, num_keys in enumerate(seen):
            start = number * size
            given = {name: self._run(self.given[name], _TOKENS, start, start + size) for name in self.by_query}
            given |= {"key": self._run(key, _TOKENS, 0, num_keys), "value": self._run(value, _TOKENS, 0, num_keys)}
            if self.causal:
                rows, columns = self._run(own, 0, start, start + size), self._run(positions, 0, 0, num_keys)
                given[str(mask_name(self.rank.node))] = self._mask(rows, columns)
            parts.append(self._call(given, size, num_keys))
        results = parts[-1]
        for number in (0,) if is_backward(self.rank.node) else (0, 1):
            results[number] = self._cat([part[number] for part in parts])
        if is_backward(self.rank.node):
            for number in (1, 2):
                results[number] = self._sum([part[number] for part in parts], shape_of(key)[_TOKENS])
        return results

    def positions(self, owner: fx.Node, groups: int) -> fx.Node:
        """Positions in the sequence of the tokens of a rank: int64, shape [tokens of a rank]."""
        rank, size = self.rank, self.num_tokens // groups
        local = rank.call(_aten.arange.default, self.num_tokens, device=tensor(self.given["query"]).device)
        if groups > 1:
            group = rank.call(_aten.floor_divide.default, local, size)
            local = rank.call(_aten.add.Tensor, local, rank.call(_aten.mul.Tensor, group, size * (rank.num_ranks - 1)))
        return rank.call(_aten.add.Tensor, local, rank.call(_aten.mul.Tensor, owner, size))

    def _mask(self, rows: fx.Node, columns: fx.Node) -> fx.Node:
        """The additive causal mask: where a key comes after a query, a number whose exponential is 0."""
        rank, query = self.rank, tensor(self.given["query"])
        later = rank.call(
            _aten.gt.Tensor, rank.call(_aten.unsqueeze.default, columns, 0), rank.call(_aten.unsqueeze.default, rows, 1)
        )
        zeros = rank.call(
            _aten.zeros.default, [*shape_of(rows), *shape_of(columns)], dtype=query.dtype, device=query.device
        )
        # Not infinity: a query that sees none of some keys has sums of them that count for nothing, but are numbers.
        mask = rank.call(_aten.masked_fill.Scalar, zeros, later, torch.finfo(query.dtype).min / 2)
        if mask_name(rank.node) == "attn_mask":
            return mask
        return rank.call(_aten.expand.default, mask, [*query.shape[:_TOKENS], *shape_of(mask)])

    def _call(self, given: Mapping[str, Any], num_queries: int, num_keys: int) -> list[fx.Node]:
        sizes = {"max_q": num_queries, "max_k": num_keys}
        known = {name: size for name, size in sizes.items() if name in self.given}
        args, kwargs = arguments(self.rank.node, {**self.given, **known, **given, "is_causal": False})
        results = self.rank.call(self.rank.node.target, *args, **kwargs)
        outputs = range(len(results_of(self.rank.node)))
        return [self.rank.call(operator.getitem, results, number) for number in outputs]

    def _run(self, node: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        if (start, stop) == (0, shape_of(node)[dim]):
            return node
        return self.rank.call(_aten.slice.Tensor, node, dim, start, stop)

    def _cat(self, parts: list[fx.Node]) -> fx.Node:
        return parts[0] if len(parts) == 1 else self.rank.call(_aten.cat.default, parts, _TOKENS)

    def _sum(self, parts: list[fx.Node], num_keys: int) -> fx.Node:
        """The sum of gradients of keys; each part has those of the first keys, and is padded with zeros."""
        total: fx.Node | None = None
        for part in reversed(parts):
            missing = num_keys - shape_of(part)[_TOKENS]
            padded = self.rank.call(_aten.constant_pad_nd.default, part, [0, 0, 0, missing]) if missing else part
            total = padded if total is None else self.rank.call(_aten.add.Tensor, total, padded)
        assert total is not None
        return total


def _attend(rank: Local) -> Any:
    """Attend to whole keys and values: each part of the queries to the keys of its group and of all groups before."""
    share = _Share.from_rank(rank)
    key, value = share.given["key"], share.given["value"]
    num_keys = shape_of(key)[_TOKENS]
    positions = rank.call(_aten.arange.default, num_keys, device=tensor(key).device)
    seen = [(number + 1) * num_keys // share.groups for number in range(share.groups)]
    return tuple(share.attend(key, value, positions, seen))


def _attend_in_ring(rank: Local) -> Any:
    """Attend to the keys and values of one rank after the other, sending them on meanwhile."""
    share = _Share.from_rank(rank)
    key, value, size = share.given["key"], share.given["value"], share.num_tokens // share.groups
    seen = [(number + 1) * size for number in range(share.groups)]
    joined: list[fx.Node] = []
    for hand in range(rank.num_ranks):
        owner = rank.call(_aten.remainder.Scalar, rank.call(_aten.sub.Tensor, rank.rank(), hand), rank.num_ranks)
        pending = [rank.start_shift(source) for source in (key, value)] if hand < rank.num_ranks - 1 else []
        if joined and is_backward(rank.node):
            joined[1:3] = [rank.wait_shift(rank.start_shift(total)) for total in joined[1:3]]
        results = share.attend(key, value, share.positions(owner, share.groups), seen)
        joined = (_add_gradients if is_backward(rank.node) else _merge_attention)(rank, joined, results)
        if pending:
            key, value = map(rank.wait_shift, pending)
    if is_backward(rank.node):
        joined[1:3] = [rank.wait_shift(rank.start_shift(total)) for total in joined[1:3]]
    dtypes = [whole.dtype if whole is not None else None for whole in results_of(rank.node)]
    return tuple(_cast(rank, node, dtype) for node, dtype in zip(joined, dtypes, strict=True))


def _add_gradients(rank: Local, joined: list[fx.Node], results: list[fx.Node]) -> list[fx.Node]:
    """Add the gradients from other keys to those so far, in float32 at least, as there are many terms."""
    wide = [_cast(rank, node, _wide(tensor(node).dtype)) for node in results[:3]]
    if joined:
        wide = [rank.call(_aten.add.Tensor, *both) for both in zip(joined[:3], wide, strict=True)]
    return [*wide, *results[3:]]


def _merge_attention(rank: Local, joined: list[fx.Node], results: list[fx.Node]) -> list[fx.Node]:
    """Merge attention to the keys so far with that to others, weighted by their log-sum-exps, in float32 at least."""
    results = [_cast(rank, results[0], _wide(tensor(results[0]).dtype)), *results[1:]]
    if not joined:
        return results
    total = rank.call(_aten.logaddexp.default, joined[1], results[1])
    weighed = []
    for attended, log_sums in (joined[:2], results[:2]):
        weight = rank.call(_aten.exp.default, rank.call(_aten.sub.Tensor, log_sums, total))
        if len(shape_of(weight)) < len(shape_of(attended)):
            weight = rank.call(_aten.unsqueeze.default, weight, -1)
        weighed.append(rank.call(_aten.mul.Tensor, attended, weight))
    return [rank.call(_aten.add.Tensor, *weighed), total, *results[2:]]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def _cast(rank: Local, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    if dtype is None or tensor(node).dtype is dtype:
        return node
    return rank.call(_aten._to_copy.default, node, dtype=dtype)
