"""What a plan says of one layer, bucket or node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lib.lowered import lowered
from zerofx.errors import PlanError
from zerofx.scheduler.plan.decisions import Absence, ShardingDecision
from zerofx.scheduler.plan.plan import Plan

REASON = "level 1 of 2 for layers.2: the last move frees 1.5 KiB for 3 µs of computation"


def plan_of(num_ranks: int = 2, stage: int = 3) -> Plan:
    """Four layers and a head; of the third two values are computed again."""
    decisions = (
        Absence(kind="recomputes", value="mm_2", num_bytes=1024, reason=REASON, layer="layers.2.linear"),
        Absence(kind="recomputes", value="relu_2", num_bytes=512, reason=REASON, layer="layers.2"),
    )
    plan = replace(lowered(4, stage=stage, num_ranks=num_ranks).plan, extra_keeps=("relu_1",))
    return plan.replace_absences(recomputes=decisions)


@pytest.mark.parametrize("name", ["layers.2", "layers.2.linear", "layers.1", "layers", "mm_2", "relu_1", "mm", "mm_4"])
def test_what_is_decided_about(golden: Callable[..., None], name: str) -> None:
    golden(plan_of().why(name))


def test_what_is_not_done_or_done_otherwise(golden: Callable[..., None]) -> None:
    plan, replicated = plan_of(), plan_of(stage=0)
    frozen = replace(plan, buckets=tuple(replace(bucket, group=None) for bucket in plan.buckets))
    first = replicated.reduces[0]
    texts = [plan_of(num_ranks=1).why("layers.0"), frozen.why("layers.0"), replicated.why(first.gathered_after or "")]
    golden("\n".join([*texts, replicated.why(replicated.buckets[first.bucket].name)]))


def test_what_is_offloaded(golden: Callable[..., None]) -> None:
    plan = lowered(4, tiers=["host", "nvme"]).plan
    first = plan.offloads[0]
    texts = [
        plan.why("layers.1"),
        plan.why(first.value),
        plan.why(first.free_after[0]),
        plan.why(first.reload_before[0]),
    ]
    golden("\n".join(texts))


def test_a_name_that_is_the_beginning_of_another_is_not_taken_for_it() -> None:
    text = lowered(12).plan.why("layers.1")
    assert text.count("bucket ") == 1 and "bucket layers.1:" in text


def test_the_node_of_the_peak_says_what_is_live() -> None:
    plan = plan_of()
    assert plan.prediction is not None
    assert "the device's peak is here, " in plan.why(plan.prediction.peak_node)
    assert "activations" in plan.why(plan.prediction.peak_node)


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


def test_all_names_that_are_answered_are_suggested() -> None:
    plan = lowered(4, tiers=["host", "nvme"]).plan
    plan = replace(
        plan,
        reduces=(replace(plan.reduces[0], crossed_after="crossing_here"), *plan.reduces[1:]),
        shardings=(ShardingDecision("sharing_here", ("S0",)), ShardingDecision("p", ("S0",), parameter="lying.here")),
    )
    plan = plan.replace_absences(
        offloads=[replace(plan.offloads[0], free_after=("freeing_here",), reload_before=("reloading_here",))],
        states=[
            Absence(
                kind="states", bucket=0, tier="host", reload_before=("arriving_here",), read="reading_here", reason=""
            )
        ],
    )
    for name in (
        "crossing_here",
        "freeing_here",
        "reloading_here",
        "arriving_here",
        "reading_here",
        "sharing_here",
        "lying.here",
    ):
        assert name in plan.why(name)
        with pytest.raises(PlanError, match=f"the nearest are {name}"):
            plan.why(f"{name}x")


def test_a_plan_from_json_explains_itself_as_well() -> None:
    plan = plan_of()
    assert Plan.from_json(plan.to_json()).why("layers.2") == plan.why("layers.2")
