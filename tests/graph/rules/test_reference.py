"""The pages that list options, public names and commands have all of them, as the code does, and no others."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest

import zerofx
from tests.lib.checkout import ROOT
from zerofx.cli.commands import main
from zerofx.options import PlanKeywords, TuneKeywords

DOCS = ROOT / "docs"
OPTIONS = inspect.signature(zerofx.compile).parameters
COMMANDS = main.commands


def _rows(text: str) -> dict[str, list[str]]:
    """Rows of tables by the first name in backticks of their first cell."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {re.findall(r"`([^`]+)`", cells[0])[0]: [cell.strip() for cell in cells] for cells in lines}


def _in_short(described: object) -> str:
    """The first sentence of a docstring, and whether what it describes is collective."""
    paragraph = " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split()).replace("``", "`")
    first = re.split(r"(?<=[.:]) (?=[A-Z])", paragraph.removesuffix("::"))[0].rstrip(".:")
    return f"{first}. Collective." if paragraph.endswith("Collective.") else first


def _members(kind: object) -> Iterator[tuple[str, object]]:
    """Public methods and properties of a class; what a mesh and measured costs have is between planner and plan."""
    is_left_out = (
        not inspect.isclass(kind) or issubclass(kind, Exception) or kind in (zerofx.Mesh, zerofx.MeasuredCosts)
    )
    for name in () if is_left_out else dir(kind):
        member = inspect.getattr_static(kind, name)
        if not name.startswith("_") and (isinstance(member, property) or callable(getattr(kind, name))):
            yield name, member if isinstance(member, property) else getattr(kind, name)


def _expected_names() -> dict[str, str]:
    """What the page of public names may say of each in a table."""
    rows = {"__version__": "The version of zerofx"}
    for name in zerofx.__all__:
        value: Any = getattr(zerofx, name)
        if name != "__version__":
            rows[name] = _in_short(value)
            rows |= {f"{name}.{member}": _in_short(of) for member, of in _members(value)}
    return rows


def test_every_option_is_documented_with_its_default() -> None:
    headings = re.findall(r"^## `(\w+)(?:=(.*))?`$", (DOCS / "options.md").read_text(encoding="utf-8"), re.MULTILINE)
    defaults = {name: option.default for name, option in OPTIONS.items()}
    expected = {
        name: "" if default is inspect.Parameter.empty else repr(default).replace("'", '"')
        for name, default in defaults.items()
    }
    assert dict(headings) == expected and len(headings) == len(expected)


def test_the_page_of_options_says_which_plan_and_tune_take() -> None:
    head = (DOCS / "options.md").read_text(encoding="utf-8").split("\n\n")[1]
    not_of_plan, not_of_tune = (set(re.findall(r"`(\w+)`", part)) for part in head.split("docstring")[0].split(";"))
    own = {"model", "optimizer", "stage"}
    assert not_of_plan == set(OPTIONS) - own - set(PlanKeywords.__annotations__)
    assert not_of_tune == set(PlanKeywords.__annotations__) - set(TuneKeywords.__annotations__) - {"machine"}


def test_the_page_of_public_names_has_each_as_its_docstring_says() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    told, expected = {name: cells[1] for name, cells in _rows(text).items()}, _expected_names()
    assert {name: told.get(name) for name in zerofx.__all__} == {name: expected[name] for name in zerofx.__all__}
    assert told == {name: expected.get(name) for name in told}
    for name in zerofx.__all__:
        kind: Any = getattr(zerofx, name)
        untold = {member for member, _ in _members(kind) if f"{name}.{member}" not in told}
        if dataclasses.is_dataclass(kind) and kind is not zerofx.MeasuredCosts:
            untold |= {field.name for field in dataclasses.fields(kind)}
        listed = re.search(rf"^- `{name}`: (.*)$", text, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", listed[1] if listed else "")) == untold, name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_its_options(name: str) -> None:
    rows = _rows((DOCS / "command_line.md").read_text(encoding="utf-8"))
    assert [words.split()[1] for words in rows if words.startswith("zerofx ")] == list(COMMANDS)
    cells = next(cells for words, cells in rows.items() if words.split()[:2] == ["zerofx", name])
    command = COMMANDS[name]
    assert cells[1] == (command.help or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    of_both = rows["plan, tune"][2] if name in ("plan", "tune") else ""
    given = re.findall(r"`(--[\w-]+)", cells[2] + of_both)
    assert sorted(given) == sorted(option.opts[0] for option in command.params if isinstance(option, click.Option))
