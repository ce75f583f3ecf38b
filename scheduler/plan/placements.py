"""Placements of a value on the ranks of the ``model`` axis: replicated, sharded along a dimension, or a partial sum.

Of rows in groups of lengths that only the step knows, tokens of experts, each rank may have those of its groups.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from zerofx.errors import PlanError

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True, order=True)
class Replicated:
    """Every rank has the value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Sharded:
    """Every rank has an equal part of dimension ``dim``.

    The dimension is ``groups`` runs of equal length, of each of which rank i has the i-th part: the heads of queries,
    keys and values that lie one after the other are three groups. A rank's part has them one after the other.
    """

    dim: int
    groups: int = 1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.groups == 1 else f"S{self.dim}/{self.groups}"


@dataclass(frozen=True, order=True)
class Partial:
    """Every rank has a tensor of the value's shape; the value is their sum, or their largest or smallest elements."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


@dataclass(frozen=True, order=True)
class Ragged:
    """Every rank has a tensor of the value's shape, whose first places along ``dim`` are those of its groups of rows.

    Rows lie in groups, one after the other, and the value ``ends`` has the place where each ends, int, shape
    ``[groups]``. Of n ranks, rank i has the rows of the i-th n-th of the groups, in order; what follows them is
    anything. ``capacity``: a rank has a tensor of that many equal shares of the rows, which no more fit in; 0: of all
    rows.
    """

    dim: int
    ends: str
    capacity: float = 0.0

    def __str__(self) -> str:
        return f"S{self.dim}[{self.ends}{f'*{self.capacity:.12g}' if self.capacity else ''}]"

    def rows_for_each(self, num_rows: int, num_ranks: int) -> int:
        """Rows that one rank sends another at most, of ``num_rows`` in all."""
        return min(math.ceil(self.capacity * num_rows / num_ranks**2), num_rows) if self.capacity else num_rows


FIRST_CAPACITY = 1.25
"""Room for rows of experts that ranks send each other, in equal shares, until some have found none."""
LOSS_OF_OVERFLOW = float("-inf")
"""The loss of a step in which some have not."""


def next_capacity(capacity: float, shares: float, num_ranks: int) -> float:
    """The capacity that is tried next, where ``shares`` equal shares were needed: with twice the room beyond an equal
    share, or more, at last for all rows of any rank."""
    all_rows = float(num_ranks**2)
    while capacity < all_rows:
        capacity = min(capacity + max(capacity - 1, 0.25), num_ranks) if capacity < num_ranks else all_rows
        if capacity >= shares * (1 - 1e-6):  # a count of rows is rounded
            break
    return capacity


Placement = Replicated | Sharded | Partial | Ragged
REPLICATED, SUM = Replicated(), Partial()


def placement_of(text: str) -> Placement:
    """The placement that is written ``text``: ``R``, ``S1``, ``S1/3``, ``S0[ends]``, ``S0[ends*2]``, ``P``,
    ``P(max)``.

    Raises:
        PlanError: none is.
    """
    if text == "R":
        return REPLICATED
    if match := re.fullmatch(r"S(\d+)(?:/(\d+))?", text):
        return Sharded(int(match[1]), int(match[2] or 1))
    if match := re.fullmatch(r"S(\d+)\[(\w+)(?:\*([\d.]+))?\]", text):
        return Ragged(int(match[1]), match[2], float(match[3] or 0))
    if match := re.fullmatch(r"P(?:\((\w+)\))?", text):
        for reduction in get_args(Reduction):
            if reduction == (match[1] or "sum"):
                return Partial(reduction)
    raise PlanError(f"expected a placement (R, S1, S1/3, S0[ends], S0[ends*2], P, P(max)), found {text!r}")


def local_shape(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part of a value of ``shape``."""
    if not isinstance(placement, Sharded | Ragged):
        return shape
    size = shape[placement.dim]
    if isinstance(placement, Sharded):
        own = size // num_ranks
    else:
        own = min(num_ranks * placement.rows_for_each(size, num_ranks), size)
    return *shape[: placement.dim], own, *shape[placement.dim + 1 :]


def divides(shape: tuple[int, ...], placement: Placement, num_ranks: int) -> bool:
    """True if a value of ``shape`` can have the placement: its parts are equal."""
    if not isinstance(placement, Sharded):
        return True
    return (
        placement.dim < len(shape)
        and shape[placement.dim] % (placement.groups * num_ranks) == 0 != shape[placement.dim]
    )
