"""Sharding rules of a call: the placements of its arguments, and those that its results then have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from zerofx.ir.facts import value
from zerofx.scheduler.plan.placements import Placement, Ragged, Sharded

T = TypeVar("T")


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
        """The call's arguments, with one rank's values instead of tensors."""
        ...

    @property
    def kwargs(self) -> dict[str, Any]:
        """The call's keyword arguments, likewise."""
        ...

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call."""
        ...

    def rank(self) -> fx.Node:
        """This rank's number on the axis: int64, shape ``[1]``."""
        ...

    def all_reduce(self, node: fx.Node, reduction: str = "sum") -> fx.Node:
        """All-reduce over the ranks of the axis."""
        ...

    def exchange(self, parts: fx.Node) -> fx.Node:
        """Send each rank its part of a first dimension, and receive one from each."""
        ...

    def own(self, node: fx.Node) -> fx.Node:
        """This rank's value for a tensor argument of the call."""
        ...

    def whole(self, name: str) -> fx.Node:
        """The value, whole, of a node of the graph of whole values."""
        ...

    def count_rows(self, what: str, args: tuple[Any, ...]) -> None:
        """See where the step ends that rows have found room: those of a call, ``"rows"``, or of ``"groups"``."""
        ...

    def start_shift(self, node: fx.Node) -> fx.Node:
        """Start to send a tensor to the next rank and to receive the previous rank's."""
        ...

    def wait_shift(self, pending: fx.Node) -> fx.Node:
        """Wait for the previous rank's tensor; ``pending`` is the result of ``start_shift``."""
        ...


LocalCall = Callable[[Local], Any]
"""Writes one rank's share of a call; returns its node, or a tuple of nodes for a call with several results."""


@dataclass(frozen=True)
class ShareCost:
    """Cost of a sharded call beyond an equal part of its work and of the bytes that it reads and writes.

    ``reduced_bytes``: all-reduced during the call. ``shifted_bytes``: whole tensors whose parts go around the ring of
    ranks. ``exchanged_bytes``: what one rank has for all. ``traffic_bytes``: extra memory traffic of a rank. ``work``:
    a rank's arithmetic, as a multiple of an equal part.
    """

    reduced_bytes: int = 0
    shifted_bytes: int = 0
    exchanged_bytes: int = 0
    traffic_bytes: int = 0
    work: float = 1.0


@dataclass(frozen=True)
class Rule:
    """Placements of a call's outputs and of its tensor arguments, in the order of ``read_tensors``.

    A missing output is None. ``local`` writes one rank's share if that is not the call itself with local sizes.
    """

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    local: LocalCall | None = None
    extra: ShareCost = ShareCost()

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs)) or '-'} -> {' '.join(map(str, self.outputs))}"

    @property
    def shards(self) -> bool:
        """True if each rank has its own part of some value."""
        return any(isinstance(placement, Sharded | Ragged) for placement in (*self.outputs, *self.inputs))

    @property
    def has_ragged(self) -> bool:
        """True if each rank has the rows of its groups of some value."""
        return any(isinstance(placement, Ragged) for placement in (*self.outputs, *self.inputs))

    @property
    def is_bounded(self) -> bool:
        """True if a rank has room for some rows alone of its groups."""
        return any(isinstance(placement, Ragged) and placement.capacity for placement in (*self.outputs, *self.inputs))

    def with_capacity(self, capacity: float) -> Rule:
        """The rule with ``capacity`` for the rows of groups."""

        def bound(placement: T) -> T | Ragged:
            return replace(placement, capacity=capacity) if isinstance(placement, Ragged) else placement

        return replace(self, outputs=tuple(map(bound, self.outputs)), inputs=tuple(map(bound, self.inputs)))


def read_tensors(node: fx.Node) -> list[fx.Node]:
    """The tensor arguments of a call, in the order in which they are read, with repetitions."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: nodes.append(n))
    return [source for source in nodes if isinstance(value(source), Tensor)]


def results_of(node: fx.Node) -> tuple[Tensor | None, ...]:
    """The tensors that a call returns, None for each that is left out; empty for checks, which return nothing."""
    given = node.meta.get("val")
    if isinstance(given, Tensor):
        return (given,)
    return tuple(item if isinstance(item, Tensor) else None for item in given or ())


def sharing_key(node: fx.Node) -> tuple[object, str]:
    """A key that is equal for calls with the same rules: the operator and its arguments, tensors by their metadata."""

    def describe(source: fx.Node) -> str:
        given = value(source)
        return f"{given.dtype}{tuple(given.shape)}{given.stride()}" if isinstance(given, Tensor) else str(given)

    return node.target, repr(fx.map_arg((node.args, node.kwargs), describe))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    given = value(node)
    assert isinstance(given, Tensor), node
    return tuple(given.shape)


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by its position or its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def dims_of(given: Any, rank: int) -> tuple[int, ...]:
    """The dimensions in an argument, counted from the front; all of them if it has none."""
    if given is None or given == []:
        return tuple(range(rank))
    listed: Sequence[int] = [given] if isinstance(given, int) else given
    return tuple(dim % max(rank, 1) for dim in listed)


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
