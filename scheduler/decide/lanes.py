"""Links that carry one copy at a time: when copies on one of them end at the earliest, or begin at the latest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush


def earliest_ends(ready: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """When copies end that are made in order, each as soon as it is ready and the lane is free."""
    ends, free = list[float](), 0.0
    for begin, time in zip(ready, seconds, strict=True):
        free = max(free, begin) + time
        ends.append(free)
    return ends


def latest_starts(
    deadlines: Sequence[float],
    seconds: Sequence[float],
    ranks: Sequence[tuple[int, ...]],
    others: Sequence[tuple[float, float]] = (),
) -> list[float]:
    """When copies that have to end by their ``deadlines`` may begin at the latest.

    Going back from the last deadline, of what may end then the one of the highest rank is copied. ``others``: when what
    else is copied ends, each with the seconds that it takes.
    """
    rank = [tuple(-number for number in key) for key in ranks] + [(-math.inf, 0)] * len(others)  # before all else
    ends = [*deadlines, *(end for end, _ in others)]
    takes = [*seconds, *(time for _, time in others)]
    order = sorted(range(len(ends)), key=lambda n: (ends[n], -rank[n][1], n))
    starts = [0.0] * len(ends)
    free, ending = math.inf, list[tuple[float, ...]]()
    while order or ending:
        if not ending:
            free = min(free, ends[order[-1]])
        while order and ends[order[-1]] >= free:
            number = order.pop()
            heappush(ending, (*rank[number], -number))
        number = -int(heappop(ending)[-1])
        free = starts[number] = min(free, ends[number]) - takes[number]
    return starts[: len(deadlines)]
