"""What runs with each torch is counted from pytest's own report, and the page says it."""

from __future__ import annotations

from pathlib import Path

from tests.compat import PAGE, PARTS, VERSIONS, Result, Row, page, read_junit, read_rows

_REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two"><failure message="no"/></testcase>
<testcase classname="tests.a" name="test_three"><error message="no"/></testcase>
<testcase classname="tests.a" name="test_four"><skipped message="needs a GPU"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(_REPORT)
    failed = ("tests.a::test_two", "tests.a::test_three")
    assert read_junit(path) == Result(passed=1, failed=failed, skipped={"needs a GPU": 1})


def test_the_page_has_a_row_a_version_and_says_what_is_missing() -> None:
    parts = {"graphs": Result(3, ("tests.a::test_two",), {"needs a GPU": 2}), "eager": Result(error="no torch")}
    text = page({"2.11": Row("3.12.1", "2.11.0", "runs", parts, ("fusions: forgotten",))})
    cells = {"graphs": "3 / 1 / 2", "eager": "did not run"}
    assert f"| 2.11.0 | 3.12.1 | runs | {' | '.join(cells.get(part, 'not run') for part in PARTS)} |" in text
    for line in ("Left out: fusions: forgotten.", "graphs, failed: `tests.a::test_two`", "eager: no torch"):
        assert f"- {line}" in text
    assert "- graphs, skipped: 2 x needs a GPU" in text


def test_the_page_in_docs_is_that_of_the_results() -> None:
    rows = read_rows()
    assert rows.keys() <= VERSIONS.keys() and PAGE.read_text() == page(rows), "run make compat"
