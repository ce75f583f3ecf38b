"""The lengths that batches are padded to: a ladder, from what is asked for and the longest batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zerofx.errors import UsageError
from zerofx.option_table import is_count

if TYPE_CHECKING:
    pass

LengthsOption = Sequence[int] | Mapping[int, int] | int | Literal["auto"]
AUTO: Literal["auto"] = "auto"

# Of what a step computes of a batch that is one token longer than a rung. Below, rungs are a multiple apart.
MOST_WASTE = 0.12
# Tokens: what attention and matrix kernels divide a sequence into is a divisor of it.
MULTIPLE = 64
# What fitted rungs are multiples of: a finer one pads less, and kernels do more of a rung's edge.
_FITTED_MULTIPLE = 16
# Rungs that are a multiple apart: at most so many, so that a longest batch below 512 has as many rungs as one of 512.
_EVEN_RUNGS = 8


@dataclass(frozen=True)
class Ladder:
    """Rungs, ascending: how many tokens each has, and the samples of a batch of it where they are given.

    ``samples`` is empty where every rung has the samples of the first batch.
    """

    rungs: tuple[int, ...]
    samples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.rungs and list(self.rungs) == sorted(set(self.rungs)), "rungs are in order"

    @property
    def longest(self) -> int:
        """Tokens of the top rung."""
        return self.rungs[-1]

    def rung_of(self, length: int) -> int:
        """The least rung that holds ``length`` tokens, which are no more than the longest."""
        return self.rungs[bisect_left(self.rungs, length)]

    def samples_of(self, rung: int, otherwise: int) -> int:
        """The samples of a batch of a rung."""
        return self.samples[self.rungs.index(rung)] if self.samples else otherwise

    def sizes(self, otherwise: int) -> list[tuple[int, int]]:
        """Tokens and samples of all rungs, those with the most tokens in all first."""
        sizes = [(rung, self.samples_of(rung, otherwise)) for rung in self.rungs]
        return sorted(sizes, key=lambda size: (size[0] * size[1], size[0]), reverse=True)


def multiple_for(longest: int) -> int:
    """The divisor of all rungs: 64, or a smaller power of two if ``longest`` has less than eight times that."""
    multiple = MULTIPLE
    while multiple > 1 and longest <= multiple // 2 * _EVEN_RUNGS:
        multiple //= 2
    return multiple


def ladder_up_to(longest: int) -> Ladder:
    """A geometric ladder: each rung is the largest multiple that pads a batch that is one token longer than the rung
    before by at most ``MOST_WASTE`` of itself, and at least one multiple above that; the top is ``longest``."""
    multiple, rungs = multiple_for(longest), [0]
    while rungs[-1] < longest:
        widest = int((rungs[-1] + 1) / (1 - MOST_WASTE))
        rungs.append(min(longest, max(rungs[-1] + multiple, widest // multiple * multiple)))
    return Ladder(tuple(rungs[1:]))


def fitted_lengths(lengths: Iterable[int], num_rungs: int = 8, *, multiple: int = _FITTED_MULTIPLE) -> tuple[int, ...]:
    """Rungs for ``lengths=`` with which samples of these lengths are padded least, each by itself: the best there are.

    ::

        step = zerofx.compile(model, optimizer, lengths=zerofx.fitted_lengths(map(len, documents)))

    Args:
        lengths: tokens of each sample, or of the longest of each batch.
        num_rungs: how many there may be; each is one more step to build.
        multiple: what each rung is a multiple of. The longest holds the longest sample.

    Raises:
        UsageError: there are no lengths, or no rungs.
    """
    import numpy as np  # which the command line's help does without

    observed = np.sort(np.fromiter(lengths, np.int64))
    if not observed.size or observed[0] < 1 or num_rungs < 1 or multiple < 1:
        raise UsageError(
            f"expected lengths of samples, each of a token or more, and at least one rung, found {observed.size} "
            f"lengths{f' from {observed[0]}' if observed.size else ''}, {num_rungs} rungs, multiples of {multiple}"
        )
    rungs = np.unique(-(-observed // multiple) * multiple)  # others would pad the samples that they hold more
    held = np.searchsorted(observed, rungs, side="right")  # samples that fit each
    # The fewest tokens of the samples that each rung holds, with one rung, then with one more below it, and so on.
    tokens, below = rungs * held, list[np.ndarray]()
    for _ in range(min(num_rungs, len(rungs)) - 1):
        choices = tokens[:, None] + rungs * (held - held[:, None])
        choices[np.tril_indices(len(rungs), -1)] = np.iinfo(np.int64).max  # what is below is lower, or the rung itself
        below.append(choices.argmin(0))
        tokens = choices.min(0)
    chosen = [len(rungs) - 1]
    for lower in reversed(below):
        chosen.append(int(lower[chosen[-1]]))
    return tuple(rungs[sorted(set(chosen))].tolist())


def check_lengths(asked: object) -> Ladder | int | Literal["auto"] | None:
    """Check ``lengths=``: a ladder, or the top of one, or ``"auto"``, which makes one for the first batch.

    Raises:
        UsageError: it is none of them.
    """
    if asked is None or asked == AUTO:
        return AUTO if asked == AUTO else None
    if isinstance(asked, int) and is_count(asked, 1):
        return asked
    if isinstance(asked, Mapping) and asked and all(is_count(n, 1) for item in asked.items() for n in item):
        ordered = sorted(asked.items())
        return Ladder(tuple(rung for rung, _ in ordered), tuple(samples for _, samples in ordered))
    if isinstance(asked, Sequence) and not isinstance(asked, str) and asked and all(is_count(n, 1) for n in asked):
        return Ladder(tuple(sorted(set(asked))))
    raise UsageError(
        f"expected lengths to be numbers of tokens that batches are padded to, such as (128, 256, 512), or with the "
        f"samples of a batch of each, {{128: 32, 512: 8}}, or the longest alone, 512, for a ladder up to it, or 'auto' "
        f"for one up to the first batch's length, found {asked!r}"
    )
