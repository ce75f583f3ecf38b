"""Rows of values: the dimensions that hold them.

A *row* is whatever a caller counts: a token, a sample, a head of a sample. ``Rows`` gives the dimensions of a value
that hold the rows; ``zerofx/ir/operators/row_rules.py`` maps those of an operator's inputs to those of its result.

A tile of a value has as many dimensions as the value: where rows span several (batch and sequence), the first has all
of a tile's and the others have size 1. So arguments that count dimensions hold for tiles unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class Rows:
    """Dimensions ``first`` up to ``first + span`` hold, flattened, ``each`` elements of every row in turn."""

    first: int
    span: int
    each: int

    @property
    def dims(self) -> range:
        return range(self.first, self.first + self.span)

    def shift(self, by: int) -> Rows:
        """The same rows after ``by`` more dimensions."""
        return Rows(self.first + by, self.span, self.each)


class Summed(Enum):
    """Results without rows.

    ``SUM``: partial results of the tiles are summed. ``OWN``: independent of rows, one for each tile: the state of a
    generator that nothing is drawn from.
    """

    SUM = "sum"
    OWN = "own"


SUM, OWN = Summed.SUM, Summed.OWN
Kind = Rows | Summed | None
RowKinds = Kind | tuple[Kind, ...]


def tile_shape(shape: Sequence[int], rows: Rows, num_rows: int) -> list[int]:
    """The shape of ``num_rows`` rows of a value of ``shape``."""
    block = [num_rows * rows.each, *(1 for _ in rows.dims[1:])]
    return [*shape[: rows.first], *block, *shape[rows.first + rows.span :]]


def group_rows(shape: tuple[int, ...], first: int, num_rows: int) -> Rows | None:
    """The fewest dimensions from ``first`` on that hold whole rows."""
    block = 1
    for end in range(first, len(shape)):
        block *= shape[end]
        if block and block % num_rows == 0:
            return Rows(first, end + 1 - first, block // num_rows)
    return None
