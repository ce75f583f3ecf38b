"""Convolutions and attention: images, channels, sequences and heads."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from zerofx.ir.sharding.pattern import Lies, Pattern
from zerofx.ir.sharding.rule import Local, argument, outputs_of, read_tensors, shape_of
from zerofx.ir.sharding.shapes import PatternsOf
from zerofx.torch_private.operators import OpOverload, schema_of

_aten = torch.ops.aten


def _convolution(node: fx.Node) -> list[Pattern]:
    """Tensor arguments: images, weight, and a bias if there is one."""
    has_bias = len(read_tensors(node)) == 3

    def pattern(out: Lies, images: Lies, weight: Lies, bias: Lies) -> Pattern:
        return Pattern((out,), (images, weight, bias)[: 2 + has_bias])

    by_image = [pattern(0, 0, None, None)]
    if argument(node, 8, "groups", 1) != 1 or argument(node, 6, "transposed", False):
        return by_image
    return [*by_image, pattern(1, None, 0, 0), pattern("sum", 1, 1, "sum")]


def _convolution_backward(node: fx.Node) -> list[Pattern]:
    """Tensor arguments: the gradient, images, weight; results: their gradients and the bias's, where asked for."""
    given = outputs_of(node)

    def pattern(images: Lies, weight: Lies, bias: Lies, *inputs: Lies, local: Any = None) -> Pattern:
        placed = zip((images, weight, bias), given, strict=True)
        return Pattern(tuple(lies if tensor is not None else None for lies, tensor in placed), inputs, local)

    by_image = [pattern(0, "sum", "sum", 0, 0, None)]
    if argument(node, 9, "groups", 1) != 1 or argument(node, 7, "transposed", False):
        return by_image
    return [
        *by_image,
        pattern("sum", 0, 0, 1, None, 0, local=_fewer_biases),
        pattern(1, 1, None, None, 1, 1),
    ]


def _fewer_biases(rank: Local) -> Any:
    args = list(rank.args)
    if args[3]:
        args[3] = [size // rank.num_ranks for size in args[3]]
    return rank.call(rank.node.target, *args, **rank.kwargs)


def _attention(node: fx.Node) -> list[Pattern]:
    """Samples and heads, the first two dimensions of everything; a mask may be the same for all of them.

    Where there are fewer heads of keys and values than of queries, each serves as many queries in turn. If there are
    fewer of them than ranks, every rank has all of them, and picks the one that its queries ask for.
    """
    tensors, outputs = read_tensors(node), outputs_of(node)
    queries, keys, _ = (shape_of(source) for source in _queries_and_keys(node))
    masks = [source for name in ("attn_mask", "attn_bias") if isinstance(source := _argument(node, name), fx.Node)]

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
            "sum" if t is not None and _is_backward(node) and tuple(t.shape) == keys and keys != queries else lies
            for t, lies in zip(outputs, by_head.outputs, strict=True)
        ),
        inputs=tuple(
            None if source in _queries_and_keys(node)[1:] else lies
            for source, lies in zip(tensors, by_head.inputs, strict=True)
        ),
        local=_own_keys,
        in_groups=False,
        allowed=lambda num_ranks: num_ranks % keys[1] == 0,
    )
    return [pattern(0), by_head, *([shared] if keys[1] < queries[1] else [])]


def _own_keys(rank: Local) -> Any:
    """With those heads of whole keys and values that this rank's queries ask for."""
    node, places = rank.node, _places(rank.node)
    args = list(rank.args)
    heads = shape_of(_queries_and_keys(node)[1])[1]
    ranks_per_head = rank.num_ranks // heads
    own = rank.call(_aten.floor_divide.default, rank.rank(), ranks_per_head)
    for name in ("key", "value"):
        args[places[name]] = rank.call(_aten.index_select.default, args[places[name]], 1, own)
    given = rank.call(node.target, *args, **rank.kwargs)
    if not _is_backward(node):
        return given
    results = [rank.call(operator.getitem, given, number) for number in range(len(outputs_of(node)))]
    for number in (1, 2):
        whole = outputs_of(node)[number]
        assert whole is not None
        shape = list(whole.shape)
        zeros = rank.call(_aten.new_zeros.default, results[number], shape)
        results[number] = rank.call(_aten.index_copy.default, zeros, 1, own, results[number])
    return tuple(results)


def _places(node: fx.Node) -> dict[str, int]:
    assert isinstance(node.target, OpOverload)
    return {argument.name: number for number, argument in enumerate(schema_of(node.target).arguments)}


def _argument(node: fx.Node, name: str) -> Any:
    places = _places(node)
    return argument(node, places[name], name) if name in places else None


def _queries_and_keys(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    return _argument(node, "query"), _argument(node, "key"), _argument(node, "value")


def _is_backward(node: fx.Node) -> bool:
    return "grad_out" in _places(node) or "grad_out_" in _places(node)


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        **{f"{name}{suffix}": _attention for name in _ATTENTION for suffix in ("", "_backward")},
    }
)
