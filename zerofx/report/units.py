"""How sizes and times are written for people: bytes as KiB, MiB, GiB; seconds as µs, ms, s."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


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
