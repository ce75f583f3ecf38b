"""The deterministic plan: residencies, how early they are gathered, and where reductions are awaited."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from gpt import GPT
from tests.lib.graphs import Normed, Peeking, Prepared, Shifts, Tied, TwoBlocks, features, prepare, token_ids
from zerofx.codegen.regions import Region, cut
from zerofx.ir.bucketing import layout_of
from zerofx.ir.facts import Phase, origin
from zerofx.scheduler.decide.residency import PolicyOptions, decide
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.mesh import Mesh


def _residencies(prepared: Prepared) -> list[tuple[str, str, str]]:
    """Bucket name, first and last node of each residency."""
    names = [bucket.name for bucket in prepared.layout.buckets]
    return [(names[g.bucket], g.first, g.last) for g in prepared.plan.gathers]


def test_a_bucket_is_resident_while_its_layer_runs() -> None:
    assert _residencies(prepare()) == [
        ("layers.0", "mm", "mm"),
        ("layers.1", "mm_1", "mm_1"),
        ("head", "mm_2", "mm_4"),
        ("layers.1", "mm_6", "mm_6"),
    ]


def test_residencies_are_numbered_by_first_use() -> None:
    prepared = prepare(Peeking())
    order = {node.name: position for node, position in prepared.step.positions().items()}
    firsts = [order[decision.first] for decision in prepared.plan.gathers]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("model", [TwoBlocks, Normed, Shifts, Peeking])
def test_a_residency_ends_before_the_bucket_is_needed_again(model: type[nn.Module]) -> None:
    prepared = prepare(model())
    order = {node.name: position for node, position in prepared.step.positions().items()}
    for bucket in prepared.layout.buckets:
        spans = [(order[g.first], order[g.last]) for g in prepared.plan.gathers if g.bucket == bucket.index]
        assert all(first <= last for first, last in spans)
        assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_a_gather_is_issued_that_many_residencies_ahead(depth: int) -> None:
    gathers = prepare(prefetch=depth).plan.gathers
    for number, decision in enumerate(gathers):
        assert decision.issue == gathers[max(0, number - depth)].first
        assert ("ahead" in decision.reason) is (decision.issue != decision.first)


def test_keep_all_gives_each_bucket_one_residency() -> None:
    prepared = prepare(keep="all")
    assert len({decision.bucket for decision in prepared.plan.gathers}) == len(prepared.plan.gathers) == 3
    assert any("kept from forward to backward" in decision.reason for decision in prepared.plan.gathers)


def test_keep_by_name_is_for_that_bucket() -> None:
    prepared = prepare(Normed(), keep=("layers.0",))
    assert [name for name, _, _ in _residencies(prepared)] == ["layers.0", "layers.1"]
    assert [name for name, _, _ in _residencies(prepare(Normed()))] == ["layers.0", "layers.1", "layers.0"]


def test_a_tied_weight_is_resident_with_each_of_its_owners() -> None:
    names = [name for name, _, _ in _residencies(prepare(Tied(), token_ids()))]
    assert names.count("embed") == 2


def test_a_norm_stays_while_a_tied_head_of_another_bucket_runs_so_that_no_gather_cuts_the_region_around_the_loss() -> (
    None
):
    ids = torch.randint(19, (2, 8))
    prepared = prepare(GPT(19, 8, 2, 2, 7), (ids[:, :-1], ids[:, 1:]), prefetch=0)
    names = [name for name, _, _ in _residencies(prepared)]
    assert names == ["tokens+positions", "layers.0", "layers.1", "norm", "tokens+positions", "layers.1", "layers.0"]
    instructions = cut(prepared.run().step)
    around = next(i for i in instructions if isinstance(i, Region) and i.origin.layer == "norm")
    assert {origin(node).phase for node in around.nodes} == {Phase.FORWARD, Phase.BACKWARD}
    assert any("layer_norm_backward" in str(node.target) for node in around.nodes)


def test_every_trained_bucket_has_a_reduction_and_only_the_last_waits_for_the_end() -> None:
    prepared = prepare()
    decisions = prepared.plan.reduces
    assert [decision.bucket for decision in decisions] == [2, 1, 0]
    assert [decision.wait_after is None for decision in decisions] == [False, False, True]


def test_a_frozen_bucket_is_gathered_but_not_reduced() -> None:
    model = TwoBlocks()
    model.layers[1].requires_grad_(False)
    prepared = prepare(model)
    (frozen,) = [bucket for bucket in prepared.layout.buckets if bucket.name == "layers.1"]
    assert frozen.index in {decision.bucket for decision in prepared.plan.gathers}
    assert frozen.index not in {decision.bucket for decision in prepared.plan.reduces}


def test_without_a_trained_bucket_nothing_is_reduced() -> None:
    prepared = prepare(TwoBlocks())
    prepared.step.set_outputs(prepared.step.loss, {}, {})
    layout = layout_of(prepared.step, {}, Mesh(shard=2))
    plan = decide(prepared.step, layout, undecided(prepared.step, layout, 3, None, "cpu"), PolicyOptions())
    assert plan.reduces == () and plan.gathers


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_3_gathers(stage: int) -> None:
    assert prepare(stage=stage).plan.gathers == ()


def test_equal_inputs_give_an_equal_plan_and_the_graph_is_left_alone() -> None:
    torch.manual_seed(1)
    one, other = prepare(batch=features()), prepare(batch=features())
    assert one.plan == other.plan and one.plan.decisions_hash() == other.plan.decisions_hash()
    assert one.plan.graph == one.step.fingerprint() == other.step.fingerprint()


def test_every_decision_says_why() -> None:
    plan = prepare(prefetch=2).plan
    assert all(gather.reason for gather in plan.gathers)
    assert all(reduction.reason for reduction in plan.reduces)


class Biased(nn.Module):
    """Equal layers of a weight and a bias, which are trained in two groups and so lie in two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def test_the_buckets_of_a_layer_are_gathered_and_awaited_together() -> None:
    model = Biased()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    prepared = prepare(model, optimizer=optimizer)
    buckets, plan = prepared.layout.buckets, prepared.plan
    unit = {index: bucket.unit for index, bucket in enumerate(buckets)}
    issued = {(unit[g.bucket], g.issue) for g in plan.gathers if g.bucket < len(buckets) and "forward" in g.reason}
    assert len(issued) == 3
    awaited = [(unit[r.bucket], r.wait_after) for r in plan.reduces]
    assert len(awaited) == 6 and len(set(awaited)) == 3
    assert awaited[-1] == ("layers.0", None)
