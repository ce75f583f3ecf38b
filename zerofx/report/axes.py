"""Axes of a schedule's pictures, and curves thinned to the visible points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import count
from typing import TypeVar

from zerofx.units import format_seconds

WIDTH = 1200  # units of the pictures' coordinates; a page shows them about one to one
LEFT, RIGHT = 96, 1190  # of the plot: names of tracks and sizes stand to its left
_MOST_TICKS = 8  # of the time axis

T = TypeVar("T")


def svg_open(height: int, label: str, name: str) -> str:
    """The opening tag of a picture that is ``height`` units high; ``label`` describes it for screen readers."""
    return f'<svg id="{name}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'


def x_of(at: float, seconds: float) -> float:
    """The x position of a time, from the step's start to its end at ``seconds``."""
    return LEFT + (RIGHT - LEFT) * (min(max(at / seconds, 0.0), 1.0) if seconds else 0.0)


def thin(curve: Sequence[tuple[float, T]], seconds: float, size: Callable[[T], float]) -> Iterator[tuple[float, T]]:
    """The highest point by ``size`` of those that share a pixel, and their last one from the next pixel on: a peak must
    not get lost, and must not last longer than it does."""
    pixel = seconds / (RIGHT - LEFT)
    here = -1
    highest: tuple[float, T] | None = None
    last: tuple[float, T] | None = None
    for at, held in curve:
        place = int(at / pixel) if pixel else 0
        if place != here:
            if highest is not None:
                yield highest
            if last is not None and last is not highest and place > here + 1:
                yield (here + 1) * pixel, last[1]
            here, highest = place, None
        last = (at, held)
        if highest is None or size(held) > size(highest[1]):
            highest = last
    if highest is not None and last is not None:
        yield highest
        if last is not highest:
            yield (here + 1) * pixel, last[1]


def steps(xs: Sequence[float], ys: Sequence[float], bottom: float) -> str:
    """The outline of the area under a curve that keeps each value until the next; equal values are one line."""
    path, level = [f"M{LEFT} {bottom}"], float(bottom)
    for x, y in zip(xs, ys, strict=True):
        if round(y, 1) != round(level, 1):
            path.append(f"H{x:.1f}V{y:.1f}")
            level = y
    return "".join([*path, f"H{RIGHT}V{bottom}Z"])


def byte_axis(top: float, y_of: Callable[[float], float], most_lines: int) -> Iterator[str]:
    """Lines at multiples of a power of two from nothing to ``top`` bytes, with the sizes to their left."""
    step = next(1 << power for power in count() if top / (1 << power) <= most_lines)
    for number in range(int(top / step) + 1):
        y = y_of(number * step)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_size(number * step)}</text>'


def time_axis(bottom: float, seconds: float) -> Iterator[str]:
    """Marks at round times, each with the time below it."""
    step = next(size for size in _round_times() if seconds / size <= _MOST_TICKS)
    for number in range(int(seconds / step * (1 + 1e-9)) + 1):
        x = x_of(number * step, seconds)
        anchor = "end" if x > RIGHT - 20 else "middle"
        yield f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{bottom}" y2="{bottom + 5}" class="tick"/>'
        text = _round(format_seconds(number * step)) if number else "0"
        yield f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="{anchor}">{text}</text>'


def draw_dashed_line(y: float, text: str, kind: str, *, above: bool) -> Iterator[str]:
    """A dashed line across the plot, with its text at the right end: above it, or below where another line may be."""
    yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="{kind}"/>'
    at = y - 5 if above else y + 15
    yield f'<text x="{RIGHT - 4}" y="{at:.1f}" text-anchor="end" class="{kind}">{escape(text)}</text>'


def _round_times() -> Iterator[float]:
    """Times that read well on an axis, in seconds: 1, 2, 5, 10 ... from a microsecond."""
    for power in count(-6):
        yield from (factor * 10.0**power for factor in (1, 2, 5))


def _size(num_bytes: int) -> str:
    """``1.25 GiB`` for 1280 MiB: multiples of a power of two are written in full."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 4)
    return f"{num_bytes / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _round(text: str) -> str:
    """``20 ms`` for ``20.00 ms``."""
    number, unit = text.split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
