"""Part (a): the tests that need a GPU, in one process, or in as many as it takes where one breaks or hangs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.case import CUT_OFF, OUT, Case, Entry
from benchmarks.gpu.setup import Setup

TEST_SECONDS = 120
MOST_PROCESSES = 20


def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
    """pytest on all tests, and again on those that are left, until none is."""
    done = setup.drive / "tests-done.json"
    for number in range(1, MOST_PROCESSES + 1):
        results = [entry.results for entry in entries.values()]
        known = outcomes(results)
        if results and (not results[-1].get("collected") or not left(results)):
            return
        done.write_text(json.dumps(list(known)))
        command = (
            "-m", "pytest", "-p", "benchmarks.gpu.pytest_record", "-p", "no:cacheprovider", "--capture=no",
            "--record", OUT, "--test-seconds", str(TEST_SECONDS), "--done", str(done), *setup.tests,
        )  # fmt: skip
        yield Case(f"process {number}", command, seconds=1e6, least_seconds=30, needs=("pytest",))


def outcomes(results: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each test came to; one that its process ended in has failed."""
    known: dict[str, dict[str, Any]] = {}
    for result in results:
        known |= result.get("outcomes", {})
        if (running := result.get("running")) and CUT_OFF not in result:
            known[running] = {"outcome": "failed", "seconds": 0.0, "text": "its process ended, or it took too long"}
    return known


def left(results: list[Mapping[str, Any]]) -> list[str]:
    """Tests of which nothing is known yet."""
    known = outcomes(results)
    return [test for test in results[0].get("collected", []) if test not in known]
