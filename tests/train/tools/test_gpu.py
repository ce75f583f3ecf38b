"""``make gpu`` without a GPU: what becomes of cases that run, fail, hang and find no time, and what is made of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import benchmarks.gpu.__main__ as command
from benchmarks.gpu import report
from benchmarks.gpu.case import OUT, Case, Entry
from benchmarks.gpu.case_list import PARTS, cases
from benchmarks.gpu.code import PRODUCT, code_hash, commit_of, hash_of_commit
from benchmarks.gpu.record import Record, ran_before
from benchmarks.gpu.run import run
from benchmarks.gpu.setup import SIZES, Setup
from benchmarks.gpu.summary import MOST_LINES, summary
from benchmarks.gpu.workers import largest as largest_worker
from benchmarks.gpu.workers import step as step_worker
from benchmarks.gpu.workers import tests as tests_worker
from benchmarks.gpu.workers import train as train_worker
from tests.lib.checkout import ROOT

_MACHINE = {
    "python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "cores": 2, "host_bytes": 8 << 30, "gpus": [],
    "libraries": ["pytest", "transformers"],
}  # fmt: skip
_KNOWN = {"code": "abc", "commit": "12345678"}
_FACTS = {"device": "cpu", "sizes": "tiny", **_KNOWN, "machine": _MACHINE}


def setup_in(folder: Path, device: str = "cpu", sizes: str = "tiny", **changes: Any) -> Setup:
    return Setup(device, SIZES[sizes], {**_MACHINE, **changes}, folder)


def python(name: str, code: str, worth: int = 1, cost: float = 1.0, **options: Any) -> Case:
    return Case(name, "measure", worth, cost, ("-c", code, OUT), **options)


def run_all(folder: Path, *listed: Case, seconds: float = 60.0, together: int = 3) -> dict[str, Entry]:
    record = Record(folder, _FACTS)
    run(setup_in(folder), record, listed, time.monotonic() + seconds, together, _KNOWN)
    data = json.loads(record.path.read_text())
    return {entry["name"]: Entry(**entry) for entry in data["cases"]}


WRITES = "import json, sys, pathlib; pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({'x': 1}))\n"
SLEEPS = "import time; time.sleep(60)\n"


def test_of_each_case_it_says_what_became_of_it(tmp_path: Path) -> None:
    known = run_all(
        tmp_path,
        python("ran", WRITES),
        python("failed", WRITES + "raise ValueError('no such thing')"),
        python("slow", WRITES + SLEEPS, prepare_seconds=2.0),
        python("killed", "import os; os.kill(os.getpid(), 9)"),
        python("two devices", WRITES, needs=("2 GPUs",)),
        python("a library", WRITES, needs=("deepspeed",)),
        python("a folder", WRITES, needs=("tests/no_such",)),
        python("no time", WRITES, cost=1000.0),
    )
    whys = {name: (entry.status, entry.why) for name, entry in known.items()}
    assert whys.pop("no time")[1].endswith("s were left")
    assert whys == {
        "ran": ("ran", ""),
        "failed": ("failed", "ended with 1: ValueError: no such thing"),
        "slow": ("failed", "over its 2 s of preparation"),
        "killed": ("failed", "ended by SIGKILL"),
        "two devices": ("lacking", "needs 2 GPUs, found 0"),
        "a library": ("lacking", "needs deepspeed, which is not installed"),
        "a folder": ("lacking", "needs tests/no_such, which is not in this checkout"),
    }
    assert [known[name].results for name in ("ran", "failed", "slow")] == [{"x": 1}] * 3
    assert "Traceback" in known["failed"].output and 'File "<string>", line 2' in known["slow"].output
    assert {entry.commit for entry in known.values()} == {"12345678"}
    log = (tmp_path / "gpu.log").read_text()
    assert "ran: ran" in log and "no such thing" in log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]


def test_all_ends_before_the_deadline_and_keeps_what_was_said(tmp_path: Path) -> None:
    began = time.monotonic()
    known = run_all(tmp_path, python("long", WRITES + SLEEPS, own_cache=True), seconds=12.0)
    assert time.monotonic() - began < 12
    assert known["long"].status == "not run" and known["long"].why.startswith("cut off after")
    assert known["long"].results == {"x": 1} and known["long"].cache == "cold"


def test_a_case_waits_for_memory_that_others_have(tmp_path: Path) -> None:
    spans = "import json, sys, pathlib, time; a = time.time(); time.sleep(1); b = time.time()\n"
    spans += "pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({'span': [a, b]}))"
    known = run_all(tmp_path, *(python(name, spans, device_gb=3.0) for name in "ab"))  # of 4.3 GB
    (_, first_end), (second_begin, _) = sorted(entry.results["span"] for entry in known.values())
    assert first_end <= second_begin


TIMES = """
import json, os, pathlib, sys, time
from benchmarks.lib.turn import turn
spans = []
time.sleep(1.5)
for _ in range(3):
    with turn(whole_machine={whole}):
        spans.append([time.monotonic(), time.sleep(0.2) or time.monotonic()])
    time.sleep(0.05)
pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({{'spans': spans}}))
"""
TICKS = """
import json, pathlib, sys, time
ticks = []
for _ in range(600):
    ticks.append(time.monotonic())
    time.sleep(0.01)
pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({'ticks': ticks}))
"""


@pytest.mark.days(3)
def test_one_case_at_a_time_has_the_device_and_the_machine_stands_still_for_it(tmp_path: Path) -> None:
    known = run_all(
        tmp_path,
        python("whole", TIMES.format(whole=True), worth=3),
        python("card", TIMES.format(whole=False), worth=2),
        python("works", TICKS, worth=4),
    )
    assert {entry.status for entry in known.values()} == {"ran"}
    whole, card = known["whole"].results["spans"], known["card"].results["spans"]
    spans = sorted([*whole, *card])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    ticks = known["works"].results["ticks"]
    assert ticks[0] < whole[0][0] and whole[0][1] < ticks[-1]
    # A look at the clock may have begun before it was stopped.
    assert not [tick for begin, end in whole for tick in ticks if begin + 0.05 < tick < end]
    assert known["whole"].alone and known["works"].alone is None and known["card"].neighbours
    meanwhile = [tick for begin, end in card for tick in ticks if begin < tick < end]
    assert bool(meanwhile) <= (not known["card"].alone)


def test_waiting_for_a_turn_is_not_counted_and_a_long_turn_is_ended(tmp_path: Path) -> None:
    holds = "import time\nfrom benchmarks.lib.turn import turn\nwith turn(): time.sleep({})"
    known = run_all(
        tmp_path,
        python("holds", holds.format(60), worth=2, seconds=3.0),
        python("waits", "import time; time.sleep(1)\n" + holds.format(0), prepare_seconds=2.5),
    )
    assert known["holds"].why == "over its 3 s of a turn"
    assert known["waits"].status == "ran" and known["waits"].waited_seconds > 1.0


def test_what_ran_of_the_same_code_is_not_run_again(tmp_path: Path) -> None:
    run_all(tmp_path, python("good", WRITES), python("bad", "raise SystemExit(1)"))
    path = tmp_path / "gpu.json"
    assert list(ran_before(path, _FACTS)) == ["good"]
    assert ran_before(path, _FACTS)["good"].results == {"x": 1}
    assert ran_before(path, {**_FACTS, "code": "other"}) == {} and ran_before(path, {**_FACTS, "device": "cuda"}) == {}


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command at its smallest, in a process of its own."""
    options = ("--device", "cpu", "--sizes", "tiny", "--out", str(out), *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
def test_the_list_runs_in_miniature(tmp_path: Path) -> None:
    began = time.monotonic()
    process = start(tmp_path, "--until", "110")
    printed, _ = process.communicate(timeout=130)
    assert time.monotonic() - began < 120 and process.returncode == 0, printed
    entries = [Entry(**entry) for entry in json.loads((tmp_path / "gpu.json").read_text())["cases"]]
    failed = [entry.name for entry in entries if entry.status == "failed"]
    assert failed == [] and {entry.status for entry in entries} >= {"ran", "lacking"}
    assert {case.name for case in cases(setup_in(tmp_path))} == {entry.name for entry in entries}


@pytest.mark.slow
def test_killed_at_a_random_second_it_leaves_what_can_be_read(tmp_path: Path) -> None:
    for trial in range(20):
        out = tmp_path / str(trial)
        process = start(out, "--until", "60", "--only", "host", "gpt", "kernel")
        seconds = random.Random(trial).uniform(0.0, 15.0)
        path = out / "gpu.json"
        while not path.exists():  # Python itself has to start
            assert process.poll() is None
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGTERM if trial % 2 else signal.SIGKILL)
        process.communicate(timeout=30)
        data = json.loads(path.read_text())
        assert data["code"] == code_hash()
        assert {Entry(**entry).status for entry in data["cases"]} <= {"ran", "running", "not run", "lacking"}


