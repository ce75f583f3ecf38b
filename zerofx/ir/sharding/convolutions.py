"""Convolutions: images and channels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from zerofx.ir.sharding.pattern import Lies, Pattern
from zerofx.ir.sharding.rule import Local, argument, read_tensors, results_of
from zerofx.ir.sharding.shapes import PatternsOf


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
    given = results_of(node)

    def pattern(images: Lies, weight: Lies, bias: Lies, *inputs: Lies, local: Any = None) -> Pattern:
        placed = zip((images, weight, bias), given, strict=True)
        return Pattern(tuple(lies if tensor is not None else None for lies, tensor in placed), inputs, local)

    by_image = [pattern(0, "sum", "sum", 0, 0, None)]
    if argument(node, 9, "groups", 1) != 1 or argument(node, 7, "transposed", False):
        return by_image
    return [*by_image, pattern("sum", 0, 0, 1, None, 0, local=_fewer_biases), pattern(1, 1, None, None, 1, 1)]


def _fewer_biases(rank: Local) -> Any:
    args = list(rank.args)
    if args[3]:
        args[3] = [size // rank.num_ranks for size in args[3]]
    return rank.call(rank.node.target, *args, **rank.kwargs)


PATTERNS: Mapping[str, PatternsOf] = MappingProxyType(
    {"convolution": _convolution, "convolution_backward": _convolution_backward}
)
