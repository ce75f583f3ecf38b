"""The page of all rewrites has all: every class of one, wherever it is, stands in it once, under a name of its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from zerofx.errors import UsageError
from zerofx.pipeline import PassEntry, find, phases

_FOLDERS = ("passes", "codegen", "zerofx/capture", "zerofx/optimizers", "zerofx/lowering", "scheduler")


def classes() -> Iterator[tuple[str, str]]:
    """The name and the class of everything that is written like a rewrite: a field ``name`` with a text, and a method
    that runs it."""
    for folder in _FOLDERS:
        for path in sorted(Path(ROOT, folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ClassDef):
                    continue
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if methods & {"run", "__call__"} and (name := _name_of(node)):
                    yield name, node.name


def _name_of(node: ast.ClassDef) -> str | None:
    for one in node.body:
        target = (
            one.target if isinstance(one, ast.AnnAssign) else one.targets[0] if isinstance(one, ast.Assign) else None
        )
        value = one.value if isinstance(one, ast.AnnAssign | ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "name" and isinstance(value, ast.Constant):
            return str(value.value)
    return None


def listed() -> list[PassEntry]:
    return [one for rewrites in phases().values() for one in rewrites]


def test_every_rewrite_is_listed_once() -> None:
    assert sorted(classes()) == sorted((one.name, one.kind.__name__) for one in listed())
    assert len({one.name for one in listed()}) == len(listed())


def test_every_file_of_passes_is_a_pass_or_is_known_to_be_none() -> None:
    """A pass that is written otherwise than the others would not be seen above."""
    pages = {Path(ROOT, folder) for folder in ("passes", "passes/prepare", "passes/wire", "zerofx/capture/normalise")}
    files = {path.stem for page in pages for path in page.glob("*.py")} - {"__init__"}
    homes = {one.kind.__module__.rpartition(".")[2] for one in listed()}
    assert files - homes == {"base", "verify", "joint", "phase"}


def test_each_says_what_it_does_with_a_picture_and_what_it_does_not() -> None:
    silent = []
    for one in listed():
        module = Path(ROOT, *one.kind.__module__.split(".")).with_suffix(".py")
        page = f"{ast.get_docstring(ast.parse(module.read_text(encoding='utf-8')))}\n{one.kind.__doc__}"
        # Edges between kernels are in no graph that could be drawn.
        pictured = one.name == "keep_order" or re.search(r"^ {4,}\S", page, re.MULTILINE)
        limited = one.name in ("keep_order", "stamp") or re.search(r"(Does|do) not handle|Not (rewritten|merged)", page)
        if not (pictured and limited and len(one.about) > 20):
            silent.append(one.name)
    assert silent == []


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        UsageError, match=r"expected the name of a pass \(check_results, .*, hoist_views\), found 'til'"
    ):
        find("til")
