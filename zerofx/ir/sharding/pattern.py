"""Patterns: ways to share a call's work, for any number of groups that a dimension is sharded in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from zerofx.ir.facts import is_random, value
from zerofx.ir.sharding.rule import LocalCall, Rule, ShareCost, read_tensors, results_of, shape_of
from zerofx.scheduler.plan.placements import (
    REPLICATED,
    Partial,
    Placement,
    Ragged,
    Reduction,
    Sharded,
    divides,
    local_shape,
)

Lies = int | Ragged | Reduction | None
"""The dimension that is sharded, or whose rows each rank has some of, or how parts add up; None where every rank has
the value."""


@dataclass(frozen=True)
class Pattern:
    """Sharded dimensions of a call's outputs and tensor arguments; ``local`` as in ``Rule``.

    All of them are sharded in the same number of groups: any number that a neighbour has, and those in ``groups``.
    ``extra`` gives ``Rule.extra`` for a number of groups; ``allowed`` is true for the numbers of ranks it is valid for.
    ``is_tried``: the call is first tried on meta tensors of local shapes, as rules from elsewhere may be wrong.
    """

    outputs: tuple[Lies, ...]
    inputs: tuple[Lies, ...]
    local: LocalCall | None = None
    groups: tuple[int, ...] = ()
    extra: Callable[[int], ShareCost] = lambda groups: ShareCost()
    in_groups: bool = True
    allowed: Callable[[int], bool] = lambda num_ranks: True
    is_tried: bool = False

    def rule(self, node: fx.Node, groups: int, num_ranks: int) -> Rule | None:
        """The rule for dimensions in ``groups``; None where one of them cannot be sharded so."""
        if (groups > 1 and not (self.in_groups and self._has_one_size(node))) or not self.allowed(num_ranks):
            return None
        outputs = tuple(
            None if tensor is None else _placement(lies, groups)
            for lies, tensor in zip(self.outputs, results_of(node), strict=True)
        )
        inputs = tuple(_placement(lies, groups) for lies in self.inputs)
        tensors = [tensor for tensor in results_of(node) if tensor is not None]
        tensors += [value(source) for source in read_tensors(node)]
        placements = [*(placement for placement in outputs if placement is not None), *inputs]
        for tensor, placement in zip(tensors, placements, strict=True):
            if not divides(tuple(tensor.shape), placement, num_ranks):
                return None
            if isinstance(placement, Partial) and tensor.dtype is torch.bool:
                return None  # truths do not add up
        rule = Rule(outputs, inputs, self.local, self.extra(groups))
        return rule if not self.is_tried or _gives_its_shapes(node, rule, num_ranks) else None

    def ragged_rule(self, node: fx.Node, ends: str) -> Rule | None:
        """The rule if each rank has the rows of its groups; None unless the call is row-wise, treats all rows alike,
        and reads and gives floating-point rows or truths about them, which are never used as indices."""
        outputs, tensors = results_of(node), [*results_of(node), *map(value, read_tensors(node))]
        lies = (*self.outputs, *self.inputs)
        rows = [t for t, dim in zip(tensors, lies, strict=True) if t is not None and isinstance(dim, int)]
        if self.local is not None or not self.in_groups or not any(isinstance(dim, int) for dim in self.inputs):
            return None
        if not all(dim is None or isinstance(dim, int) for dim in lies) or not self._has_one_size(node):
            return None
        if is_random(node) or not all(t.is_floating_point() or t.dtype is torch.bool for t in rows):
            return None

        def place(dim: Lies) -> Placement:
            return Ragged(dim, ends) if isinstance(dim, int) else REPLICATED

        given = tuple(None if tensor is None else place(d) for tensor, d in zip(outputs, self.outputs, strict=True))
        return Rule(given, tuple(map(place, self.inputs)))

    def _has_one_size(self, node: fx.Node) -> bool:
        """True if all sharded dimensions have the same size, as they do if they are one dimension of the call."""
        outputs, inputs = results_of(node), read_tensors(node)
        sizes = {t.shape[d] for t, d in zip(outputs, self.outputs, strict=True) if t is not None and isinstance(d, int)}
        sizes |= {shape_of(n)[d] for n, d in zip(inputs, self.inputs, strict=True) if isinstance(d, int)}
        return len(sizes) == 1


def _gives_its_shapes(node: fx.Node, rule: Rule, num_ranks: int) -> bool:
    """True if the call on one rank's parts gives results of the shapes that the rule implies."""
    read = iter(rule.inputs)

    def local(source: fx.Node) -> Tensor:
        whole = value(source)
        shape = local_shape(tuple(whole.shape), next(read), num_ranks)
        return empty_in_order(whole, shape)

    args, kwargs = fx.map_arg((node.args, node.kwargs), local)
    kwargs = {name: "meta" if name == "device" else argument for name, argument in kwargs.items()}
    try:
        results = node.target(*args, **kwargs)  # type: ignore[operator]  # an operator
    except (RuntimeError, ValueError):  # torch's own word on shapes
        return False
    given = (results,) if isinstance(results, Tensor) else results
    return all(
        whole is None or placement is None or tuple(part.shape) == local_shape(tuple(whole.shape), placement, num_ranks)
        for part, whole, placement in zip(given, results_of(node), rule.outputs, strict=True)
    )


