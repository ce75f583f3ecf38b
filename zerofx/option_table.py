"""Tables of options: dataclasses whose fields say what an option can be, what it excludes, and what it is for.

Checks, errors, signatures, documentation, comparisons and the command line are read from the fields.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

from zerofx.errors import UsageError
from zerofx.units import parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What an option can matter to: ranks compare it before anything else, a kept plan or a kept step is for one value of
# it, an evaluation has it, and how ranks share one computation may depend on it.
Purpose = Literal["ranks", "plan", "step", "evaluation", "sharing"]

_F = TypeVar("_F", bound=Callable[..., Any])
_LONGEST = 100  # characters of a value in an error


@dataclass(frozen=True)
class Kind:
    """A kind of value: ``what`` completes "expected ... to be", ``convert`` gives it as it is kept. ``words`` are those
    among the values, and ``least`` and ``most`` the limits of whole numbers."""

    what: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    words: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True)
class Exclusion:
    """An option that does not go with another, and why. ``mine`` and ``theirs`` tell which values do not, all but the
    default where they are None."""

    other: str
    why: str
    mine: Callable[[Any], bool] | None = None
    theirs: Callable[[Any], bool] | None = None


@dataclass(frozen=True)
class Entry:
    """An option: its default, what it can be, and the purposes (``Purpose``) that it does not matter to."""

    default: Any
    kind: Kind
    excludes: tuple[Exclusion, ...]
    not_for: tuple[Purpose, ...]

    def accepts(self, value: Any) -> bool:
        """True if the option can have this value."""
        return (value is None and self.default is None) or self.kind.accepts(value)

    @property
    def what(self) -> str:
        """The values that the option can have, as ``Kind.what``."""
        return f"{self.kind.what}, or None" if self.default is None else self.kind.what

    def has(self, value: Any, condition: Callable[[Any], bool] | None) -> bool:
        """True if a condition is about this value."""
        return bool(condition(value)) if condition else value != self.kind.convert(self.default)


def option(default: Any, kind: Kind, *excludes: Exclusion, not_for: tuple[Purpose, ...] = ()) -> Any:
    """A field of a table, with a docstring below it, which completes the name and a colon."""
    return field(default=default, metadata={"entry": Entry(default, kind, excludes, not_for)})


@lru_cache
def entries(table: type[DataclassInstance]) -> Mapping[str, Entry]:
    """The options of a table by name."""
    return {each.name: each.metadata["entry"] for each in fields(table) if "entry" in each.metadata}


@lru_cache
def texts(table: type[DataclassInstance]) -> Mapping[str, str]:
    """The docstrings of a table's options by name, without the marks of code."""
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(parsed, ast.ClassDef)
    return {
        entry.target.id: " ".join(text.value.value.split()).replace("``", "")
        for entry, text in pairwise(parsed.body)
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def check_values(table: type[DataclassInstance], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a table as they are kept, those that are not given with their defaults.

    Raises:
        UsageError: one of them cannot be, or two exclude each other.
    """
    known = entries(table)
    asked = {name: given.get(name, entry.default) for name, entry in known.items()}
    for name, entry in known.items():
        value = asked[name]
        if not entry.accepts(value):
            in_tuple = isinstance(value, str) and entry.accepts((value,))
            advice = f" (give {name}=({value!r},))" if in_tuple else ""
            raise UsageError(f"expected {name} to be {entry.what}, found {_clip(value)}{advice}: {texts(table)[name]}")
    values = {name: entry.kind.convert(asked[name]) for name, entry in known.items()}
    for name, entry in known.items():
        for exclusion in entry.excludes:
            other = exclusion.other
            if entry.has(values[name], exclusion.mine) and known[other].has(values[other], exclusion.theirs):
                raise UsageError(
                    f"expected {name} or {other}, which exclude each other so, found {name}={_clip(asked[name])} and "
                    f"{other}={_clip(asked[other])}: {exclusion.why}; leave one of them out"
                )
    return values


def defaults_for(table: type[DataclassInstance], purpose: Purpose) -> dict[str, Any]:
    """The options that do not matter to ``purpose``, as they are by default."""
    return {
        name: entry.kind.convert(entry.default) for name, entry in entries(table).items() if purpose in entry.not_for
    }


def lines_for(options: DataclassInstance, purpose: Purpose) -> list[str]:
    """The options that matter to ``purpose``, and all other fields that equality compares, a line each."""
    known = entries(type(options))
    names = [
        each.name
        for each in fields(options)
        if each.compare and (each.name not in known or purpose not in known[each.name].not_for)
    ]
    return [f"{name}: {_text_to_compare(getattr(options, name))}" for name in names]


def _text_to_compare(given: object) -> str:
    """A text that does not depend on the order of names; that of a mapping counts."""
    if isinstance(given, Mapping):
        return repr(list(given.items()))
    if isinstance(given, type):
        return f"{given.__module__}.{given.__qualname__}"
    if hasattr(given, "__dataclass_fields__"):
        return ", ".join(f"{name} {_text_to_compare(value)}" for name, value in vars(given).items())
    if isinstance(given, Collection) and not isinstance(given, str):
        return repr(sorted(map(_text_to_compare, given)))
    return str(given)


def check_names(given: Mapping[str, object], keywords: type, function: str) -> None:
    """Check that a function was given no other keywords than those of ``keywords``, a ``TypedDict``.

    Raises:
        TypeError: it was, as Python says it of keywords that a signature spells out.
    """
    for name in given:
        if name not in keywords.__annotations__:
            raise error_of_keyword(function, name, keywords.__annotations__)


def error_of_keyword(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a keyword that a function does not take, as Python says it, and the one that may be meant."""
    meant = "".join(f". Did you mean {other!r}?" for other in difflib.get_close_matches(name, known, n=1))
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")


def document_options(keywords: type, table: type[DataclassInstance]) -> Callable[[_F], _F]:
    """Give a function of ``**options: Unpack[keywords]`` the signature and the documentation that the table has."""

    def document(function: _F) -> _F:
        known, own = entries(table), inspect.signature(function)
        named = {
            name: parameter for name, parameter in own.parameters.items() if parameter.kind != parameter.VAR_KEYWORD
        }
        taken = {
            name: inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=known[name].default, annotation=kind.__forward_arg__
            )
            for name, kind in keywords.__annotations__.items() if name not in named
        }  # fmt: skip
        function.__signature__ = own.replace(parameters=[*named.values(), *taken.values()])  # type: ignore[attr-defined]
        head, blank, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\nR")  # returns, or raises
        lines = [_paragraph(name, texts(table)[name]) for name in taken]
        function.__doc__ = "\n".join([head, *lines]) + blank + rest
        return function

    return document


def _paragraph(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name}: {text}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
    )


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------ what values can be


