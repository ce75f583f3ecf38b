"""The search for the largest model that trains, and the processes that it tries sizes in."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.largest_trainable import search as largest_trainable


def trial(size: int, trained: bool) -> largest_trainable.Trial:
    reason = "" if trained else "over the cap"
    return largest_trainable.Trial(size, 1_000_000 * size, trained, 1.0, 1 << 20, 1 << 21, [2.0, 1.0], reason)


@pytest.mark.parametrize("first", [1, 30, 37, 200])
@pytest.mark.parametrize("limit", [1, 37, 500])
def test_the_search_ends_next_to_the_largest_that_trains(first: int, limit: int) -> None:
    search = largest_trainable.Search("plain AdamW", "layers")
    largest_trainable.find_largest(search, first, lambda size: trial(size, size <= limit), until=time.monotonic() + 1e6)
    assert search.largest is not None and search.smallest_failed is not None
    assert search.largest.size <= limit < search.smallest_failed.size
    assert search.smallest_failed.size - search.largest.size <= max(1, 0.05 * limit)
    assert len(search.trials) == len({one.size for one in search.trials}) <= 24


def test_nothing_is_begun_that_the_time_is_too_short_for() -> None:
    search = largest_trainable.Search("zerofx", "layers")
    largest_trainable.find_largest(search, 10, lambda size: trial(size, True), until=time.monotonic())
    assert [one.size for one in search.trials] == [10] and search.ended == "out of time"
    plain = largest_trainable.Search("plain AdamW", "layers", [trial(2, True), trial(3, False)])
    text = largest_trainable.table([plain, search], 1 << 31)
    assert "| 10 M " in text and "| 5.0 " in text and "3 M: over the cap" in text and "out of time" in text


@pytest.mark.parametrize(("allocated", "cap", "reason"), [(1 << 28, 1 << 27, "over the cap"), (1, 1 << 27, "")])
def test_a_process_is_held_to_its_cap(allocated: int, cap: int, reason: str) -> None:
    code = f"import time; held = b'x' * {allocated}; time.sleep(0.5)"
    process = subprocess.Popen([sys.executable, "-c", code])
    peak, found = largest_trainable.watch(process, cap, time.monotonic() + 60)
    assert found == reason and (process.returncode != 0) == bool(reason)
    assert (peak > cap) == bool(reason) and peak > 1 << 20


@pytest.mark.slow
def test_a_size_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    axis = largest_trainable.Axis("layers", 1, 128)
    for contender in ("plain AdamW", "AdamW in backward", "zerofx"):
        found = largest_trainable.attempt(contender, axis, 1 << 31, tmp_path, 600.0, 2)
        assert found.trained and found.losses[1] < found.losses[0] and found.numel == axis.numel(2), found
        assert 0 < found.imported_bytes < found.peak_bytes
        assert not largest_trainable.attempt(contender, axis, 1 << 26, tmp_path, 600.0, 2).trained
    assert not list(tmp_path.iterdir())
