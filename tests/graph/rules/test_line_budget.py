"""Lines of the product, which a feature pays for by deleting others: who needs more says so here, with the reason."""

from __future__ import annotations

import pytest

from tests.lib.checkout import ROOT

PRODUCT = ("zerofx", "passes", "scheduler", "codegen")
MOST_LINES = 88_160
SHORT, MOST_SHORT = 60, 30  # files of so few lines that a reader opens them for little


@pytest.fixture(scope="module")
def num_lines() -> dict[str, int]:
    """Lines of each file of the product, by its path; links into ``zerofx`` are not followed."""
    files = (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py") if not file.is_symlink())
    paths = {file.resolve() for file in files}
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in paths}


def test_lines_stay_within_their_budget(num_lines: dict[str, int]) -> None:
    total = sum(num_lines.values())
    assert MOST_LINES - 500 < total <= MOST_LINES, "where much was deleted, the budget goes down with it"


def test_few_files_are_short(num_lines: dict[str, int]) -> None:
    short = [path for path, lines in num_lines.items() if lines < SHORT and not path.endswith("__init__.py")]
    assert len(short) <= MOST_SHORT, sorted(short)
