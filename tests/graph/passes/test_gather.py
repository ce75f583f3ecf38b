"""Residencies of gathered buckets: gather, wait, use, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from tests.lib.graphs import Normed, Prepared, Tied, TwoBlocks, calls, features, prepare, token_ids
from zerofx.errors import PlanError
from zerofx.ir import ops
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, origin

aten = torch.ops.aten


def _wait_of(gather: fx.Node) -> fx.Node:
    (wait,) = gather.users
    assert wait.target is ops.wait
    return wait


def _gathers_of(prepared: Prepared, name: str) -> list[fx.Node]:
    (index,) = (bucket.index for bucket in prepared.layout.buckets if bucket.name == name)
    return [node for node in calls(prepared.step, ops.all_gather) if node.args[1] == index]


def test_each_bucket_gets_its_residencies(golden: Callable[..., None]) -> None:
    golden(prepare().changes("gather"))


@pytest.mark.parametrize("keep", [(), "all", ("layers.1",)])
def test_a_gather_has_one_release_and_nothing_reads_the_bucket_after_it(keep: tuple[str, ...] | str) -> None:
    prepared = prepare(keep=keep).run("gather")
    order = prepared.step.positions()
    for gather in calls(prepared.step, ops.all_gather):
        readers = consumers(_wait_of(gather))
        (release,) = [node for node in readers if node.target is ops.release]
        assert max(readers, key=order.__getitem__) is release


def test_a_block_is_gathered_for_forward_and_again_for_backward() -> None:
    prepared = prepare().run("gather")
    phases = [origin(node).phase for node in _gathers_of(prepared, "layers.1")]
    assert phases == [Phase.FORWARD, Phase.BACKWARD]


def test_what_forward_ends_with_stays_for_backward() -> None:
    prepared = prepare().run("gather")
    assert len(_gathers_of(prepared, "head")) == 1


@pytest.mark.parametrize("keep", ["all", ("layers.1",)])
def test_a_kept_bucket_has_one_residency(keep: tuple[str, ...] | str) -> None:
    prepared = prepare(keep=keep).run("gather")
    (gather,) = _gathers_of(prepared, "layers.1")
    (release,) = [node for node in consumers(_wait_of(gather)) if node.target is ops.release]
    assert origin(release).phase is Phase.BACKWARD


def test_each_residency_has_views_of_its_own() -> None:
    prepared = prepare().run("gather")
    for gather in calls(prepared.step, ops.all_gather):
        views = [node for node in _wait_of(gather).users if node.target is aten.as_strided.default]
        assert len(views) == 1, "one parameter a bucket, one view a residency"


def test_a_tied_weight_is_gathered_where_either_owner_runs() -> None:
    prepared = prepare(Tied(), token_ids()).run("gather")
    readers = [[node.target for node in consumers(_wait_of(g))] for g in _gathers_of(prepared, "embed")]
    assert len(readers) == 2
    assert aten.embedding.default in readers[0] and aten.embedding.default not in readers[1]


def test_a_bucket_of_several_parameters_is_gathered_once_a_residency() -> None:
    prepared = prepare(Normed()).run("gather")
    (forward, _) = _gathers_of(prepared, "layers.0")
    assert [user.args[3] for user in _wait_of(forward).users if user.target is aten.as_strided.default] == [0, 16]


def test_a_frozen_bucket_is_gathered_like_any_other() -> None:
    model = TwoBlocks()
    model.layers[1].requires_grad_(False)
    prepared = prepare(model).run("gather")
    assert len(_gathers_of(prepared, "layers.1")) == 2


def test_a_plan_that_leaves_a_use_without_residency_is_refused() -> None:
    prepared = prepare()
    prepared.plan = replace(prepared.plan, gathers=prepared.plan.gathers[:-1])
    with pytest.raises(PlanError, match="no residency"):
        prepared.run("gather")


def test_a_plan_for_another_graph_is_refused() -> None:
    prepared = prepare(batch=features())
    decision = replace(prepared.plan.gathers[0], first="no_such_node")
    prepared.plan = replace(prepared.plan, gathers=(decision, *prepared.plan.gathers[1:]))
    with pytest.raises(PlanError, match="names node no_such_node"):
        prepared.run("gather")
