"""Folders are floors: each imports only what stands above it in the table of ``docs/code_map.md``."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.lib.checkout import ROOT

MOST_FILES = 18  # of a folder: one screen


def modules() -> dict[str, Path]:
    """The files of zerofx by their dotted names, also those of folders that are reached by links."""
    walked = os.walk(ROOT / "zerofx", followlinks=True)
    files = [Path(folder, name) for folder, _, names in walked for name in names if name.endswith(".py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def floors() -> dict[str, int]:
    """The row of each folder and file in the map."""
    table = (ROOT / "docs" / "code_map.md").read_text(encoding="utf-8").split("| folder or file |")[1].split("\n\n")[0]
    places = [re.findall(r"`([\w/.]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    dotted = [[re.sub(r"(/__init__)?\.py$", "", place).replace("/", ".") for place in row] for row in places]
    return {
        name if name.startswith("zerofx") else f"zerofx.{name}": number
        for number, row in enumerate(dotted)
        for name in row
    }


def place_of(module: str, known: dict[str, int]) -> str:
    """The folder or file of the map that ``module`` is in."""
    parts = module.split(".")
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known)


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """What a file imports of zerofx, wherever it does: module and line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zerofx":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "zerofx")


def test_imports_point_down() -> None:
    files, known = modules(), floors()
    upward = [
        f"{module}:{line} imports {imported}"
        for module, path in files.items()
        for imported, line in imports(path, files)
        if (here := place_of(module, known)) != (there := place_of(imported, known)) and known[there] >= known[here]
    ]
    assert upward == []


def test_every_folder_fits_one_screen() -> None:
    counts = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {str(folder): number for folder, number in counts.items() if number > MOST_FILES} == {}


def test_files_of_the_map_exist() -> None:
    text = (ROOT / "docs" / "code_map.md").read_text(encoding="utf-8").split("## Pages")[0]
    for place in re.findall(r"`([\w/]+\.py)`", text):
        starts = ("", "zerofx", "scheduler")
        assert any((ROOT / start / place).is_file() for start in starts), place
