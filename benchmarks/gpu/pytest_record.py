"""Plugin of pytest: each test's outcome is written as soon as it is known, and a test that takes too long is ended.

    python -m pytest -p benchmarks.gpu.pytest_record --record FOLDER --test-seconds 120 --done FILE

A test over its time takes its process with it, and so does a device that has broken: whoever started this goes on with
the tests that are left (``--done`` names those that are not).
"""

from __future__ import annotations

import faulthandler
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.case import Answers

FIRST = "test_training"  # in the names of the tests that say most


class Recorder:
    """Outcomes by test: what it came to, its seconds, and the text of what went wrong or why it was skipped."""

    def __init__(self, config: pytest.Config) -> None:
        self._answers = Answers(Path(config.getoption("--record")))
        self._seconds = float(config.getoption("--test-seconds"))
        done = config.getoption("--done")
        self._done = frozenset(json.loads(Path(done).read_text())) if done else frozenset()
        self._outcomes: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        before = [item for item in items if item.nodeid in self._done]
        config.hook.pytest_deselected(items=before)
        items[:] = [item for item in items if item.nodeid not in self._done]
        items.sort(key=lambda item: FIRST not in item.nodeid)
        self._answers.add(collected=[item.nodeid for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._answers.add(running=nodeid)
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=2)

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

    def pytest_sessionfinish(self) -> None:
        self._answers.add(ended=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("record")
    group.addoption("--record", required=True, help="folder for result.json")
    group.addoption("--test-seconds", type=float, default=120.0, help="the most that a test may take")
    group.addoption("--done", help="JSON list of tests that are left out")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "gpu-recorder")
