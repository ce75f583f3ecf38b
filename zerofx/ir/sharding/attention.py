"""Attention: samples, heads, and the tokens of queries."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.sharding.pattern import Pattern
from zerofx.ir.sharding.rule import Local, read_tensors, results_of, shape_of
from zerofx.ir.sharding.shapes import PatternsOf
from zerofx.ir.sharding.tokens import find_argument, is_backward, places, queries_and_keys, token_patterns
from zerofx.torch_private.operators import OpOverload, base_name

_aten = torch.ops.aten


def _attention(node: fx.Node) -> list[Pattern]:
    """Patterns by samples and by heads, the first two dimensions of every tensor; a mask may be broadcast over both.

    With grouped-query attention, each head of keys and values serves several consecutive heads of queries. With fewer
    of them than ranks, every rank keeps all keys and values and selects the head that its queries use.
    """
    tensors, outputs = read_tensors(node), results_of(node)
    queries, keys, _ = (shape_of(source) for source in queries_and_keys(node))
    masks = [source for name in ("attn_mask", "attn_bias") if isinstance(source := find_argument(node, name), fx.Node)]

    def pattern(dim: int) -> Pattern:
        size = queries[dim]
        read = [dim if len(shape_of(t)) > 2 and (t not in masks or shape_of(t)[dim] == size) else None for t in tensors]
        return Pattern(
            tuple(dim if t is not None and len(t.shape) > 2 else None for t in outputs),
            tuple(read),
            in_groups=queries[dim] == keys[dim],
        )

    by_head = pattern(1)
    shared = replace(
        by_head,
        outputs=tuple(
            "sum" if t is not None and is_backward(node) and tuple(t.shape) == keys and keys != queries else lies
            for t, lies in zip(outputs, by_head.outputs, strict=True)
        ),
        inputs=tuple(
            None if source in queries_and_keys(node)[1:] else lies
            for source, lies in zip(tensors, by_head.inputs, strict=True)
        ),
        local=_own_keys,
        in_groups=False,
        allowed=lambda num_ranks: num_ranks % keys[1] == 0,
    )
    return [pattern(0), by_head, *([shared] if keys[1] < queries[1] else []), *token_patterns(node)]


def _own_keys(rank: Local) -> Any:
    """Attend with the heads of keys and values that this rank's queries use, selected from whole tensors."""
    node = rank.node
    args, place = list(rank.args), places(node)
    heads = shape_of(queries_and_keys(node)[1])[1]
    ranks_per_head = rank.num_ranks // heads
    own = rank.call(_aten.floor_divide.default, rank.rank(), ranks_per_head)
    for name in ("key", "value"):
        args[place[name]] = rank.call(_aten.index_select.default, args[place[name]], 1, own)
    given = rank.call(node.target, *args, **rank.kwargs)
    if not is_backward(node):
        return given
    results = [rank.call(operator.getitem, given, number) for number in range(len(results_of(node)))]
    for number in (1, 2):
        whole = results_of(node)[number]
        assert whole is not None
        shape = list(whole.shape)
        zeros = rank.call(_aten.new_zeros.default, results[number], shape)
        results[number] = rank.call(_aten.index_copy.default, zeros, 1, own, results[number])
    return tuple(results)


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def is_attention(target: object) -> bool:
    """True if an operator is fused attention or its backward."""
    return isinstance(target, OpOverload) and base_name(target) in PATTERNS


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {f"{name}{suffix}": _attention for name in _ATTENTION for suffix in ("", "_backward")}
)
