"""How ranks share a computation is decided once for a graph, a mesh and a machine, whatever else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zerofx
from tests.lib.models import CASES, batches
from tests.lib.sharing import SHARING
from tests.lib.training import build


def planned(folder: Path, **options: Any) -> tuple[zerofx.Plan, int]:
    """The plan of a step, and how many decisions about sharing are kept in ``folder`` once it is made."""
    case = CASES["stack"]
    model = build(case)
    ((args, _),) = batches(case, 0, 1)
    options = {"machine": SHARING, "mesh": {"model": 2}, "backend": "eager", **options}
    plan = zerofx.plan(model, case.optimizer(model), args, **options).plan
    return plan, len(list(folder.glob("sharing-*")))


def test_steps_that_differ_in_all_else_read_what_was_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, _ = planned(tmp_path)
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    first, number = planned(tmp_path)
    assert number == 2 and first.to_json() == alone.to_json()  # of calls, and of what overlaps
    for options in ({"stage": 0}, {"recompute": "full"}, {"max_grad_norm": 1.0}):
        again, number = planned(tmp_path, **options)
        assert number == 2 and again.shardings == first.shardings and again.overlaps == first.overlaps
    for kept in tmp_path.glob("sharing-*"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert planned(tmp_path)[0].shardings == first.shardings


def test_what_the_decision_follows_from_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    whole, number = planned(tmp_path, machine="h100-sxm")
    shared, other = planned(tmp_path)
    assert (number, other) == (2, 4) and whole.shardings != shared.shardings
    pinned, number = planned(tmp_path, shardings={"*": "replicated"})
    assert number > 4 and pinned.shardings != shared.shardings
    assert planned(tmp_path, mesh={"shard": 2, "model": 2})[1] > number
