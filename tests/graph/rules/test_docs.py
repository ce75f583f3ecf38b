"""What the documentation shows is what zerofx prints, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from tests.lib.graphs import prepare
from zerofx.codegen.emit import emit
from zerofx.codegen.regions import cut
from zerofx.scheduler.cost.liveness import liveness

_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _joined(text: str) -> str:
    return " ".join(text.split())


def test_snippets_of_inside_zerofx_are_what_is_printed() -> None:
    prepared = prepare()
    stages = prepared.run_pipeline()
    live = liveness(prepared.step, on_cpu=True)
    printed = [
        *(stage.text for stage in stages),
        *map(repr, prepared.plan.gathers),
        *map(repr, prepared.plan.reduces),
        *(repr(slot) for bucket in prepared.layout.buckets for slot in bucket.slots),
        emit(prepared.step, cut(prepared.step), live, "").source,
    ]
    joined = [_joined(text) for text in printed]
    page = (ROOT / "docs" / "inside_zerofx.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 8
    for block in blocks:
        for shown in re.split(r"^\.\.\.$", block, flags=re.MULTILINE):
            assert any(_joined(shown) in text for text in joined), f"zerofx prints no\n{shown}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_what_a_page_says_is_in_a_file_is_defined_there(page: Path) -> None:
    for names, place in re.findall(r"((?:`[\w.]+`(?:, | and ))*`[\w.]+`)\s+in\s+`([\w/]+\.py)`", page.read_text()):
        file = next((path for path in (ROOT / place, page.parent / place) if path.is_file()), None)
        assert file is not None, place
        source = file.read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"(?:def |class ){part}\b|^\s*{part}\b.*[:=]", source, re.MULTILINE), (name, place)
