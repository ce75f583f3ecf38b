"""What the planner's stages write of their search, where ``ZEROFX_DEBUG`` asks for it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import zerofx
from tests.lib.models import DIM, Layer, adamw
from zerofx.scheduler.search.planner import STAGES

LINE = re.compile(r"plan (?P<indent> *)(?P<stage>[a-z -]+): (?P<text>.+)")


def trail_of(capsys: pytest.CaptureFixture[str], **options: object) -> list[tuple[int, str, str]]:
    """Depth, stage and text of each line that a plan's search writes."""
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    batch = (torch.randn(64, DIM), torch.randn(64, DIM))
    given = {"machine": "cpu", "backend": "eager", "loss_fn": lambda out, x, y: F.mse_loss(out, y)} | options
    with contextlib.suppress(zerofx.MemoryBudgetError):
        zerofx.plan(model, adamw(model), batch, **given)  # type: ignore[arg-type]  # each test's are right
    matches = [match for line in capsys.readouterr().err.splitlines() if (match := LINE.fullmatch(line))]
    return [(len(match["indent"]) // 2, match["stage"], match["text"]) for match in matches]


def test_each_stage_says_what_it_tried_inside_the_stage_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "2")
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    trail = trail_of(capsys, memory_budget=45_000)
    names = [stage.name for stage in STAGES]
    assert all(names[depth] == stage for depth, stage, _ in trail)
    texts = {stage: text for _, stage, text in trail}  # the last of each
    assert set(texts) == {"slices", "micro-batches", "later updates", "kept plans", "rungs", "moves", "left over"}
    assert texts["slices"].startswith("as asked: peak ")
    assert re.fullmatch(r"recompute: \d+ lengths of \d+ moves tried, one fits", texts["moves"])
    assert texts["rungs"].startswith("nothing tiled: peak ")


def test_a_refused_budget_shows_every_rung_that_was_turned_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "2")
    trail = trail_of(capsys, memory_budget=1)
    assert next(text for _, stage, text in trail if stage == "rungs") == "nothing tiled: no plan fits"
    assert any(stage == "slices" and "does not fit, needs" in text for _, stage, text in trail)


def test_several_numbers_of_micro_batches_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "2")
    trail = trail_of(capsys, memory_budget=45_000, accumulate="auto")
    tried = [text for _, stage, text in trail if stage == "micro-batches"]
    assert tried[0] == "1 ..." and tried[-1].startswith(("more are not tried", "64"))


def test_nothing_is_written_where_it_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", "1")
    assert trail_of(capsys, memory_budget=45_000) == []
