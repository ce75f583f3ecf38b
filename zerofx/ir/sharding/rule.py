"""A way to share a call's work: how what it reads lies on the ranks, and how what it gives then does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from zerofx.ir.facts import value
from zerofx.scheduler.plan.placements import Placement, Ragged, Sharded


class Local(Protocol):
    """One rank's graph, as a rule writes a call's share into it."""

    node: fx.Node
    """The call that is shared, of global sizes."""
    rule: Rule

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
        ...

    @property
    def args(self) -> tuple[Any, ...]:
        """The call's arguments with one rank's values in the place of tensors."""
        ...

    @property
    def kwargs(self) -> dict[str, Any]:
        """Its keywords, likewise."""
        ...

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Put a call in."""
        ...

    def rank(self) -> fx.Node:
        """This rank's number on the axis: int64, shape ``[1]``."""
        ...

    def all_reduced(self, node: fx.Node, reduction: str = "sum") -> fx.Node:
        """The sum, or largest elements, over the ranks of the axis."""
        ...

    def handing_on(self, node: fx.Node) -> fx.Node:
        """Start sending a tensor to the next rank, and receiving the previous one's."""
        ...

    def handed_on(self, pending: fx.Node) -> fx.Node:
        """What comes from the previous rank, for what ``handing_on`` gave."""
        ...


LocalCall = Callable[[Local], Any]
"""Writes one rank's share of a call; returns its node, or a tuple of nodes for a call with several results."""


@dataclass(frozen=True)
class ShareCost:
    """What a way to share a call costs besides an equal part of its work and of what it reads and gives.

    ``reduced_bytes`` are summed over the ranks meanwhile, ``shifted_bytes`` are those of whole tensors whose parts go
    around all ranks, ``traffic_bytes`` what a rank reads and writes in memory. ``work`` is how much of an equal part of
    the arithmetic a rank does.
    """

    reduced_bytes: int = 0
    shifted_bytes: int = 0
    traffic_bytes: int = 0
    work: float = 1.0


@dataclass(frozen=True)
class Rule:
    """``outputs`` and ``inputs`` are placements, those of tensor arguments in the order in which they are read.

    None stands in the place of an output that there is not. ``local`` writes one rank's share where that is not the
    call itself with local sizes.
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    local: LocalCall | None = None
    extra: ShareCost = ShareCost()

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs)) or '-'} -> {' '.join(map(str, self.outputs))}"

    @property
    def shards(self) -> bool:
        """Whether each rank has its own part of some value."""
        return any(isinstance(placement, Sharded | Ragged) for placement in (*self.outputs, *self.inputs))


def read_tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a call in the order in which they are read, one that is read twice two times."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: nodes.append(n))
    return [source for source in nodes if isinstance(value(source), Tensor)]


def results_of(node: fx.Node) -> tuple[Tensor | None, ...]:
    """What a call gives: one tensor, or several, or None in the place of one that is left out; of checks nothing."""
    given = node.meta.get("val")
    if isinstance(given, Tensor):
        return (given,)
    return tuple(item if isinstance(item, Tensor) else None for item in given or ())


def rules_follow_from(node: fx.Node) -> tuple[object, str]:
    """What is the same of calls that are shared alike: the operator, and its arguments with what tensors are like."""

    def like(source: fx.Node) -> str:
        given = value(source)
        return f"{given.dtype}{tuple(given.shape)}{given.stride()}" if isinstance(given, Tensor) else str(given)

    return node.target, repr(fx.map_arg((node.args, node.kwargs), like))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    given = value(node)
    assert isinstance(given, Tensor), node
    return tuple(given.shape)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by its position or its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def dims_of(given: Any, rank: int) -> tuple[int, ...]:
    """The dimensions that an argument names, counted from the front; all where it names none."""
    if given is None or given == []:
        return tuple(range(rank))
    listed: Sequence[int] = [given] if isinstance(given, int) else given
    return tuple(dim % max(rank, 1) for dim in listed)


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
