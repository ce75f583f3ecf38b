"""Progress bars: nothing for what is quick or where no terminal is, and the time that goes by for what is slow."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from zerofx import progress
from zerofx.progress import watch_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in the place of stderr, and little patience. No fixture: pytest sets stderr anew after those."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "_BEAT_SECONDS", 0.05)
    return made


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with watch_progress("planning", "plans") as bar:
        bar.update()
    assert terminal.getvalue() == ""


def test_one_long_call_shows_how_long_it_has_been(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with watch_progress("capturing the model"):
        time.sleep(1.3)
    text = terminal.getvalue()
    assert re.search(r"capturing the model: 00:01", text)
    assert text.endswith("\r"), "the line is cleared"


def test_counts_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with watch_progress("compiling", "regions", 3) as bar:
        for _ in range(3):
            time.sleep(0.2)
            bar.update()
    assert "2/3" in terminal.getvalue() and "regions" in terminal.getvalue()


def test_other_ranks_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with watch_progress("planning", show=False):
        time.sleep(0.5)
    assert terminal.getvalue() == ""


def test_without_a_terminal_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.1)
    with watch_progress("planning"):
        time.sleep(0.8)
    assert pipe.getvalue() == ""