@pytest.mark.days(3)
def test_sigterm_writes_what_is_under_way(tmp_path: Path) -> None:
    code = (
        "import time, pathlib, json\nfrom tests.train.tools.test_gpu import *\n"
        f"run_all(pathlib.Path({str(tmp_path)!r}), python('long', WRITES + SLEEPS), python('next', WRITES), together=1)"
    )
    paths = os.pathsep.join((str(ROOT), str(ROOT / "examples")))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    log = tmp_path / "gpu.log"
    while not (log.exists() and "long ..." in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "gpu.json").read_text())["cases"]}
    assert entries["long"]["why"] == "cut off: told to end" and entries["long"]["results"] == {"x": 1}
    assert entries["next"]["why"] == "told to end"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for machine, why in ((_MACHINE, "torch 2.11.0 sees none"), ({"failed": "ImportError: no torch"}, "ImportError")):
        monkeypatch.setattr(command, "machine_facts", lambda machine=machine: machine)
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
        assert command.main() == 0
        assert f"lacking: all (no GPU: {why}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--readme", str(tmp_path / "none")])
    assert report.main() == 0 and "nothing written" in capsys.readouterr().out


def test_the_list_is_one_order_of_cases_that_fit_ten_minutes(tmp_path: Path) -> None:
    gpus = [{"name": "H100", "num_bytes": 80e9}]
    listed = cases(setup_in(tmp_path, "cuda", "full", gpus=gpus, cores=16, host_bytes=135 * 10**9))
    names = [case.name for case in listed]
    assert len(set(names)) == len(names) and [case.worth for case in listed] == sorted(
        (case.worth for case in listed), reverse=True
    )
    assert max(case.seconds for case in listed) <= 90 and all(case.cost > 0 for case in listed)
    assert all(case.prepare_seconds <= 90 for case in listed if case.worth >= 45)
    assert sum(case.cost for case in listed if case.worth >= 45) < 2 * 560  # three at a time
    assert {case.part for case in listed} == set(PARTS)


def test_results_are_of_the_products_code_alone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a repository")
    changed = ("git", "status", "--porcelain", "--", *PRODUCT)
    if subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout:
        pytest.skip("needs a product that is committed")
    assert hash_of_commit("HEAD") == code_hash()
    assert hash_of_commit(commit_of(code_hash())) == code_hash() and commit_of("no such") == ""


