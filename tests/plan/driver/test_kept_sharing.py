"""How ranks share a computation is decided once for a graph, a mesh, a machine and what the plan is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zerofx
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import plan_of


def planned(folder: Path, **options: Any) -> tuple[zerofx.Plan, int]:
    """The plan of a step, and how many decisions about sharing are kept in ``folder`` once it is made."""
    plan = plan_of("stack", **{"machine": SHARING, "mesh": {"model": 2}, **options}).plan
    return plan, len(list(folder.glob("sharing-*")))


def test_a_step_reads_what_was_decided_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = planned(tmp_path)
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    first, number = planned(tmp_path)
    assert number >= 2 and first.to_json() == alone.to_json()  # of calls, and of what overlaps in each layout
    assert planned(tmp_path) == (first, number)
    for kept in tmp_path.glob("sharing-*"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert planned(tmp_path)[0].shardings == first.shardings


def test_what_the_decision_follows_from_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    whole, number = planned(tmp_path, machine="h100-sxm")
    shared, other = planned(tmp_path)
    assert number < other and whole.shardings != shared.shardings
    pinned, more = planned(tmp_path, shardings={"*": "replicated"})
    assert more > other and pinned.shardings != shared.shardings
    _, most = planned(tmp_path, mesh={"shard": 2, "model": 2})
    assert most > more
    for options in ({"stage": 0}, {"recompute": "full"}):  # steps that differ in these share a computation in one way
        again, number = planned(tmp_path, **options)
        assert number == most and again.shardings == shared.shardings
