"""``make gpu`` without a GPU: what becomes of cases that run, fail, hang and find no time, and what is made of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import benchmarks.gpu.__main__ as command
from benchmarks.gpu import largest_worker, report, step_worker, train_worker
from benchmarks.gpu.case import OUT, Case, Entry, run
from benchmarks.gpu.part import Record, run_part
from benchmarks.gpu.parts import memory, offload, tests
from benchmarks.gpu.setup import SIZES, Setup
from benchmarks.largest_trainable.search import Search
from tests.lib.checkout import ROOT

_MACHINE = {
    "python": "3.12.3", "torch": "2.11.0", "cuda": "13.0", "cores": 2, "host_bytes": 8 << 30, "gpus": [],
    "libraries": ["pytest", "transformers"],
}  # fmt: skip
_FACTS = {"device": "cpu", "sizes": "tiny", "code": "abc", "machine": _MACHINE}


def setup_in(folder: Path, device: str = "cpu", **changes: Any) -> Setup:
    return Setup(device, SIZES["tiny"], {**_MACHINE, **changes}, folder)


def python(name: str, code: str, **options: Any) -> Case:
    return Case(name, ("-c", code, OUT), **options)


WRITES = "import json, sys, pathlib; pathlib.Path(sys.argv[1], 'result.json').write_text(json.dumps({'x': 1}))\n"


def test_results_stay_where_a_case_fails_or_takes_too_long(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = run(python("ran", WRITES), 60, log)
    assert (ran.status, ran.results, ran.why) == ("ran", {"x": 1}, "")
    failed = run(python("failed", WRITES + "raise ValueError('no such thing')"), 60, log)
    assert (failed.status, failed.results) == ("failed", {"x": 1})
    assert failed.why == "ended with 1: ValueError: no such thing" and "Traceback" in failed.output
    began = time.monotonic()
    slow = run(python("slow", WRITES + "import time; time.sleep(60)", seconds=2.0), 60, log)
    assert (slow.status, slow.results, slow.why) == ("failed", {"x": 1}, "over its 2 s")
    assert "time.sleep" in slow.output or 'File "<string>", line 2' in slow.output  # where it was
    assert time.monotonic() - began < 20
    cut_off = run(python("cut off", WRITES + "import time; time.sleep(60)"), 1.0, log)
    assert (cut_off.status, cut_off.results, cut_off.why) == ("not run", {"x": 1, "cut_off": True}, "cut off after 1 s")
    killed = run(python("killed", "import os; os.kill(os.getpid(), 9)"), 60, log)
    assert killed.why == "ended by SIGKILL"


def test_a_part_goes_on_and_says_of_each_case_what_became_of_it(tmp_path: Path) -> None:
    def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
        yield python("fails", "raise SystemExit(3)")
        yield python("after it", WRITES)
        yield python("two devices", WRITES, needs=("2 GPUs",))
        yield python("a library", WRITES, needs=("deepspeed",))
        yield python("depends", WRITES, blocked="" if entries["after it"].results["x"] == 2 else "x is not 2")
        yield python("no time", WRITES, least_seconds=1000.0)

    record = Record("part", tmp_path)
    run_part(record, setup_in(tmp_path), cases, _FACTS, 100.0)
    listed = json.loads(record.path.read_text())["cases"]
    assert {case["name"]: (case["status"], case["why"]) for case in listed if case["name"] != "no time"} == {
        "fails": ("failed", "ended with 3"),
        "after it": ("ran", ""),
        "two devices": ("lacking", "needs 2 GPUs, found 0"),
        "a library": ("lacking", "needs deepspeed, which is not installed"),
        "depends": ("not run", "x is not 2"),
    }
    assert listed[-1]["status"] == "not run" and listed[-1]["why"].endswith("s were left")
    assert "part: after it: ran" in record.log.read_text()


def test_what_ran_before_with_the_same_code_is_not_run_again(tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
        for name, code in (("good", 0), ("bad", 1)):
            yield python(name, f"open({str(marks)!r}, 'a').write('{name} '); raise SystemExit({code})")

    record = Record("part", tmp_path)
    for facts in (_FACTS, _FACTS, {**_FACTS, "code": "other"}):
        run_part(record, setup_in(tmp_path), cases, facts, 100.0)
    assert marks.read_text().split() == ["good", "bad", "bad", "good", "bad"]


def test_a_mistake_of_the_part_itself_is_recorded_and_raised(tmp_path: Path) -> None:
    def cases(setup: Setup, entries: Mapping[str, Entry]) -> Iterator[Case]:
        yield python("first", WRITES)
        raise KeyError("second")

    record = Record("part", tmp_path)
    with pytest.raises(KeyError, match="second"):
        run_part(record, setup_in(tmp_path), cases, _FACTS, 100.0)
    listed = json.loads(record.path.read_text())["cases"]
    assert [case["status"] for case in listed] == ["ran", "failed"] and listed[1]["why"] == "KeyError: 'second'"


def test_without_a_gpu_every_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "machine_facts", lambda: _MACHINE)
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    assert command.main() == 0
    said = capsys.readouterr().out
    for part in command.PARTS:
        assert f"{part}: all: lacking: no GPU: torch 2.11.0 sees none" in said
        assert json.loads((tmp_path / f"{part}.json").read_text())["machine"]["torch"] == "2.11.0"
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--readme", str(tmp_path / "none")])
    assert report.main() == 0 and "nothing written" in capsys.readouterr().out


def test_a_machine_that_says_nothing_of_itself_has_no_gpu(tmp_path: Path) -> None:
    broken = Setup("cuda", SIZES["full"], {"failed": "ImportError: no torch"}, tmp_path)
    record = Record("part", tmp_path)
    run_part(record, broken, memory.cases, _FACTS, 100.0)
    assert "no GPU: ImportError: no torch" in record.log.read_text()


def test_budgets_are_shares_of_what_was_predicted_without_one(tmp_path: Path) -> None:
    entries: dict[str, Entry] = {}
    for case in memory.cases(setup_in(tmp_path), entries):
        request = json.loads(case.command[2])
        whole = "3 layers" not in case.name
        if case.name.endswith("no budget"):
            results = {"predicted_bytes": {"device": 1000}} if whole else {}
            entries[case.name] = Entry(case.name, "ran" if whole else "failed", results=results)
        else:
            share = float(case.name.split()[-3])
            assert request["budget"] == (int(1000 * share) if whole else None)
            assert case.blocked == ("" if whole else "tiny-llama, 3 layers, eager, no budget: failed")
    assert len(entries) == 3


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
    setup = setup_in(drive)
    contender = next(one for one in offload.ON_CPU if one.tier == tier)
    case = offload.trial_case(contender, 2, setup)
    request = {**json.loads(case.command[2]), "shape": "tiny"}
    for budget in (request["budget"], 1):
        monkeypatch.setattr(sys, "argv", ["worker", json.dumps({**request, "budget": budget}), str(tmp_path)])
        largest_worker.main()
        result = json.loads((tmp_path / "result.json").read_text())
        entry = Entry(case.name, "ran", results=result)
        search = Search(contender.name, "layers")
        offload.note(search, 2, entry)
        trains = budget > 1 or tier is None
        assert search.trials[0].trained is trains and (len(result.get("losses", [])) == 2) is trains


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


def test_tests_go_on_after_one_that_takes_its_process_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests, "TEST_SECONDS", 2)
    (tmp_path / "test_all.py").write_text(TESTS)
    setup = Setup("cpu", SIZES["tiny"], _MACHINE, tmp_path, (str(tmp_path / "test_all.py"), "--rootdir", str(tmp_path)))
    record = Record("tests", tmp_path)
    run_part(record, setup, tests.cases, _FACTS, 200.0)
    cases = json.loads(record.path.read_text())["cases"]
    known = {name.rpartition("_")[2]: one for name, one in tests.outcomes([case["results"] for case in cases]).items()}
    assert {name: one["outcome"] for name, one in known.items()} == {
        "good": "passed", "dies": "failed", "bad": "failed", "hangs": "failed", "skipped": "skipped",
    }  # fmt: skip
    assert len(cases) == 3 and "ValueError: wrong" in known["bad"]["text"]


def part(name: str, results: Mapping[str, Any], device: str = "cuda") -> dict[str, Any]:
    entries = [
        {
            "name": "llama-1b, inductor, a case",
            "status": "ran",
            "why": "",
            "output": "",
            "seconds": 1.0,
            "results": results,
        },
        {"name": "another", "status": "not run", "why": "3 s were left", "output": "", "seconds": 0.0, "results": {}},
    ]
    machine = {**_MACHINE, "gpus": [{"name": "H100", "num_bytes": 80e9}]}
    return {"part": name, **_FACTS, "device": device, "machine": machine, "cases": entries}


RESULTS: dict[str, Mapping[str, Any]] = {
    "tests": {"collected": ["a::b"], "outcomes": {"a::b": {"outcome": "passed", "seconds": 1, "text": ""}}},
    "train": {"losses": [4.0, 2.02], "torch_losses": [4.0, 2.0], "seconds": 0.01, "torch_seconds": 0.02},
    "memory": {
        "budget": None, "predicted_bytes": {"device": 100e9}, "predicted_seconds": 1.0, "num_recomputed": 0,
        "allocated_bytes": 101e9, "reserved_bytes": 104e9, "seconds": [2.0],
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
    "measure": {"seconds": [2.0, 2.0], "predicted_seconds": 1.0},
}  # fmt: skip


def test_the_report_has_a_table_of_each_part_and_rows_for_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, results in RESULTS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part(name, results)))
    (tmp_path / "speed.json").write_text(json.dumps(part("speed", {}, device="cpu")))
    out = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--results", str(out), "--readme", str(readme)])
    assert report.main() == 0
    page, rows = (out / "gpu.md").read_text(), readme.read_text()
    assert "1 x H100, 2 cores, torch 2.11.0, CUDA 13.0" in page and "- another: not run: 3 s were left" in page
    assert "+1.0 %" in page and "+4.0 %" in page and "## speed" not in page
    assert rows.startswith("before\n") and rows.endswith("after\n") and "old" not in rows
    for number in ("1 passed", "1.00 %", "+4.0 % to +4.0 %", "0.50", "3.0 billion"):
        assert f"| {number}" in rows, number
    (tmp_path / "memory.json").unlink()
    (tmp_path / "train.json").write_text(json.dumps(part("train", {**RESULTS["train"], "losses": [4.0, 2.04]})))
    assert report.main() == 0
    rows = readme.read_text()
    assert "| 2.00 %" in rows and "| +4.0 % to +4.0 %" in rows  # of the part that is not in the folder any more
    assert json.loads((out / "gpu.json").read_text())["tests"]["cases"][0]["results"]["collected"] == ["a::b"]


def test_the_readme_has_a_place_for_the_rows() -> None:
    text = (ROOT / "README.md").read_text()
    assert "new rows" in report.with_rows(text, "new rows")
    with pytest.raises(ValueError, match="found neither"):
        report.with_rows("no marks", "")
