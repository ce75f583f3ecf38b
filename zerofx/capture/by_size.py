"""Derive the graph of a batch of a third size from the graphs of two sizes: a further length costs no capture.

The records of a forward (``by_layer/forward_record.py``) at two sizes are the same text with different whole numbers,
and so are their graphs. The record at the third size, which is taken too, says what each pair of numbers becomes::

    record   view(x, [8, 512, 256])     view(x, [8, 448, 256])     view(x, [8, 384, 256])      (512, 448) -> 384
    graph    expand(y, [8, 1, 512])     expand(y, [8, 1, 448])     expand(y, [8, 1, 384])

A number of the graphs that no record has is a multiple of one that it has, or of two, 8 * 512. No number is taken for a
length because it equals one: lengths are the numbers that differ between the records. The result is run on fake
tensors: each operator has to give the shape, strides and dtype that stand in the graph.

Does not handle: sizes of 0 or 1, with which operators compute otherwise, graphs in which other numbers vary (a mean's
divisor as a fraction), operators that are not torch's. Those are captured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from zerofx.capture.by_layer.forward_record import ForwardRecord
from zerofx.capture.cache import KeptCapture, trace_settings
from zerofx.disk.cache import MALFORMED
from zerofx.ir.aliasing import tensors_in
from zerofx.ir.facts import value
from zerofx.ir.graph import StepGraph
from zerofx.ir.serialise import NAMESPACES, NotStorableError, inline_values, share_values, to_json
from zerofx.torch_private.capture import expect_fake

Numbers = tuple[int, ...]

_NUMBER = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
_LEAST = 2  # below, sizes are special: they are broadcast, or there is nothing to compute


@dataclass(frozen=True)
class Text:
    """A text split at its whole numbers."""

    rest: tuple[str, ...]
    numbers: Numbers

    @staticmethod
    def parse(text: str) -> Text:
        parts = _NUMBER.split(text)
        return Text(tuple(parts[::2]), tuple(map(int, parts[1::2])))

    def fill(self, numbers: Sequence[int]) -> str:
        """The text with other numbers."""
        pairs = zip(self.rest, (*map(str, numbers), ""), strict=True)
        return "".join(part for pair in pairs for part in pair)


@dataclass(frozen=True)
class _Captured:
    record: Numbers
    graph: Text


class KnownSizes:
    """Captures of one forward at several sizes, keyed by everything else that a capture follows from."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[_Captured]] = {}

    def graph(self, record: ForwardRecord, place: KeptCapture, setting: str) -> StepGraph | None:
        """The graph of the forward that ``record`` was taken of, if it follows from earlier captures.

        ``setting``: everything else the graph follows from, as a text.
        """
        text = Text.parse(record.text())
        known = self._known.get(_key(text, setting), [])
        if len(known) < 2 or any(entry.graph.rest != known[0].graph.rest for entry in known):
            return None
        numbers = _derive_numbers(text.numbers, known)
        step = place.graph(share_values(known[0].graph.fill(numbers))) if numbers is not None else None
        return step if step is not None and _is_sound(step) else None

    def add(self, record: ForwardRecord, step: StepGraph, setting: str) -> None:
        """Remember a capture, unless its graph cannot be written as a text."""
        text = Text.parse(record.text())
        known = self._known.setdefault(_key(text, setting), [])
        if all(entry.record != text.numbers for entry in known):
            try:
                known.append(_Captured(text.numbers, Text.parse(inline_values(to_json(step, NAMESPACES)))))
            except NotStorableError:
                return


def _key(text: Text, setting: str) -> tuple[Any, ...]:
    return text.rest, setting, trace_settings()


def _derive_numbers(record: Numbers, known: Sequence[_Captured]) -> list[int] | None:
    """The numbers of the graph whose record has the numbers ``record``; None if they do not follow from ``known``."""
    becomes: dict[Numbers, int] = {}
    for column, wanted in zip(zip(*(entry.record for entry in known), strict=True), record, strict=True):
        varies = len(set(column)) > 1
        if becomes.setdefault(column, wanted) != wanted or (varies and min(*column, wanted) < _LEAST):
            return None
        if not varies and wanted != column[0]:
            return None
    varying = {column: wanted for column, wanted in becomes.items() if len(set(column)) > 1}
    columns = list(zip(*(entry.graph.numbers for entry in known), strict=True))
    multiples: dict[Numbers, int] = {}
    for column in set(columns):
        if len(set(column)) > 1 and column not in varying:
            values = {Fraction(becomes) for becomes in _products(tuple(map(Fraction, column)), varying, 2)}
            if len(values) != 1 or (number := values.pop()).denominator != 1:
                return None
            multiples[column] = int(number)
    multiples |= varying
    return [multiples.get(column, column[0]) for column in columns]


def _products(column: tuple[Fraction, ...], varying: Mapping[Numbers, int], most: int) -> Iterator[Fraction]:
    """Candidates for numbers that are a multiple of a product of at most ``most`` known numbers."""
    for known, wanted in varying.items():
        rest = tuple(number / of for number, of in zip(column, known, strict=True))
        if len(set(rest)) == 1:
            yield rest[0] * wanted
        elif most > 1:
            yield from (wanted * becomes for becomes in _products(rest, varying, most - 1))


def _is_sound(step: StepGraph) -> bool:
    """True if running each operator on its arguments gives the value that stands in the graph."""
    fakes = (expect_fake(entry) for node in step.calls() for entry in tensors_in(value(node)))
    with next(fakes).fake_mode, torch.no_grad():
        for node in step.calls():
            given = fx.node.map_arg((node.args, node.kwargs), value)
            target: Callable[..., Any] = node.target  # type: ignore[assignment]  # of a call
            try:
                if _layouts(target(*given[0], **given[1])) != _layouts(value(node)):
                    return False
            except MALFORMED:
                return False
    return True


def _layouts(result: Any) -> list[tuple[Any, ...]]:
    return [(tuple(entry.shape), entry.stride(), entry.dtype, entry.device) for entry in tensors_in(result)]
