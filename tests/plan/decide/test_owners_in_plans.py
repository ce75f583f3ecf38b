"""A plan says who updates which parameter whole: in its text, its JSON and what differs from another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerofx
from zerofx.scheduler.plan.plan import Plan


def _plan(num_ranks: int, stage: int = 3, **options: Any) -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)), nn.Linear(32, 64, bias=False))
    planned = zerofx.plan(
        model, torch.optim.Muon(model.parameters()), (torch.zeros(4, 32),), stage=stage, world_size=num_ranks,
        machine="h100-sxm", loss_fn=_mean_square, **options,
    )  # fmt: skip
    return planned.plan


def _mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def test_the_text_says_how_many_parameters_each_rank_owns_and_why() -> None:
    line = (
        "owners: 5 parameters are updated whole, 1 to 2 by each of 3 ranks along shard: "
        "the costliest first, to the one that has least to do"
    )
    assert line in str(_plan(3))
    for alone in (_plan(1), _plan(2, stage=0)):
        assert "owners" not in str(alone) and all(bucket.owners == () for bucket in alone.buckets)


def test_replicas_own_among_all_of_them() -> None:
    plan = _plan(4, mesh={"replicate": 2, "shard": 2}, states_over="mesh")
    assert "by each of 4 ranks along shard and replicate" in str(plan)


def test_json_has_the_owner_of_each_parameter(tmp_path: Path) -> None:
    plan = _plan(3)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    owners = [bucket.owners for bucket in loaded.buckets]
    assert sorted(map(len, owners)) == [1] * 5 and {rank for ranks in owners for rank in ranks} == {0, 1, 2}


def test_other_owners_are_another_plan() -> None:
    plan = _plan(3)
    first, *others = plan.buckets
    moved = replace(plan, buckets=(replace(first, owners=((first.owners[0] + 1) % 3,)), *others))
    assert moved.decisions_hash() != plan.decisions_hash()
    assert "whole parameters at other owners (1 of 5 buckets)" in plan.diff(moved)