def empty_in_order(other: Tensor, shape: Sequence[int]) -> Tensor:
    """A dense meta tensor of ``shape`` whose dimensions lie in the order of ``other``'s: operators may ask for one."""
    strides = other.stride()
    order = sorted(range(other.dim()), key=lambda dim: strides[dim], reverse=True)
    return torch.empty_permuted(tuple(shape), order, dtype=other.dtype, device="meta")


def _placement(lies: Lies, groups: int) -> Placement:
    if lies is None:
        return REPLICATED
    if isinstance(lies, Ragged):
        return lies
    return Sharded(lies, groups) if isinstance(lies, int) else Partial(lies)


@dataclass(frozen=True)
class DimMap:
    """Maps a sharded dimension through a call that only moves elements, from its arguments to its results and back.

    All arguments have the same placement, and so have all results.
    """

    forward: Callable[[Sharded], Sharded | None]
    backward: Callable[[Sharded], Sharded | None]
    local: LocalCall | None = None

    def rule(self, node: fx.Node, source: Sharded, num_ranks: int) -> Rule | None:
        """The rule for arguments placed as ``source``; None if the result would have no such placement."""
        target = self.forward(source)
        if target is None:
            return None
        shapes = [tuple(tensor.shape) for tensor in results_of(node) if tensor is not None]
        read = [shape_of(argument) for argument in read_tensors(node)]
        if not all(divides(shape, target, num_ranks) for shape in shapes):
            return None
        if not all(divides(shape, source, num_ranks) for shape in read):
            return None
        return Rule((target,) * len(results_of(node)), (source,) * len(read), self.local)

    def rows(self, node: fx.Node) -> list[Pattern]:
        """Patterns of the dimensions that the call leaves unchanged."""
        num_outputs, shapes = len(results_of(node)), [shape_of(argument) for argument in read_tensors(node)]
        given = next(tuple(tensor.shape) for tensor in results_of(node) if tensor is not None)
        moved = {dim: self.forward(Sharded(dim)) for dim in range(len(shapes[0]))}
        return [
            Pattern((target.dim,) * num_outputs, (dim,) * len(shapes))
            for dim, target in moved.items()
            if target is not None and target.groups == 1 and given[target.dim] == shapes[0][dim]
        ]


def linear(node: fx.Node) -> Pattern:
    """The pattern of a linear call: partial sums in, partial sums out."""
    return uniform_pattern(node, "sum")


def uniform_pattern(node: fx.Node, lies: Lies) -> Pattern:
    """The pattern in which all tensors of a call have the same placement."""
    return Pattern((lies,) * len(results_of(node)), (lies,) * len(read_tensors(node)))


def pair_patterns(node: fx.Node, pairs: Iterable[tuple[int | None, int | None]]) -> list[Pattern]:
    """Patterns, one for each pair: outputs sharded in its first dimension, arguments in its second."""
    outputs, inputs = len(results_of(node)), len(read_tensors(node))
    return [Pattern((out,) * outputs, (read,) * inputs) for out, read in pairs]


def same_dims(node: fx.Node, without: Sequence[int] = ()) -> list[Pattern]:
    """Patterns of each dimension but those in ``without`` that all tensors of the call have with the same size."""
    shapes = [tuple(tensor.shape) for tensor in results_of(node) if tensor is not None]
    shapes += [shape_of(source) for source in read_tensors(node)]
    rank = min(map(len, shapes), default=0)
    return [
        uniform_pattern(node, dim)
        for dim in range(rank)
        if dim not in without and len({shape[dim] for shape in shapes}) == 1
    ]
