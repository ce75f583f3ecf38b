"""Plugin of pytest: each test's outcome is written as soon as it is known, and a test that takes too long is ended.

    python -m pytest -p benchmarks.gpu.workers.pytest_record --record FOLDER --test-seconds 60

A test over its time takes its process with it, and so does a device that has broken: the next process with the same
folder goes on with the tests that have no outcome there. Each test has the device to itself.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.case import RESULT, Answers
from benchmarks.lib.turn import turn


class Recorder:
    """Outcomes by test: what it came to, its seconds, and the text of what went wrong or why it was skipped."""

    def __init__(self, config: pytest.Config) -> None:
        folder = Path(config.getoption("--record"))
        self._seconds = float(config.getoption("--test-seconds"))
        path = folder / f"{RESULT}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        self._outcomes: dict[str, dict[str, Any]] = before.get("outcomes", {})
        if running := before.get("running"):
            text = "its process ended, or it took too long"
            self._outcomes[running] = {"outcome": "failed", "seconds": 0.0, "text": text}
        self._collected: list[str] = before.get("collected", [])
        self._answers = Answers(folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        before = [item for item in items if item.nodeid in self._outcomes]
        config.hook.pytest_deselected(items=before)
        items[:] = [item for item in items if item.nodeid not in self._outcomes]
        collected = self._collected or [item.nodeid for item in items]
        self._answers.add(collected=collected, outcomes=self._outcomes, running=None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with turn():
            self._answers.add(running=item.nodeid)
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=2)
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._outcomes.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "text": ""})
        outcome["seconds"] += report.duration
        if report.outcome != "passed":
            outcome["outcome"] = report.outcome
            outcome["text"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._answers.add(running=None, outcomes=self._outcomes)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # nothing runs in this process any more
            item.session.shouldstop = f"the device has broken: {error}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", required=True, help="folder for result.json")
    group.addoption("--test-seconds", type=float, default=60.0, help="the most that a test may take")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "gpu-recorder")
