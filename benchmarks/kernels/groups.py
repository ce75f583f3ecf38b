"""Groups of contenders that do the same work as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Contenders that do the same work in place of each other, the one that the others are compared with first.

    ``num_bytes``: what one pass over inputs and outputs moves; 0 where products dominate.
    """

    name: str
    contenders: Mapping[str, Callable[[], object]]
    num_bytes: int = 0
