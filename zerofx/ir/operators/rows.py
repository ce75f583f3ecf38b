"""Which dimension of a value holds its rows.

A *row* is whatever a caller counts: a token, a sample, a head of a sample. ``Rows`` says where in a value the rows lie;
``zerofx/ir/operators/row_rules.py`` says where they lie in an operator's result, given where they lie in what it reads.

A tile of a value has as many dimensions as the value: where rows are spread over several (batch and sequence), the
first has all of a tile's and the others one. Arguments that count dimensions then hold for tiles as they stand.
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

    def moved(self, by: int) -> Rows:
        """The same rows after ``by`` more dimensions."""
        return Rows(self.first + by, self.span, self.each)


class Summed(Enum):
    """What becomes of the rows in a result that has none.

    ``SUM``: its parts are summed up. ``OWN``: it says nothing of rows, and each tile has one: the state of a generator
    that nothing is drawn from.
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


def grouped(shape: tuple[int, ...], first: int, num_rows: int) -> Rows | None:
    """The fewest dimensions from ``first`` on that hold whole rows."""
    block = 1
    for end in range(first, len(shape)):
        block *= shape[end]
        if block and block % num_rows == 0:
            return Rows(first, end + 1 - first, block // num_rows)
    return None
