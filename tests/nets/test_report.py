"""Records are read as they were written, and the page counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nets.records import Record, read_records, results_path, write_records
from tests.nets.report import NETS, PAGE, page

_RECORDS = [
    Record("sin", "float32", "exact"),
    Record("nonzero", "float32", "refused", "its shape depends on values | of x"),
    Record("unique", "float32", "refused", "its shape depends on values | of x"),
    Record("sin", "bfloat16", "wrong", "other bits"),
]


def test_records_are_read_as_they_were_written_in_one_order(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "records.json"
    assert read_records(path) == []
    write_records(path, _RECORDS)
    first = path.read_bytes()
    assert sorted(read_records(path), key=repr) == sorted(_RECORDS, key=repr)
    write_records(path, reversed(_RECORDS))
    assert path.read_bytes() == first
    assert [one.name for one in path.parent.iterdir()] == ["records.json"]


def test_a_case_has_one_record_and_one_of_three_outcomes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found two for sin"):
        write_records(tmp_path / "records.json", [_RECORDS[0], _RECORDS[0]])
    with pytest.raises(ValueError, match="found 'skipped'"):
        Record("sin", "float32", "skipped")  # type: ignore[arg-type]


def test_the_page_counts_by_net_and_by_variant_and_lists_reasons() -> None:
    text = page({"operators": _RECORDS})
    assert "| operators | 4 | 1 | 2 | 1 |" in text
    assert "| float32 | 3 | 1 | 2 | 0 |" in text
    assert "| 2 | its shape depends on values \\| of x | `nonzero`, `unique` |" in text
    assert "| 1 | other bits | `sin` |" in text
    assert "| models | not run | | | |" in text


def test_a_row_has_the_first_of_many_names_and_the_beginning_of_a_long_reason() -> None:
    records = [Record(f"operator_{number}", "float32", "refused", "values " * 50) for number in range(9)]
    row = next(line for line in page({"operators": records}).splitlines() if line.startswith("| 9 | values"))
    assert row.endswith("values ... | `operator_0`, `operator_1` and 7 more |") and len(row) <= 160


def test_the_page_in_docs_is_that_of_the_results() -> None:
    if not PAGE.exists():
        pytest.skip("python -m tests.nets.report writes the page")
    records = {net: read_records(results_path(net)) for net in NETS}
    assert PAGE.read_text() == page(records), "run python -m tests.nets.report"
