"""Kinds of values in one rank's graph: the placements on the axis that the placement check infers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from zerofx.scheduler.plan.placements import REPLICATED, Placement, Sharded


@dataclass(frozen=True)
class Own:
    """A value computed from this rank's number: ``what`` names it, ``size`` is that of its part of a dimension."""

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
"""Possible kinds of one value: shapes alone may leave several. Empty: none is possible."""

KindsRule = Callable[[fx.Node, Sequence[Kinds], int], Kinds | tuple[Kinds, ...] | None]
"""Kinds of a call's result, or of each of several, by those of its tensor arguments and the number of ranks; None where
nothing is known of such a call."""

NOTHING: Kinds = frozenset()
WHOLE: Kinds = frozenset({REPLICATED})


def parts_of(kinds: Kinds) -> frozenset[Sharded]:
    """The kinds in which a rank has a part of the value."""
    return frozenset(kind for kind in kinds if isinstance(kind, Sharded))
