"""Ways to share a call's work before it is said in how many groups a dimension is sharded."""

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
    """How outputs and tensor arguments lie; ``local`` as in ``Rule``.

    Every dimension is sharded in as many groups as the others: any number that its neighbours' have, and those in
    ``groups``; ``extra`` has ``Rule.extra`` for a number of them. ``allowed`` says for which numbers of ranks it holds.
    ``is_tried``: the call is tried on tensors of local shapes first, as what others say of operators may be wrong.
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
        if (groups > 1 and not (self.in_groups and self._alike(node))) or not self.allowed(num_ranks):
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
        """The rule where each rank has the rows of its groups; None unless the call treats each row for itself, and
        all of them alike, and what it gives are numbers that nobody looks anything up by."""
        outputs, tensors = results_of(node), [*results_of(node), *map(value, read_tensors(node))]
        lies = (*self.outputs, *self.inputs)
        rows = [t for t, dim in zip(tensors, lies, strict=True) if t is not None and isinstance(dim, int)]
        if self.local is not None or not self.in_groups or not any(isinstance(dim, int) for dim in self.inputs):
            return None
        if not all(dim is None or isinstance(dim, int) for dim in lies) or not self._alike(node):
            return None
        if is_random(node) or not all(tensor.is_floating_point() for tensor in rows):
            return None

        def placed(dim: Lies) -> Placement:
            return Ragged(dim, ends) if isinstance(dim, int) else REPLICATED

        given = tuple(None if tensor is None else placed(d) for tensor, d in zip(outputs, self.outputs, strict=True))
        return Rule(given, tuple(map(placed, self.inputs)))

    def _alike(self, node: fx.Node) -> bool:
        """Whether all dimensions that are sharded have one size, as they have where they are the same in the call."""
        outputs, inputs = results_of(node), read_tensors(node)
        sizes = {t.shape[d] for t, d in zip(outputs, self.outputs, strict=True) if t is not None and isinstance(d, int)}
        sizes |= {shape_of(n)[d] for n, d in zip(inputs, self.inputs, strict=True) if isinstance(d, int)}
        return len(sizes) == 1


def _gives_its_shapes(node: fx.Node, rule: Rule, num_ranks: int) -> bool:
    """Whether the call makes, of one rank's parts, what the rule says, as far as shapes tell."""
    read = iter(rule.inputs)

    def local(source: fx.Node) -> Tensor:
        whole = value(source)
        shape = local_shape(tuple(whole.shape), next(read), num_ranks)
        return torch.empty(shape, dtype=whole.dtype, device="meta")

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


def _placement(lies: Lies, groups: int) -> Placement:
    if lies is None:
        return REPLICATED
    if isinstance(lies, Ragged):
        return lies
    return Sharded(lies, groups) if isinstance(lies, int) else Partial(lies)


@dataclass(frozen=True)
class Moved:
    """How a dimension in groups comes out of a call that moves elements alone, and the way back.

    All tensors that the call reads lie alike, and all that it gives do.
    """

    forward: Callable[[Sharded], Sharded | None]
    backward: Callable[[Sharded], Sharded | None]
    local: LocalCall | None = None

    def rule(self, node: fx.Node, source: Sharded, num_ranks: int) -> Rule | None:
        """The rule for arguments that lie as ``source``; None where the result would lie in no such way."""
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
        """Dimensions that come through as they are, each with its rows."""
        num_outputs, shapes = len(results_of(node)), [shape_of(argument) for argument in read_tensors(node)]
        given = next(tuple(tensor.shape) for tensor in results_of(node) if tensor is not None)
        moved = {dim: self.forward(Sharded(dim)) for dim in range(len(shapes[0]))}
        return [
            Pattern((target.dim,) * num_outputs, (dim,) * len(shapes))
            for dim, target in moved.items()
            if target is not None and target.groups == 1 and given[target.dim] == shapes[0][dim]
        ]


def linear(node: fx.Node) -> Pattern:
    """Parts that add up give parts that add up."""
    return everywhere(node, "sum")


def everywhere(node: fx.Node, lies: Lies) -> Pattern:
    """All tensors of a call lie alike."""
    return Pattern((lies,) * len(results_of(node)), (lies,) * len(read_tensors(node)))


def along(node: fx.Node, pairs: Iterable[tuple[int | None, int | None]]) -> list[Pattern]:
    """For each pair, all outputs along its first dimension where all arguments are along its second."""
    outputs, inputs = len(results_of(node)), len(read_tensors(node))
    return [Pattern((out,) * outputs, (read,) * inputs) for out, read in pairs]


def same_dims(node: fx.Node, without: Sequence[int] = ()) -> list[Pattern]:
    """Each dimension but those in ``without``, where every tensor of the call has it at the same place and size."""
    shapes = [tuple(tensor.shape) for tensor in results_of(node) if tensor is not None]
    shapes += [shape_of(source) for source in read_tensors(node)]
    rank = min(map(len, shapes), default=0)
    return [
        everywhere(node, dim)
        for dim in range(rank)
        if dim not in without and len({shape[dim] for shape in shapes}) == 1
    ]
