"""Cases that crash, hang or raise end no sweep."""

from __future__ import annotations

import os
import time

from tests.nets.workers import WorkerError, run_in_workers


def _behave(how: str) -> str:
    if how == "crash":
        os.abort()
    if how == "hang":
        time.sleep(600)
    if how == "raise":
        raise KeyError(how)
    return how


def test_a_crash_a_hang_and_an_error_are_outcomes_of_one_case() -> None:
    results = dict(run_in_workers(_behave, ["first", "crash", "raise", "hang", "last"], timeout=3.0))
    assert (results["first"], results["last"]) == ("first", "last")
    texts = {how: str(result) for how, result in results.items() if isinstance(result, WorkerError)}
    assert texts == {
        "crash": "ended its process with exit code -6",
        "raise": "KeyError: 'raise'",
        "hang": "took longer than 3 s",
    }
