"""Texts of sizes, times, lists and tables for people: bytes as KiB, MiB, GiB; seconds as µs, ms, s; a few of many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from tabulate import tabulate

from zerofx.errors import UsageError

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SHOWN = 5  # of a list in a message


def parse_bytes(text: str) -> int:
    """``"24GiB"`` or ``"80 GB"`` as bytes.

    Raises:
        UsageError: the text is no size.
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30}(?=\s*[a-zA-Z]))?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise UsageError(f"expected a size such as '24GiB', '80GB' or a number of bytes, found {text!r}")
    return int(Fraction(match[1]) * _BYTES[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def tiers_text(sizes: Mapping[str, int]) -> str:
    """``, 1.0 KiB on host, 2.0 KiB on nvme`` for bytes by slower tier; nothing for none."""
    return "".join(f", {format_bytes(size)} on {tier}" for tier, size in sizes.items() if size)


def format_seconds(seconds: float) -> str:
    """``0.0015`` as ``1.50 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def format_count(number: float) -> str:
    """``2500000`` as ``2.5 M``."""
    value, units = float(number), ["", " k", " M", " G", " T", " P"]
    while abs(value) >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f}" if units[0] == "" else f"{value:.1f}{units[0]}"


def first_few(items: Iterable[str]) -> str:
    """The first of ``items``, and how many more there are."""
    listed = list(items)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def text_table(rows: Sequence[Sequence[str]], headers: Sequence[str], left: Sequence[int] = (0,)) -> str:
    """``rows`` under ``headers``: the columns at the places ``left`` to the left, others to the right."""
    align = ["left" if place in left else "right" for place in range(len(headers))]
    return tabulate(rows, headers, colalign=align, disable_numparse=True, tablefmt="simple", preserve_whitespace=True)
