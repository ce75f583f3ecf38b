"""Compare values that must be the same on all ranks; the error names the ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from zerofx.errors import RankMismatchError
from zerofx.units import first_few

Gather = Callable[[Any], Sequence[Any]]
"""Every rank's value, in rank order."""

_SHOWN_LINES = 3
_SHOWN_VALUES = 4


@dataclass(frozen=True)
class Comparison:
    """Lines of ``text`` that must be the same on all ranks.

    ``what`` completes "expected the same ... on every rank"; ``hint`` says what to do otherwise. ``explain`` gives each
    rank's lines to show where the text says too little. It is collective.
    """

    what: str
    text: str
    hint: str
    explain: Callable[[Gather], Sequence[str]] | None = None


def check_comparisons(compared: Sequence[Comparison], gather: Gather) -> None:
    """Raise a ``RankMismatchError``, the same on all ranks, for the first comparison that differs. Collective."""
    texts = gather([part.text for part in compared])
    for part, of_ranks in zip(compared, zip(*texts, strict=True), strict=True):
        if any(text != of_ranks[0] for text in of_ranks):
            shown = of_ranks if part.explain is None else part.explain(gather)
            check_equal(of_ranks, part.what, part.hint, shown)


def check_equal(values: Sequence[Any], what: str, hint: str, shown: Sequence[str] = ()) -> None:
    """Raise a ``RankMismatchError``, the same on all ranks, unless all ``values`` (by rank) are equal.

    The error names the ranks whose value differs from the most frequent one, or from rank 0's if no value is the most
    frequent. ``shown`` has each rank's lines to compare where the values themselves say too little.
    """
    if all(value == values[0] for value in values):
        return
    usual = max(values, key=values.count)
    different = [rank for rank, value in enumerate(values) if value != usual]
    alike = [[rank for rank, value in enumerate(values) if value == values[first]] for first in _firsts(values, usual)]
    texts = [str(value).splitlines() for value in (shown if len(set(shown)) > 1 else values)]
    common = set.intersection(*(set(texts[ranks[0]]) for ranks in alike))
    own = [[line for line in texts[ranks[0]] if line not in common] for ranks in alike]
    rows = list(zip_longest(*(own if any(own) else (texts[ranks[0]] for ranks in alike)), fillvalue="(nothing)"))
    lines = [
        f"\n  {_ranks(ranks)}: {line}"
        for row in rows[:_SHOWN_LINES]
        for ranks, line in list(zip(alike, row, strict=True))[:_SHOWN_VALUES]
    ]
    if len(rows) > _SHOWN_LINES or len(alike) > _SHOWN_VALUES:
        lines.append("\n  and more")
    raise RankMismatchError(
        f"expected the same {what} on every rank, found another on {_ranks(different)}:{''.join(lines)}\n{hint}"
    )


def _firsts(values: Sequence[Any], usual: Any) -> list[int]:
    """The first rank with each value, the one with the usual value first."""
    return sorted({values.index(value) for value in values}, key=lambda rank: (values[rank] != usual, rank))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {first_few(map(str, ranks))}"
