"""Memory of calls that are too slow to run, extrapolate from smaller ones.

Most take as much whatever their sizes are, mostly nothing: so do two of a fraction of all large sizes. What others take
is a polynomial in any one size: three make one, a fourth has to agree, to the byte. What is in none of these ways, and
too large to be made, is taken to grow with the bytes of inputs and outputs: an approximation.

The smaller calls are large enough that kernels divide them among threads. Of kernels that go other ways for larger
sizes than these, the table of operators says which sizes to reduce (``Smaller``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from zerofx.ir.operators.table import facts_of
from zerofx.scheduler.cost.cpu.calls import KernelMemory, OperatorCall

Records = Callable[[Sequence[OperatorCall]], Mapping[OperatorCall, KernelMemory | None]]

_LARGE = 16  # sizes beyond this one are divided
_STEPS = (64, 16)  # between the sizes that are compared: sizes of one kind for kernels that work on blocks
_NUM_POINTS = 4
_DEPTH = 2  # sizes but one that may have to be made smaller at once


class SmallerCalls(NamedTuple):
    """Two calls in the place of one that has ``num_parts``: ``many`` and ``few`` of them."""

    num_parts: int
    many: int
    few: int
    calls: tuple[OperatorCall, OperatorCall]

    def add_up(self, more: KernelMemory | None, less: KernelMemory | None) -> KernelMemory | None:
        """Memory of the whole, linear in the number of parts: of the part counts measured here."""
        if more is None or less is None or self.many == self.few:
            return more
        each = max(0, more.inside - less.inside)
        return KernelMemory(more.inside + (self.num_parts - self.many) * each // (self.many - self.few), ())


def parts_of(call: OperatorCall) -> SmallerCalls | None:
    """The first of the smaller calls that the table of operators has for ``call`` which can be made; None if none."""
    smaller = facts_of(call.target).smaller
    if smaller is None:
        return None
    whole = smaller(*call.substitute(lambda like: like))
    for parts in whole.pairs:
        first, second = (call.replace_arguments(part.args, part.kwargs) for part in parts)
        if first.is_feasible and second.is_feasible:
            return SmallerCalls(whole.num_parts, parts[0].num_parts, parts[1].num_parts, (first, second))
    return None


def two_smaller(call: OperatorCall) -> tuple[OperatorCall, OperatorCall] | None:
    """A call with a fraction of all large sizes, and one with half of that: what takes as much for both, takes as much
    for any. None if there are none."""
    large = [size for size in call.sizes if size > _LARGE]
    for power in range(1, 24):
        by = 2**power
        if not large or large[-1] // by < 4:
            return None
        smaller = call.replace_sizes({size: size // by for size in large})
        if smaller is None:
            return None
        if smaller.is_quick:
            again = call.replace_sizes({size: size // by // 2 for size in large})
            return None if again is None else (smaller, again)
    return None


def extrapolate(call: OperatorCall, records: Records, depth: int = _DEPTH) -> KernelMemory | None:
    """Memory of a call by a polynomial in one of its sizes, fitted to smaller calls; None if there is none.

    Where no one size makes calls that are quick, what those of a smaller one take is found in the same way by another.
    """
    for is_quick in (True, False) if depth else (True,):
        for size in call.sizes:
            points = _points(call, size, is_quick=is_quick)
            if not points:
                continue
            if is_quick:
                memories = list(records(list(points.values())).values())
            else:
                memories = [extrapolate(point, records, depth - 1) for point in points.values()]
            memory = _extrapolate_memory(list(points), memories, size)
            if memory is not None:
                return memory
    return None


def _points(call: OperatorCall, size: int, *, is_quick: bool) -> dict[int, OperatorCall]:
    """Calls of equally spaced smaller sizes that leave the same rest, by size, the largest first: the largest that are
    quick, or else the smallest that will do; empty if there are none."""
    for step in _STEPS:
        top = size - step
        while top >= _NUM_POINTS * step:
            largest = call.replace_sizes({size: top})
            if largest is None:
                return {}
            is_last = top < (_NUM_POINTS + 1) * step
            if largest.is_quick if is_quick else is_last:
                gap = max(step, top // (_NUM_POINTS + 1) // step * step)
                places = [top - number * gap for number in range(_NUM_POINTS)]
                calls = {place: call.replace_sizes({size: place}) for place in places if place > 0}
                points = {place: entry for place, entry in calls.items() if entry is not None}
                return points if len(points) == _NUM_POINTS else {}
            top -= max(step, top // 4 // step * step)
    return {}


def _extrapolate_memory(places: Sequence[int], memories: Sequence[KernelMemory | None], at: int) -> KernelMemory | None:
    known = [entry for entry in memories if entry is not None]
    if len(known) < len(places):
        return None
    inside = _extrapolate_values(places, [element.inside for element in known], at)
    excess = [_extrapolate_values(places, values, at) for values in zip(*(item.excess for item in known), strict=True)]
    if inside is None or None in excess:
        return None
    return KernelMemory(inside, tuple(value or 0 for value in excess))


def _extrapolate_values(places: Sequence[int], values: Sequence[int], at: int) -> int | None:
    """The value at ``at`` of the polynomial through equally spaced points; None if it has as many terms as points."""
    ahead = Fraction(places[0] - at, places[0] - places[1])
    value, share, differences = Fraction(), Fraction(1), list(values)
    for degree in range(len(values)):  # Newton's forward formula
        value += share * differences[0]
        if len(differences) == 1 and differences[0]:
            return None
        share *= (ahead - degree) / (degree + 1)
        differences = [second - first for first, second in pairwise(differences)]
    return int(value) if value.denominator == 1 and value >= 0 else None


def approximate(call: OperatorCall, records: Records) -> KernelMemory | None:
    """Memory of a call that is too large to run, from a call of smaller sizes, scaled by bytes."""
    for power in range(1, 24):
        sizes = {size: max(_LARGE, size // 2**power) for size in call.sizes if size > _LARGE}
        smaller = call.replace_sizes(sizes)
        if smaller is None:
            return None
        if smaller.is_feasible:
            memory = records([smaller])[smaller]
            if memory is None:
                return None
            growth = call.num_bytes / smaller.num_bytes
            return KernelMemory(
                math.ceil(memory.inside * growth), tuple(math.ceil(value * growth) for value in memory.excess)
            )
    return None