def test_the_table_is_forty_lines_at_most() -> None:
    result = {"outcomes": {"a": {"outcome": "passed"}}, "collected": ["a", "b"]}
    ran = [Entry(f"case {number}", "tests", "ran", seconds=3.0, results=result) for number in range(60)]
    others = [Entry(f"other {number}", "tests", "not run", "0 s were left") for number in range(60)]
    lines = summary([*ran, *others], 500.0).splitlines()
    assert len(lines) <= MOST_LINES and lines[0].endswith("case 0: 1 passed, 1 left")
    assert "... and" in lines[-3] and lines[-1] == "60 ran, 60 not run; 500 s"


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("masters", [True, False])
def test_losses_are_those_of_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masters: bool) -> None:
    request = {
        "model": "gpt", "backend": "eager", "masters": masters, "num_steps": 3, "num_sequences": 1, "device": "cpu",
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(request), str(tmp_path)])
    train_worker.main()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == result["torch_losses"] and result["losses"][2] < result["losses"][0]
    assert 0.99 * result["predicted_bytes"] < result["measured_bytes"] <= result["predicted_bytes"]


@pytest.mark.days(3)
def test_a_step_is_measured_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"shape": "tiny", "changes": {"depth": 3}, "backend": "eager", "device": "cpu", "dtype": "float32"}
    results: list[dict[str, Any]] = []
    for budget in (None, 0.8, 0.01):
        if budget is not None:
            request["budget"] = int(budget * results[0]["predicted_bytes"]["device"])  # type: ignore[assignment]
        monkeypatch.setattr(sys, "argv", ["worker", json.dumps(request), str(tmp_path)])
        step_worker.main()
        results.append(json.loads((tmp_path / "result.json").read_text()))
    whole, within, refused = results
    assert within["predicted_bytes"]["device"] <= within["budget"] < whole["predicted_bytes"]["device"]
    assert within["measured_bytes"]["device"] <= 1.02 * within["predicted_bytes"]["device"]
    assert len(within["seconds"]) == step_worker.NUM_STEPS and "cannot be met" in refused["refused"]


@pytest.mark.parametrize("tier", [None, "nvme"])
def test_a_size_is_trained_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drive: Path, tier: str) -> None:
    case = next(case for case in cases(setup_in(drive)) if case.part == "offload" and "layers" in case.name)
    request = {**json.loads(case.command[2]), "shape": "tiny", "changes": {"depth": 2}, "tier": tier}
    for budget in (1 << 30, 1):
        monkeypatch.setattr(sys, "argv", ["worker", json.dumps({**request, "budget": budget}), str(tmp_path)])
        largest_worker.main()
        result = json.loads((tmp_path / "result.json").read_text())
        trains = budget > 1 or tier is None
        assert (len(result.get("losses", [])) == 2) is trains and ("reason" in result) is not trains
        assert not trains or result["tokens_per_second"] > 0


TESTS = """
import os, time
import pytest

def test_good(): pass
def test_dies(): os._exit(3)
def test_bad(): raise ValueError("wrong")
def test_hangs(): time.sleep(60)
@pytest.mark.skip(reason="needs two GPUs")
def test_skipped(): pass
"""


@pytest.mark.days(3)
def test_tests_go_on_after_one_that_takes_its_process_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_all.py").write_text(TESTS)
    request = {"arguments": [str(tmp_path / "test_all.py"), "--rootdir", str(tmp_path)], "test_seconds": 2}
    monkeypatch.setattr(sys, "argv", ["worker", json.dumps(request), str(tmp_path)])
    monkeypatch.chdir(ROOT)
    tests_worker.main()
    result = json.loads((tmp_path / "result.json").read_text())
    known = {name.rpartition("_")[2]: outcome for name, outcome in result["outcomes"].items()}
    assert {name: outcome["outcome"] for name, outcome in known.items()} == {
        "good": "passed", "dies": "failed", "bad": "failed", "hangs": "failed", "skipped": "skipped",
    }  # fmt: skip
    assert len(result["collected"]) == 5 and "ValueError: wrong" in known["bad"]["text"]


