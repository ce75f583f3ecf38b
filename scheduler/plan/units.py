"""Repeated layers, which a plan calls units, by the dotted paths of their modules."""

from __future__ import annotations

from collections.abc import Collection


def is_within(inner: str, outer: str) -> bool:
    """Whether a dotted path is ``outer``, or that of something in it."""
    return inner == outer or inner.startswith(f"{outer}.")


def unit_of(layer: str, units: Collection[str]) -> str:
    """The unit whose dotted path is ``layer`` or a prefix of it, or ``""``; units do not nest."""
    while layer and layer not in units:
        layer = layer.rpartition(".")[0]
    return layer
