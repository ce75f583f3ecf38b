"""Names and words that CONTRIBUTING.md lists as not used, looked for in the code."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.lib.checkout import ROOT

COVERED = ("benchmarks", "examples", "passes", "scheduler", "codegen", "zerofx")


def listed(before: str, pattern: str) -> set[str]:
    """What CONTRIBUTING.md lists after ``before``, up to the next item."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(before)[2].partition("\n- ")[0]
    return set(re.findall(pattern, text))


NAMES = listed("fields that are not used:", r"`(\w+)`")
WORDS = listed("docstrings that are not used:", r'"(\w+)"')


@functools.cache
def files() -> dict[Path, ast.Module]:
    """All files that are covered, parsed."""
    paths = [path for folder in COVERED for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def names_defined(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of variables, arguments, fields and functions that a file defines, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or "", node.lineno


def prose(path: Path, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Comments and docstrings without what stands in backticks, each with its line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.string, token.start[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield re.sub(r"``.*?``", "", ast.get_docstring(node) or ""), getattr(node, "lineno", 1)


def test_names_say_what_they_hold() -> None:
    assert {"found", "one", "made", "kept", "thing", "stuff"} <= NAMES
    where = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, tree in files().items()
        for name, line in names_defined(tree)
        if name in NAMES
    ]
    assert where == []


def test_prose_has_the_fields_words() -> None:
    assert {"behind", "beside"} <= WORDS
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    where = [
        f"{path.relative_to(ROOT)}:{line} {match[0]}"
        for path, tree in files().items()
        for text, line in prose(path, tree)
        for match in pattern.finditer(text)
    ]
    assert where == []
