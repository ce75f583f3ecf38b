"""The benchmarks' own arithmetic, and that they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import host_update, nvme_throughput
from benchmarks.memory_frontier import BASELINE, Contender, Result, rows, table

ROOT = Path(__file__).resolve().parent.parent


def result(name: str, peak: int, rounds: list[list[tuple[float, float]]], group: int = 0) -> Result:
    return Result(Contender(name, name, {}), {"peak_bytes": peak, "compile_seconds": 1.0}, group, rounds)


def test_ratios_are_of_minima_and_to_the_baseline_of_the_same_group() -> None:
    found = rows(
        [
            result(BASELINE, 4_000_000, [[(2.0, 4.0), (3.0, 5.0)]]),
            result("other", 1_000_000, [[(9.0, 6.0)], [(3.0, 8.0)]]),
            result(BASELINE, 4_000_000, [[(4.0, 8.0)]], group=1),
            result("third", 1_000_000, [[(4.0, 4.0)]], group=1),
        ]
    )
    assert [(row["ratio"], row["cpu_ratio"]) for row in found] == [(1.0, 1.0), (1.5, 1.5), (1.0, 1.0), (1.0, 0.5)]
    assert found[1]["median_seconds"] == 6.0 and found[1]["peak_mb"] == 1.0
    assert "| other" in table(found)


def test_what_was_refused_is_in_no_row() -> None:
    refused = Result(Contender("zerofx", "zerofx", {}), {"refused": "too little"}, 0)
    assert [row["contender"] for row in rows([result(BASELINE, 1, [[(1.0, 1.0)]]), refused])] == [BASELINE]


@pytest.mark.slow
def test_the_memory_frontier_of_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_frontier.py"), "--shape", "tiny", "--rounds", "1"]
    command += ["--steps", "1", "--peers", "dp:0.5", "greedy:0.5", "ilp:0.5", "--budgets", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    found = json.loads((tmp_path / "memory_frontier.json").read_text())
    assert {row["family"] for row in found["rows"]} >= {
        BASELINE,
        "zerofx",
        "checkpoint per block",
        "dp budget",
        "greedy budget",
        "ilp budget",
    }
    assert (tmp_path / "memory_frontier.png").stat().st_size > 0


def test_drive_throughput_is_compared_by_medians() -> None:
    rounds = {
        "plain": [{"write": 4e8, "read": 1e9}, {"write": 2e8, "read": 2e9}, {"write": 9e8, "read": 3e9}],
        "zerofx": [{"write": 2e8, "read": 3e9}, {"write": 1e8, "read": 1e9}, {"write": 9e8, "read": 1e9}],
    }
    found = nvme_throughput.rows("plain", rounds)
    assert [(row["ratio"], row["best_ratio"]) for row in found] == [(0.5, 1.0), (0.5, 1.0)]
    assert "| write | 400" in nvme_throughput.table("plain", found)


def test_both_write_and_read_and_leave_nothing(tmp_path: Path) -> None:
    name, rounds = nvme_throughput.measure(tmp_path, 8 << 20, 2)
    assert set(rounds) == {name, "zerofx"}
    assert all(taken[direction] > 0 for one in rounds.values() for taken in one for direction in ("write", "read"))
    assert not list(tmp_path.iterdir())


def test_the_update_is_compared_with_the_copy_round_by_round() -> None:
    rounds = host_update.measure(1 << 20, 3)
    assert [len(taken) for taken in rounds.values()] == [3, 3]
    found = host_update.row({"copy": [2e9, 1e9, 4e9], "update": [1e9, 6e9, 3e9]})
    assert (found["ratio"], found["best_ratio"]) == (1.5, 1.5)
    assert "| 2.00" in host_update.table(found)
