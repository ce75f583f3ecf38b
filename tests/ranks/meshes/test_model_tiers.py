"""Ranks that share a computation, whose parameters, states and activations are elsewhere: the same bits, as planned."""

from __future__ import annotations

import os
from typing import Any

import pytest

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.runs.checkpoints import Outcome, outcome
from tests.lib.runs.offloads import check_measured
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import build, world
from zerofx import Plan


def trained(mesh: dict[str, int], **options: Any) -> tuple[Outcome, Plan]:
    """Three steps, and what they come to; bytes and peaks are asserted to be those predicted."""
    case = CASES["gpt"]
    model = build(case)
    options = {"backend": "eager", "machine": SHARING, **options}
    step = zerofx.compile(model, case.optimizer(model), loss_fn=case.loss_fn, mesh=mesh, **options)
    given = list(batches(case, world()[0] // mesh["model"], 3))
    found = outcome(step, [float(step(*args, **kwargs)) for args, kwargs in given])
    args, kwargs = given[0]
    check_measured(step.measure(*args, num_steps=2, **kwargs), step.plan, 4096)
    plan = step.plan
    step.close()
    return found, plan


def compared(folder: str, mesh: dict[str, int], ways: list[dict[str, Any]]) -> dict[str, Any]:
    """What is another bit, by ways that have a budget of a share of the peak without; and what left the device."""
    os.environ["ZEROFX_NVME_DIR"] = folder
    expected, plan = trained(mesh)
    wrong, away = {}, set[str]()
    for way in ways:
        options = dict(way)
        if "share" in options:
            options["memory_budget"] = int(plan.peak_bytes["device"] * options.pop("share"))
        found, own = trained(mesh, **options)
        wrong[str(way)] = expected.differences(found)
        away |= {f"states {d.tier}" for d in own.states} | {f"parameters {d.tier}" for d in own.parameters}
        away |= {f"activations {d.tier}" for d in own.offloads}
    return {"wrong": {way: lines for way, lines in wrong.items() if lines}, "away": away}


def away(tier: str, *shares: float) -> list[dict[str, Any]]:
    return [{"share": share, "offload": tier, "recompute": "none"} for share in shares]


def test_what_two_ranks_share_is_elsewhere(tmp_path: Any) -> None:
    for found in run_ranks(compared, 2, str(tmp_path), {"model": 2}, away("nvme", 0.6)):
        assert found == {"wrong": {}, "away": {"states nvme", "parameters nvme", "activations nvme"}}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"model": 2}, {"shard": 2, "model": 2}], ids=str)
def test_everything_is_elsewhere(tmp_path: Any, mesh: dict[str, int]) -> None:
    ways = [*away("host", 0.9, 0.6), *away("nvme", 0.9, 0.7, 0.6), {"recompute": "full"}]
    ways += [{"delayed_update": 5}, {"share": 0.95}]
    for found in run_ranks(compared, zerofx.Mesh(**mesh).num_ranks, str(tmp_path), mesh, ways):
        assert found["wrong"] == {}
        assert {f"{what} {tier}" for what in ("states", "parameters") for tier in ("host", "nvme")} <= found["away"]
        assert "activations nvme" in found["away"]
