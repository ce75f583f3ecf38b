"""What is said of two plans, and of a plan with a budget."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.lib.lowered import lowered
from zerofx.scheduler.plan.decisions import Absence, PieceDecision, ShardingDecision
from zerofx.scheduler.plan.plan import Plan


def recomputing(plan: Plan, layers: int, level: int = 1, size: int = 1024) -> Plan:
    """``level`` values of each of the first layers are computed again."""
    decisions = [
        Absence(
            kind="recomputes",
            value=f"v{i}_{j}",
            num_bytes=size,
            reason=f"level {level} of 2 for layers.{i}",
            layer=f"layers.{i}.linear",
        )
        for i in range(layers)
        for j in range(level)
    ]
    return plan.replace_absences(recomputes=tuple(decisions))


def test_what_is_offloaded(golden: Callable[..., None]) -> None:
    without, plan = lowered(6).plan, lowered(6, tiers=["host"]).plan
    later = replace(plan.offloads[1], reload_before=plan.offloads[0].reload_before)
    moved = plan.replace_absences(offloads=(plan.offloads[0], later, *plan.offloads[2:]))
    lines = str(plan).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("offloaded"))
    texts = [*lines[start:], without.diff(plan), plan.diff(moved), plan.diff(lowered(6, tiers=["host", "nvme"]).plan)]
    golden("\n\n".join(texts))


def test_where_states_live(golden: Callable[..., None]) -> None:
    plan = lowered(4).plan
    host = plan.replace_absences(
        states=[Absence(kind="states", bucket=i, tier="host", update="device", reason="by hand") for i in range(5)]
    )
    mixed = host.replace_absences(states=(*host.states[:2], *(replace(d, update="host") for d in host.states[2:])))
    lines = str(mixed).splitlines()
    start = lines.index("optimizer states")
    golden("\n\n".join(["\n".join(lines[start:]), plan.diff(host), host.diff(mixed), host.why("layers.1")]))


def test_equal_plans_are_the_same() -> None:
    plan = lowered(4).plan
    assert plan.diff(plan) == "the plans are the same"
    assert plan.diff(Plan.from_json(plan.to_json())) == "the plans are the same"


def kept(plan: Plan, name: str) -> Plan:
    """``plan`` with a bucket kept from its first residency to its second."""
    index = next(i for i, bucket in enumerate(plan.buckets) if bucket.name == name)
    first, second = (gather for gather in plan.gathers if gather.bucket == index)
    rest = [gather for gather in plan.gathers if gather.bucket != index]
    return replace(plan, gathers=(*rest, replace(first, last=second.last)))


def changed(plan: Plan, decisions: str, **fields: object) -> Plan:
    """``plan`` with another first decision of a kind."""
    first, *rest = getattr(plan, decisions)
    given: dict[str, Any] = {decisions: (replace(first, **fields), *rest)}
    return replace(plan, **given)


def cast(plan: Plan) -> Plan:
    return replace(plan, buckets=tuple(replace(b, compute_dtype="torch.bfloat16") for b in plan.buckets))


PAIRS: dict[str, Callable[[], tuple[Plan, Plan]]] = {
    "what it is made for": lambda: (
        lowered(4).plan,
        replace(lowered(4, stage=1, num_ranks=4).plan, precision="bf16", machine="h100-sxm", memory_budget=2**30),
    ),
    "parameters that stay whole": lambda: (lowered(6).plan, lowered(6, stage=2).plan),
    "issued ahead": lambda: (lowered(6, prefetch=0).plan, lowered(6).plan),
    "kept": lambda: (lowered(4).plan, kept(lowered(4).plan, "layers.2")),
    "no longer kept": lambda: (kept(lowered(4).plan, "layers.2"), lowered(4).plan),
    "another node": lambda: (lowered(4).plan, changed(lowered(4).plan, "gathers", last="elsewhere")),
    "recomputed": lambda: (lowered(4).plan, recomputing(lowered(4).plan, 3)),
    "recomputed more": lambda: (recomputing(lowered(4).plan, 2), recomputing(lowered(4).plan, 2, level=2)),
    "recomputed others": lambda: (
        recomputing(lowered(4).plan, 1),
        lowered(4).plan.replace_absences(
            recomputes=[Absence(kind="recomputes", value="w", num_bytes=1024, reason="why", layer="layers.0")]
        ),
    ),
    "extra keeps": lambda: (lowered(2).plan, replace(lowered(2).plan, extra_keeps=("relu",))),
    "awaited later": lambda: (lowered(4).plan, changed(lowered(4).plan, "reduces", wait_after=None)),
    "summed later": lambda: (lowered(4).plan, changed(lowered(4).plan, "reduces", gathered_after=None)),
    "reduced": lambda: (lowered(4, num_ranks=1).plan, lowered(4).plan),
    "more buckets": lambda: (lowered(4).plan, lowered(5).plan),
    "fewer buckets": lambda: (lowered(5).plan, lowered(4).plan),
    "other buckets": lambda: (lowered(4).plan, cast(lowered(4).plan)),
    "other reasons": lambda: (lowered(2).plan, changed(lowered(2).plan, "reduces", reason="for no reason")),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_differences(golden: Callable[..., None], pair: Callable[[], tuple[Plan, Plan]]) -> None:
    one, other = pair()
    decided, _, _ = one.diff(other).partition("\npredicted")
    golden(re.sub(r"graph: \w{12} -> \w{12}", "graph: <hash> -> <hash>", decided))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"by_layer": True}, "made for\n  order: one micro-batch after the other -> layer by layer"),
        ({"pieces": (PieceDecision("head", "mm", "sum", None, None),)}, "pieces outside layers\n  added: head"),
        ({"shardings": (ShardingDecision("relu", ("whole",)),)}, "shared along model\n  added: relu"),
        ({"overlaps": (("t", "mm"),)}, "moved to overlap with collectives\n  added: mm"),
    ],
)
def test_a_decision_of_each_kind_is_told(change: dict[str, Any], said: str) -> None:
    plan = lowered(2).plan
    assert plan.diff(replace(plan, **change)) == said
    assert replace(plan, **change).diff(plan) != "the reasons that are given for decisions"


def test_predictions_before_and_after() -> None:
    plan = lowered(4).plan
    assert plan.prediction is not None
    half = replace(plan.prediction, step_seconds=plan.step_seconds / 2, wire_bytes=plan.wire_bytes * 2)
    lines = plan.diff(plan.with_prediction(half)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["predicted, per rank", "  time of a step", "  sent in a step"]
    assert lines[1].endswith("(-50.0%)") and lines[2].endswith("(+100.0%)")
    gone = replace(plan, prediction=None)
    assert plan.diff(gone) == "predicted, per rank\n  simulated -> not simulated"
    assert gone.diff(gone) == "the plans are the same"


@pytest.mark.days(3)
@pytest.mark.parametrize("depth", [6, 30])
def test_a_diff_is_flat_in_depth(depth: int) -> None:
    text = recomputing(lowered(depth).plan, depth).diff(lowered(depth, stage=1).plan)
    assert len(text.splitlines()) < 25


def test_a_plan_prints_its_budget_and_what_is_computed_again() -> None:
    plan = replace(recomputing(lowered(12).plan, 8), memory_budget=64 * 1024)
    lines = str(plan).splitlines()
    peak = plan.peak_bytes["device"]
    assert lines[0].endswith(
        f"memory budget 64.0 KiB of which the peak takes {peak / 1024:.1f} KiB ({peak / 65536:.1%})"
    )
    assert lines[-2:] == [
        "recomputed: 8 values, 8.0 KiB freed between forward and backward",
        "  layers.0 … layers.7  x8: 1 value, 1.0 KiB freed in each, 8.0 KiB in all; level 1 of 2 for each",
    ]


def test_layers_at_other_levels_have_lines_of_their_own() -> None:
    plan = lowered(12).plan
    deep, shallow = recomputing(plan, 3, level=2).recomputes, recomputing(plan, 5).recomputes[3:]
    plan = replace(plan.replace_absences(recomputes=(*deep, *shallow)), extra_keeps=("relu",))
    lines = str(plan).splitlines()
    assert lines[-3:] == [
        "  layers.0 … layers.2  x3: 2 values, 2.0 KiB freed in each, 6.0 KiB in all; level 2 of 2 for each",
        "  layers.3 … layers.4  x2: 1 value, 1.0 KiB freed in each, 2.0 KiB in all; level 1 of 2 for each",
        "  kept for it, though backward does not read it: 1 value",
    ]


def test_a_budget_without_a_prediction() -> None:
    plan = replace(lowered(2).plan, memory_budget=1024, prediction=None)
    assert str(plan).splitlines()[0].endswith("memory budget 1.0 KiB")


def test_a_single_layer_keeps_its_reason() -> None:
    assert str(recomputing(lowered(3).plan, 1)).splitlines()[-1] == (
        "  layers.0: 1 value, 1.0 KiB freed; level 1 of 2 for layers.0"
    )
