"""What is said of two plans, and of a plan with a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lib.lowered import lowered
from zerofx.scheduler.plan.decisions import RecomputeDecision, StateDecision
from zerofx.scheduler.plan.plan import Plan


def recomputing(plan: Plan, layers: int, level: int = 1, size: int = 1024) -> Plan:
    """``level`` values of each of the first layers are computed again."""
    decisions = [
        RecomputeDecision(f"v{i}_{j}", size, f"level {level} of 2 for layers.{i}", f"layers.{i}.linear")
        for i in range(layers)
        for j in range(level)
    ]
    return replace(plan, recomputes=tuple(decisions))


def test_what_is_offloaded(golden: Callable[..., None]) -> None:
    without, plan = lowered(6).plan, lowered(6, tiers=["host"]).plan
    later = replace(plan.offloads[1], reload_before=plan.offloads[0].reload_before)
    moved = replace(plan, offloads=(plan.offloads[0], later, *plan.offloads[2:]))
    lines = str(plan).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("offloaded"))
    texts = [*lines[start:], without.diff(plan), plan.diff(moved), plan.diff(lowered(6, tiers=["host", "nvme"]).plan)]
    golden("\n\n".join(texts))


def test_where_states_live(golden: Callable[..., None]) -> None:
    plan = lowered(4).plan
    host = replace(plan, states=tuple(StateDecision(i, "host", "device", "by hand") for i in range(5)))
    mixed = replace(host, states=(*host.states[:2], *(replace(d, update="host") for d in host.states[2:])))
    lines = str(mixed).splitlines()
    start = lines.index("optimizer states")
    golden("\n\n".join(["\n".join(lines[start:]), plan.diff(host), host.diff(mixed), host.why("layers.1")]))


def test_equal_plans_are_the_same() -> None:
    plan = lowered(4).plan
    assert plan.diff(plan) == "the plans are the same"
    assert plan.diff(Plan.from_json(plan.to_json())) == "the plans are the same"


def test_what_it_is_made_for() -> None:
    one = lowered(4, stage=3, num_ranks=2).plan
    other = replace(lowered(4, stage=1, num_ranks=4).plan, precision="bf16", machine="h100-sxm", memory_budget=2**30)
    lines = one.diff(other).splitlines()
    assert lines[:6] == [
        "made for",
        "  stage: 3 -> 1",
        "  ranks: 2 -> 4",
        "  precision: of the model -> bf16",
        "  machine: cpu -> h100-sxm",
        "  memory budget: none -> 1.0 GiB",
    ]
    assert "buckets" not in lines, "slices of more ranks are shorter, buckets are the same"


def test_parameters_that_stay_whole() -> None:
    lines = lowered(6).plan.diff(lowered(6, stage=2).plan).splitlines()
    assert "  layers.1 … layers.5  x5: gathered twice -> not gathered" in lines
    assert any(line.startswith("  sent in a step: ") for line in lines)


def test_gathers_that_are_issued_ahead() -> None:
    lines = lowered(6, prefetch=0).plan.diff(lowered(6, prefetch=1).plan).splitlines()
    assert lines[0] == "gathers"
    assert "  layers.1 … head  x6: issued 0 -> 1 gathers ahead" in lines


def test_gathers_that_are_kept() -> None:
    plan = lowered(4).plan
    index = next(i for i, bucket in enumerate(plan.buckets) if bucket.name == "layers.2")
    mine = [gather for gather in plan.gathers if gather.bucket == index]
    rest = [gather for gather in plan.gathers if gather not in mine]
    kept = replace(plan, gathers=(*rest, replace(mine[0], last=mine[1].last)))
    text = "layers.2: gathered twice -> gathered once (released between -> kept from forward to backward)"
    assert text in plan.diff(kept)
    assert "layers.2: gathered once -> gathered twice (kept from forward to backward -> released between)" in (
        kept.diff(plan)
    )


def test_a_gather_at_another_node() -> None:
    plan = lowered(4).plan
    moved = replace(plan, gathers=(replace(plan.gathers[0], last="elsewhere"), *plan.gathers[1:]))
    assert plan.diff(moved) == "gathers\n  layers.0: gathered once as before, at other nodes"


def test_recomputed_values_by_layer() -> None:
    plan = lowered(4).plan
    assert plan.diff(recomputing(plan, 3)).splitlines() == [
        "recomputed",
        "  layers.0 … layers.2  x3: nothing -> 1 value, 1.0 KiB freed",
    ]
    assert recomputing(plan, 2).diff(recomputing(plan, 2, level=2)).splitlines()[1:] == [
        "  layers.0 … layers.1  x2: 1 value, 1.0 KiB freed -> 2 values, 2.0 KiB freed"
    ]
    others = replace(recomputing(plan, 1), recomputes=(RecomputeDecision("w", 1024, "why", "layers.0"),))
    assert recomputing(plan, 1).diff(others).splitlines()[1:] == [
        "  layers.0: 1 value, 1.0 KiB freed, but other values"
    ]


def test_extra_keeps() -> None:
    plan = lowered(2).plan
    assert "kept for it, though backward does not read it: 0 values -> 1 value" in (
        plan.diff(replace(plan, extra_keeps=("relu",)))
    )


def test_reductions() -> None:
    plan = lowered(4).plan
    late = replace(plan, reduces=(replace(plan.reduces[0], wait_after=None), *plan.reduces[1:]))
    assert plan.diff(late) == (f"reductions\n  head: awaited after {plan.reduces[0].wait_after} -> the end of the step")
    gathered = replace(plan, reduces=(replace(plan.reduces[0], gathered_after=None), *plan.reduces[1:]))
    where = plan.reduces[0].wait_after
    assert plan.diff(gathered) == (
        f"reductions\n  head: awaited after {where} -> {where}, the sum after the end of the step"
    )
    assert "head … layers.0  x5: not reduced -> reduced" in lowered(4, num_ranks=1).plan.diff(plan)


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


def test_other_buckets() -> None:
    one, other = lowered(4).plan, lowered(5).plan
    assert "  new: layers.4" in one.diff(other).splitlines()
    assert "  gone: layers.4" in other.diff(one).splitlines()
    cast = replace(one, buckets=tuple(replace(b, compute_dtype="torch.bfloat16") for b in one.buckets))
    assert "layers.0 … head: another dtype, param group or size (5 of 5 buckets)" in one.diff(cast)


def test_only_reasons_differ() -> None:
    plan = lowered(2).plan
    renamed = replace(plan, reduces=(replace(plan.reduces[0], reason="for no reason"), *plan.reduces[1:]))
    assert plan.diff(renamed) == "the reasons that are given for decisions"


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
    lines = str(replace(plan, recomputes=(*deep, *shallow), extra_keeps=("relu",))).splitlines()
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
