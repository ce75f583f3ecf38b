"""A pipeline as text: names of passes, each with what a plan decides for it, as xDSL writes its pipelines.

    tile{value=mm_2 num_tiles=4},recompute{value=relu,relu_1},shard

An option has a value for each decision. Values are ``none``, ``true``, ``false``, numbers, words, texts in JSON's
quotes, and lists of those in brackets. What is read is what was written, to the last bit of a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from zerofx.errors import UsageError

OptionValue: TypeAlias = bool | int | float | str | tuple["OptionValue", ...] | None
Options: TypeAlias = tuple[tuple[str, tuple[OptionValue, ...]], ...]

_NAME = re.compile(r"[a-z_]\w*")
_WORD = re.compile(r"[^\W\d][\w.]*")
_NUMBER = re.compile(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|inf(?![\w.]))")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORDS: dict[str, OptionValue] = {"none": None, "true": True, "false": False, "inf": float("inf")}


@dataclass(frozen=True)
class PassText:
    """A pass of a pipeline: its name and its options, in order, each with its values."""

    name: str
    options: Options = ()

    def __str__(self) -> str:
        options = " ".join(f"{key}={','.join(map(_text, values))}" for key, values in self.options)
        return f"{self.name}{{{options}}}" if self.options else self.name


def pipeline_text(passes: Sequence[PassText]) -> str:
    """Write a pipeline as the text that ``read_pipeline`` reads."""
    return ",".join(map(str, passes))


def read_pipeline(text: str) -> tuple[PassText, ...]:
    """The passes of a pipeline.

    Raises:
        UsageError: the text is none of a pipeline; says where it goes wrong.
    """
    return _Reader(text).pipeline()


def _text(value: OptionValue) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) and value not in _WORDS else json.dumps(value)
    return repr(value)


class _Reader:
    """A pipeline's text, and how far it has been read."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def pipeline(self) -> tuple[PassText, ...]:
        passes: list[PassText] = []
        self._take(r"\s*")
        while self._place < len(self._text):
            if passes:
                self._expect(r",\s*", "a comma between two passes")
            passes.append(self._pass())
            self._take(r"\s*")
        return tuple(passes)

    def _pass(self) -> PassText:
        name = self._expect(_NAME, "the name of a pass")
        options: dict[str, tuple[OptionValue, ...]] = {}
        if self._take(r"\{\s*") is not None:
            while self._take(r"\}") is None:
                if options and self._text[self._place - 1] not in " \n":
                    self._refuse("a space between two options, or } after them")
                key = self._expect(_NAME, "the name of an option, or } after the last one")
                if key in options:
                    self._refuse(f"{key} once")
                self._expect("=", f"= after {key}")
                options[key] = self._values(r"[\s}]")
                self._take(r"\s*")
        return PassText(name, tuple(options.items()))

    def _values(self, end: str) -> tuple[OptionValue, ...]:
        values: list[OptionValue] = []
        while values or not re.compile(end).match(self._text, self._place):
            values.append(self._value())
            if self._take(",") is None:
                break
        return tuple(values)

    def _value(self) -> OptionValue:
        if self._take(r"\[") is not None:
            inner = self._values(r"\]")
            self._expect(r"\]", "] after a list")
            return inner
        if (text := self._take(_TEXT)) is not None:
            try:
                quoted: str = json.loads(text)
            except ValueError:
                self._refuse("a text as JSON has it")
            return quoted
        if (number := self._take(_NUMBER)) is not None:
            return int(number) if re.fullmatch(r"-?\d+", number) else float(number)
        word = self._expect(_WORD, "a value")
        return _WORDS.get(word, word)

    def _take(self, pattern: str | re.Pattern[str]) -> str | None:
        match = re.compile(pattern).match(self._text, self._place)
        if match is None:
            return None
        self._place = match.end()
        return match[0]

    def _expect(self, pattern: str | re.Pattern[str], what: str) -> str:
        text = self._take(pattern)
        return text if text is not None else self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        rest = self._text[self._place :]
        raise UsageError(
            f"expected {what} in the pipeline at character {self._place + 1}, found {rest[:20]!r}: write passes as "
            f"tile{{value=mm_2 num_tiles=4}},recompute"
        )
