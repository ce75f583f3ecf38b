"""Residencies of gathered buckets: gather, wait, use, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.lib.graphs import features, prepare
from zerofx.errors import PlanError

aten = torch.ops.aten


def test_each_bucket_gets_its_residencies(golden: Callable[..., None]) -> None:
    golden(prepare().changes("gather"))


def test_a_plan_that_leaves_a_use_without_residency_is_refused() -> None:
    prepared = prepare()
    prepared.plan = replace(prepared.plan, gathers=prepared.plan.gathers[:-1])
    with pytest.raises(PlanError, match="no residency"):
        prepared.run("gather")


def test_a_plan_that_gathers_what_is_there_whole_is_refused() -> None:
    prepared, sharded = prepare(num_ranks=1), prepare(num_ranks=2)
    prepared.plan = replace(prepared.plan, gathers=sharded.plan.gathers)
    with pytest.raises(PlanError, match=r"bucket \d+, which is there whole"):
        prepared.run("gather")


def test_a_plan_for_another_graph_is_refused() -> None:
    prepared = prepare(batch=features())
    decision = replace(prepared.plan.gathers[0], first="no_such_node")
    prepared.plan = replace(prepared.plan, gathers=(decision, *prepared.plan.gathers[1:]))
    with pytest.raises(PlanError, match="names node no_such_node"):
        prepared.run("gather")
