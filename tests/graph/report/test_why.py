"""What a plan says of one layer, bucket or node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lib.lowered import lowered
from zerofx.errors import PlanError
from zerofx.scheduler.plan.decisions import RecomputeDecision
from zerofx.scheduler.plan.plan import Plan

REASON = "level 1 of 2 for layers.2: the last move frees 1.5 KiB for 3 µs of computation"


def plan_of(num_ranks: int = 2, stage: int = 3) -> Plan:
    """Four layers and a head; of the third two values are computed again."""
    decisions = (
        RecomputeDecision("mm_2", 1024, REASON, "layers.2.linear"),
        RecomputeDecision("relu_2", 512, REASON, "layers.2"),
    )
    return replace(lowered(4, stage=stage, num_ranks=num_ranks).plan, recomputes=decisions, extra_keeps=("relu_1",))


def test_a_bucket_has_all_that_is_decided_about_it() -> None:
    lines = plan_of().why("layers.2").splitlines()
    assert lines[0] == "layers.2:"
    assert lines[1] == "  bucket layers.2: 16 parameters, 128 B whole, 64 B on each of 2 ranks"
    assert [line.split()[0] for line in lines[2:5]] == ["gathered", "gathered", "gradients"]
    assert "resident while layers.2 runs in forward, issued 1 ahead to hide behind layers.1" in lines[2]
    assert "resident while layers.2 runs in backward" in lines[3]
    assert "awaited when the gradients of layers.1 are complete" in lines[4]
    assert lines[5:] == [
        "  computed again in backward: 2 values, 1.5 KiB freed",
        f"    mm_2 of layers.2.linear, 1.0 KiB, is computed again: {REASON}",
        f"    relu_2 of layers.2, 512 B, is computed again: {REASON}",
    ]


def test_a_module_has_its_buckets_decisions_and_its_own_values() -> None:
    lines = plan_of().why("layers.2.linear").splitlines()
    assert lines[1].startswith("  bucket layers.2: ")
    assert lines[-2:] == [
        "  computed again in backward: 1 value, 1.0 KiB freed",
        f"    mm_2 of layers.2.linear, 1.0 KiB, is computed again: {REASON}",
    ]


def test_what_is_offloaded(golden: Callable[..., None]) -> None:
    plan = lowered(4, tiers=["host", "nvme"]).plan
    first = plan.offloads[0]
    texts = [plan.why("layers.1"), plan.why(first.value), plan.why(first.free_after), plan.why(first.reload_before)]
    golden("\n".join(texts))


def test_a_layer_whose_values_are_all_kept() -> None:
    assert plan_of().why("layers.1").splitlines()[-1] == "  nothing is computed again in backward"


def test_a_name_that_is_the_beginning_of_another_is_not_taken_for_it() -> None:
    text = lowered(12).plan.why("layers.1")
    assert text.count("bucket ") == 1 and "bucket layers.1:" in text


def test_a_list_of_layers_has_those_of_all() -> None:
    text = plan_of().why("layers")
    assert [f"bucket layers.{i}:" in text for i in range(4)] == [True] * 4
    assert "bucket head" not in text


def test_nodes() -> None:
    plan = plan_of()
    first, second = plan.gathers[:2]
    text = plan.why(first.first)
    assert "gather of layers.0: issued before it, awaited before it, the first use, released after it" in text
    assert f"gather of layers.1: issued before it: {second.reason}" in text
    assert plan.why("mm_2").endswith(f"mm_2 of layers.2.linear, 1.0 KiB, is computed again: {REASON}")
    assert "only because other values are computed again" in plan.why("relu_1")
    awaited = next(reduce for reduce in plan.reduces if reduce.wait_after is not None)
    assert awaited.wait_after is not None
    assert f"reduction of {plan.buckets[awaited.bucket].name}: awaited after it" in plan.why(awaited.wait_after)


def test_at_stage_0_the_place_of_a_gathered_sum_is_named() -> None:
    plan = plan_of(stage=0)
    first = plan.reduces[0]
    assert first.gathered_after
    assert f"reduction of {plan.buckets[first.bucket].name}: its sum is there after it" in plan.why(
        first.gathered_after
    )
    assert f"(after {first.wait_after} and {first.gathered_after})" in plan.why(plan.buckets[first.bucket].name)


def test_the_node_of_the_peak_says_what_is_live() -> None:
    plan = plan_of()
    assert plan.prediction is not None
    assert "the device's peak is here, " in plan.why(plan.prediction.peak_node)
    assert "activations" in plan.why(plan.prediction.peak_node)


def test_what_is_not_done_is_said() -> None:
    text = plan_of(num_ranks=1).why("layers.0")
    assert "never gathered: stage 3 on 1 rank(s) keeps parameters whole on the device" in text
    assert "never reduced: there is one rank" in text
    plan = plan_of()
    frozen = replace(plan, buckets=tuple(replace(bucket, group=None) for bucket in plan.buckets))
    assert "never reduced: frozen, or without a gradient" in frozen.why("layers.0")


def test_every_decision_is_found_by_name() -> None:
    plan = plan_of()
    for bucket in plan.buckets:
        assert bucket.name in plan.why(bucket.name)
    for name in [*(d.value for d in plan.recomputes), *(d.layer for d in plan.recomputes), *plan.extra_keeps]:
        assert name in plan.why(name)
    for gather in plan.gathers:
        for name in (gather.first, gather.last, gather.issue):
            assert gather.reason in plan.why(name)


@pytest.mark.parametrize(("name", "near"), [
    ("layer.2", "the nearest are .*layers.2"), ("layers.2linear", "the nearest are layers.2.linear"),
    ("relu2", "relu_2"), ("", "the buckets are layers.0, layers.1"), ("qqqqqqq", "the buckets are layers.0, layers.1"),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_its_neighbours(name: str, near: str) -> None:
    with pytest.raises(PlanError, match=near):
        plan_of().why(name)


def test_a_plan_from_json_explains_itself_as_well() -> None:
    plan = plan_of()
    assert Plan.from_json(plan.to_json()).why("layers.2") == plan.why("layers.2")