def entry(part: str, results: Mapping[str, Any], commit: str = "12345678") -> dict[str, Any]:
    return {
        **vars(Entry(f"llama-1b, inductor, {part}", part, "ran", commit=commit, code="abc", results=results)),
        "neighbours": 0,
    }


RESULTS: dict[str, Mapping[str, Any]] = {
    "tests": {"collected": ["a::b"], "outcomes": {"a::b": {"outcome": "passed", "seconds": 1, "text": ""}}},
    "train": {"losses": [4.0, 2.02], "torch_losses": [4.0, 2.0], "seconds": 0.01, "torch_seconds": 0.02},
    "memory": {
        "budget": None, "predicted_bytes": {"device": 100e9}, "predicted_seconds": 1.0, "num_recomputed": 0,
        "allocated_bytes": 101e9, "reserved_bytes": 104e9, "seconds": [2.0], "card_bytes": 105e9,
    },
    "kernels": {
        "kernels_cuda": {
            "rows": [
                {"group": "update", "contender": name, "median_seconds": seconds, "min_seconds": 1.0, "ratio": 1.0,
                 "min_ratio": 1.0, "of_copy": None, "peak_bytes": 0}
                for name, seconds in (("torch", 4.0), ("torch.compile", 2.0), ("kernel", 1.0))
            ]
        }
    },
    "offload": {"num_layers": 2, "num_parameters": int(3e9), "losses": [1.0], "seconds": [2.0]},
    "measure": {"host_rates": {"update of ATen's kernels": {"1": 9e9, "2": 18e9}}, "link_rates": {"to the host": 50e9}},
}  # fmt: skip


@pytest.mark.days(3)
def test_the_report_has_a_table_of_each_part_and_rows_with_their_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    machine = {**_MACHINE, "gpus": [{"name": "H100", "num_bytes": 80e9}]}
    facts = {**_FACTS, "device": "cuda", "machine": machine}
    listed = [entry(part, results) for part, results in RESULTS.items()]
    listed.append(vars(Entry("another", "speed", "not run", "3 s were left", code="abc")))

    def write_report(listed: list[dict[str, Any]]) -> tuple[str, str]:
        (tmp_path / "gpu.json").write_text(json.dumps({**facts, "cases": listed}))
        out = tmp_path / "results"
        monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--results", str(out), "--readme", str(readme)])
        assert report.main() == 0
        return (out / "gpu.md").read_text(), readme.read_text()

    page, rows = write_report(listed)
    assert "1 x H100, 2 cores, torch 2.11.0, CUDA 13.0" in page and "- another: not run: 3 s were left" in page
    assert "+1.0 %" in page and "+4.0 %" in page and "| 1.000 " in page and "| 50.0 " in page
    assert rows.startswith("before\n") and rows.endswith("after\n") and "old" not in rows
    for number in ("1 passed", "1.00 %", "+4.0 % to +4.0 %", "0.50", "3.0 billion", "18 GB/s"):
        assert any(f"| {number}" in line and "12345678" in line for line in rows.splitlines()), number
    other = {**RESULTS["train"], "losses": [4.0, 2.04]}
    page, rows = write_report([entry("train", other, "abcdef01")])
    assert "| 2.00 %" in rows and "`abcdef01`" in rows and "| +4.0 % to +4.0 %" in rows  # what has not run again
    page, rows = write_report([entry("train", other, "")])
    assert "2.00 %" not in rows and "| none" in page  # a row without a commit is no row of the README


def test_the_readme_has_a_place_for_the_rows() -> None:
    text = (ROOT / "README.md").read_text()
    assert "new rows" in report.with_rows(text, "new rows")
    with pytest.raises(ValueError, match="found neither"):
        report.with_rows("no marks", "")


def test_rows_of_the_readme_are_those_of_the_results() -> None:
    data = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    assert report.readme_text(data) in (ROOT / "README.md").read_text()
    assert (ROOT / "benchmarks" / "results" / "gpu.md").read_text() == report.markdown(data)