def one_of(*values: object) -> Callable[[Any], bool]:
    """A condition of an exclusion: one of these values."""
    return lambda value: any(value is word or value == word for word in values)


def instances(*types: type) -> Callable[[Any], bool]:
    """A condition: a value of one of these types."""
    return lambda value: isinstance(value, types)


def words(of: Any) -> Kind:
    """One word of a few, those of a ``Literal``."""
    known = get_args(of)
    return Kind(" or ".join(", ".join(map(repr, known)).rsplit(", ", 1)), one_of(*known), words=known)


def count(least: int, most: int | None = None) -> Kind:
    """A whole number."""
    what = f"a whole number, {least} {'or more' if most is None else f'to {most}'}"
    return Kind(what, lambda value: is_count(value, least, most), least=least, most=most)


def is_count(value: Any, least: int, most: int | None = None) -> bool:
    """True for a whole number within limits."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and least <= value and (most is None or value <= most)


def any_of(*kinds: Kind) -> Kind:
    """A value of any of some kinds."""

    def convert(value: Any) -> Any:
        return next((kind.convert(value) for kind in kinds if kind.accepts(value)), value)

    what = ", or ".join(kind.what for kind in kinds)
    return Kind(what, lambda value: any(kind.accepts(value) for kind in kinds), convert)


def names(example: str) -> Kind:
    """A collection of names, which one text is not: its letters would be taken for them."""
    return Kind(
        f"names, as in {example}", is_names, lambda given: given if isinstance(given, Mapping) else tuple(given)
    )


def is_names(value: object) -> bool:
    """True for a collection of texts."""
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


FLAG: Final = Kind("True or False", instances(bool))
# A number that is not one is not above 0.
POSITIVE: Final = Kind(
    "a number above 0",
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
    lambda value: None if value is None else float(value),
)


def _to_path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


PATH: Final = Kind("a path", instances(str, Path), _to_path)
FUNCTION: Final = Kind("a function", callable)


def _is_size(value: object) -> bool:
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except UsageError:
        return False
    return is_count(size, 1) or (isinstance(size, float) and 0 < size <= 1)


SIZE: Final = Kind(
    "a size such as '24GiB', a number of bytes, or a fraction up to 1.0",
    _is_size,
    lambda size: parse_bytes(size) if isinstance(size, str) else size,
)
