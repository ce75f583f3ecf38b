"""The part of a sweep that runs has as many values of the arguments as it can, and is another from day to day."""

from __future__ import annotations

from itertools import product

import pytest

from tests.conftest import is_day_of, part_of_sweep, pytest_collection_modifyitems

GRID = [{"model": model, "tier": tier} for model, tier in product(range(4), range(3))]


@pytest.mark.parametrize("day", range(12))
def test_a_part_has_every_value_and_as_many_pairs_as_cases(day: int) -> None:
    part = part_of_sweep("a test", GRID, 4, day)
    assert len(set(part)) == 4
    assert {GRID[index]["model"] for index in part} == set(range(4))
    assert {GRID[index]["tier"] for index in part} == set(range(3))


@pytest.mark.parametrize(("num_cases", "num"), [(2, 1), (7, 2), (12, 4), (48, 12), (127, 42)])
def test_every_case_is_run_within_as_many_days_as_there_are_cases(num_cases: int, num: int) -> None:
    for cases in ([{"case": index} for index in range(num_cases)], GRID):
        days = [part_of_sweep("a test", cases, num, day) for day in range(739_000, 739_000 + len(cases))]
        assert {index for part in days for index in part} == set(range(len(cases)))


def test_all_processes_and_tests_of_the_same_arguments_have_the_same_part() -> None:
    assert part_of_sweep("a test", GRID, 4, 5) == part_of_sweep("a test", GRID, 4, 5)
    assert part_of_sweep("a test", GRID, 4, 5) != part_of_sweep("another", GRID, 4, 5)


def test_a_costly_test_runs_once_in_its_days_and_each_day_has_its_share() -> None:
    names = [f"tests/test_file.py::test_{number}" for number in range(300)]
    for name in names:
        assert sum(is_day_of(name, 3, day) for day in range(739_000, 739_003)) == 1
    assert all(60 < sum(is_day_of(name, 3, day) for name in names) < 140 for day in range(739_000, 739_003))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("model", "rows"), [("deep", 2), ("wide", 2), ("tied", 4)])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_cases(model: str, rows: int, tier: str, request: pytest.FixtureRequest) -> None:
    """Cases that the next test looks at, as they were collected."""
    assert request.node.get_closest_marker("sweep").args == (3,)


def test_all_other_cases_are_slow_and_a_case_by_itself_is_not(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = request.node.getparent(pytest.Module)
    for day in range(6):
        monkeypatch.setenv("ZEROFX_TESTS_PART", str(day))
        cases = [item for item in module.collect() if item.name.startswith("test_cases[")]
        pytest_collection_modifyitems(cases)
        part = [case.callspec.params for case in cases if case.get_closest_marker("slow") is None]
        assert len(part) == 3 and len(cases) == 6
        assert {case["model"] for case in part} == {"deep", "wide", "tied"}
        assert {case["tier"] for case in part} == {"host", "nvme"}
    alone = [item for item in module.collect() if item.name == "test_cases[nvme-wide-2]"]
    pytest_collection_modifyitems(alone)
    assert alone[0].get_closest_marker("slow") is None
