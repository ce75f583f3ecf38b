"""Stages that are alike have one search, and each the plan that a search of its own would find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zerofx
from gpt import GPT
from tests.lib.models import adamw
from zerofx.driver import plan_only
from zerofx.driver.plan_only import PlannedStep
from zerofx.scheduler.search.planner import make_plan

OWN: dict[str, dict[str, Any]] = {
    "layer by layer": {"order": "layer"},
    "in rounds": {"order": "round-robin"},
    "clipped": {"max_grad_norm": 1.0},
    "recomputed": {"recompute": "full"},
}


def _plan(**options: Any) -> PlannedStep:
    model = GPT(vocab=19, dim=64, depth=8, heads=2, block=16)
    tokens = torch.zeros(8, 16, dtype=torch.long)
    given: dict[str, Any] = {"mesh": {"pipe": 4, "shard": 2}, "accumulate": 8, "order": "layer"} | options
    return zerofx.plan(model, adamw(model), (tokens, tokens), 3, machine="h100-sxm", **given)


def _count_searches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    searches = list[None]()

    def count(problem: Any) -> Any:
        searches.append(None)
        return make_plan(problem)

    monkeypatch.setattr(plan_only, "make_plan", count)
    return searches


@pytest.mark.sweep(2)
@pytest.mark.parametrize("own", OWN)
def test_a_stage_that_is_alike_has_the_plan_of_its_own_search(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = _count_searches(monkeypatch)
    at_once = _plan(**OWN[own])
    assert len(searches) == 3  # the first stage, those in the middle, and the last
    monkeypatch.setattr(plan_only, "_plan_alike", lambda *_: None)
    alone = _plan(**OWN[own])
    assert len(searches) == 7
    assert [stage.plan for stage in at_once.stages] == [stage.plan for stage in alone.stages]
    assert len({stage.plan.graph for stage in at_once.stages}) == 4
    assert [stage.lowered.emitted.source for stage in at_once.stages] == [
        stage.lowered.emitted.source for stage in alone.stages
    ]


def test_recomputed_activations_have_their_names_in_each_stage() -> None:
    second, third = (
        {(each.value, each.layer) for each in stage.plan.absences if each.value}
        for stage in _plan(recompute="full").stages[1:3]
    )
    assert second and third and not second & third


def test_stages_that_take_turns_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = _count_searches(monkeypatch)
    _plan(order="micro-batch")
    assert len(searches) == 4
