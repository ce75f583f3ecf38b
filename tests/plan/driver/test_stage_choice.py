"""Meshes with stages next to those without: what a few layers say of them, and what is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tests.plan.driver.test_mesh_choice import Tower, compared, estimated, planned
from zerofx import Machine
from zerofx.driver.meshes.choice import candidates
from zerofx.scheduler.cost.machine import Link
from zerofx.scheduler.cost.stages import StageSeconds, least_pipeline_seconds, simulate_stages
from zerofx.scheduler.plan.mesh import Mesh

pytestmark = pytest.mark.captures

SHALLOW = 4  # layers that are not repeated often enough to be left out
# Two ranks a node, between which a megabyte takes a millisecond.
SLOW = replace(Machine.named("h100-sxm"), ranks_per_node=2, inter_node=Link(bandwidth=1e9, latency=1e-5))


@pytest.mark.days(3)
@pytest.mark.parametrize("order", ["micro-batch", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_few_layers_say_what_stages_take(order: str) -> None:
    """Their seconds, which are at least their bound, and the largest peak."""

    def model() -> nn.Module:
        return Tower(12)

    estimates = estimated(model, 8, accumulate=8, order=order)
    for mesh in (Mesh(shard=4, pipe=2), Mesh(2, 1, 1, 4)):
        least, estimate = estimates.estimate(mesh, 1e-12), estimates.estimate(mesh)
        whole = planned(mesh, model, accumulate=8, order=order)
        assert estimate.step_seconds == pytest.approx(whole.plan.step_seconds, rel=0.1)
        assert estimate.peak_bytes == pytest.approx(whole.plan.peak_bytes["device"], rel=0.15)
        assert least.is_least and least.step_seconds <= min(estimate.step_seconds, whole.plan.step_seconds)


@pytest.mark.parametrize("order", ["micro-batch", "auto"])
def test_middle_stages_say_what_all_take_at_least(order: str) -> None:
    """Where stages wait for messages, that is more than they compute: the first and the last are not simulated."""
    estimates, mesh = estimated(lambda: Tower(12), 8, accumulate=8, order=order, machine=SLOW), Mesh(shard=2, pipe=4)
    estimate, computing = estimates.estimate(mesh), estimates.estimate(mesh, 1e-12)
    least = estimates.estimate(mesh, 0.7 * estimate.seconds_per_sample)
    assert least.is_least and not estimate.is_least
    assert computing.step_seconds < least.step_seconds < estimate.step_seconds


@pytest.mark.days(3)
@pytest.mark.parametrize("part", [0.7, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_few_layers_say_what_stages_take_within_a_budget(part: float) -> None:
    """Seconds are taken for no less than a plan needs, and for up to a third more: each layer saves its share."""

    def model() -> nn.Module:
        return Tower(12)

    mesh = Mesh(pipe=2)
    budget = int(part * planned(mesh, model, accumulate=8).plan.peak_bytes["device"])
    estimate = estimated(model, 2, accumulate=8, memory_budget=budget).estimate(mesh)
    whole = planned(mesh, model, accumulate=8, memory_budget=budget).plan
    assert estimate.fits and whole.peak_bytes["device"] <= budget
    assert 0.99 * whole.step_seconds <= estimate.step_seconds <= 1.33 * whole.step_seconds


@pytest.mark.days(3)
def test_a_few_layers_say_which_order_waits_less_for_messages() -> None:
    """Turns wait for a message each way; where it takes long, all forward first is faster."""

    def model() -> nn.Module:
        return Tower(6)

    slow = replace(Machine.named("h100-sxm"), ranks_per_node=1, inter_node=Link(bandwidth=4e8, latency=1e-5))
    mesh = Mesh(pipe=2)
    estimates = estimated(model, 2, accumulate=8, machine=slow)
    whole = planned(mesh, model, accumulate=8, machine=slow).plan
    turns = planned(mesh, model, accumulate=8, machine=slow, order="micro-batch").plan
    assert whole.by_layer and whole.step_seconds < 0.9 * turns.step_seconds
    assert estimates.estimate(mesh).step_seconds == pytest.approx(whole.step_seconds, rel=0.1)


@pytest.mark.days(3)
@pytest.mark.parametrize("depth", [pytest.param(12, marks=pytest.mark.slow), SHALLOW])
def test_stages_are_chosen_where_links_are_slow(depth: int) -> None:
    best = planned("auto", lambda: Tower(depth), world_size=4, accumulate=8, machine=SLOW)
    outcomes = compared(best)
    assert best.plan.mesh.pipe > 1 and outcomes[best.plan.mesh].is_planned and len(best.stages) == best.plan.mesh.pipe
    alone = min((each for each in outcomes.values() if each.mesh.pipe == 1 and each.fits), key=lambda o: o.step_seconds)
    without = planned(alone.mesh, lambda: Tower(depth), accumulate=8, machine=SLOW).plan
    assert outcomes[best.plan.mesh].seconds_per_sample < without.step_seconds / (32 * without.mesh.num_batches)
    assert set(outcomes) == set(candidates(4, 2, 3, most_stages=8))


@pytest.mark.days(3)
def test_stages_that_turn_out_slower_than_thought_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate of stages is no reason to take them where their plan is slower than the best without."""
    from zerofx.driver.meshes.short_stages import ShortStages, StepInStages

    simulate: Callable[..., StepInStages] = ShortStages.simulate

    def hope(stages: ShortStages, limit: int | None, fastest: float) -> StepInStages:
        simulated = simulate(stages, limit, fastest)
        return replace(simulated, pipeline=replace(simulated.pipeline, step=simulated.step_seconds / 3))

    monkeypatch.setattr(ShortStages, "simulate", hope)
    best = planned("auto", lambda: Tower(SHALLOW), world_size=2, accumulate=2)
    outcomes = compared(best)
    assert best.plan.mesh.pipe == 1 and outcomes[best.plan.mesh].is_planned and outcomes[Mesh(pipe=2)].is_planned
    assert outcomes[best.plan.mesh].seconds_per_sample < outcomes[Mesh(pipe=2)].seconds_per_sample


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accumulate": 1, "saved": "int8"}, ""),
        ({"accumulate": 2, "saved": "int8"}, "saved='int8': stages hand activations on"),
        ({"accumulate": 2, "tile": {"head.weight": 2}}, "tile={'head.weight': 2}: a few layers"),
        ({"accumulate": "auto"}, "accumulate='auto': they are compared for a number"),
    ],
)
def test_a_table_says_why_no_mesh_has_stages(options: dict[str, Any], why: str) -> None:
    best = planned("auto", lambda: Tower(1), 4, world_size=2, **options)
    assert all(mesh.pipe == 1 for mesh in compared(best))
    assert ("no mesh with an axis pipe" in str(best)) == bool(why) and why in str(best)


def test_meshes_with_stages_have_slices_replicas_or_slices_on_nodes() -> None:
    meshes = candidates(16, 4, 3, most_stages=2)
    assert meshes[: len(candidates(16, 4, 3))] == candidates(16, 4, 3)
    assert [mesh for mesh in meshes if mesh.pipe > 1 and mesh.model == 1] == [
        Mesh(1, 8, 1, 2), Mesh(2, 4, 1, 2), Mesh(8, 1, 1, 2)
    ]  # fmt: skip
    assert max(mesh.pipe for mesh in candidates(64, 8, 3, most_stages=16)) == 16


@pytest.mark.parametrize("seed", range(8))
def test_no_step_in_stages_takes_less_than_its_bound(seed: int) -> None:
    draw = random.Random(seed)
    num_stages, num = draw.randint(2, 6), draw.randint(1, 9)
    forward = [draw.uniform(0.5, 2.0) for _ in range(num_stages)]
    stages = [StageSeconds(each, 2 * each, weights=each) for each in forward]
    total = 3 * sum(forward)
    for by_turns in (False, True):
        step = simulate_stages(stages, num, by_turns=by_turns).step
        assert step >= least_pipeline_seconds(total, 1.0, num_stages, num) - 1e-9
    lags = [None, *(min(number, num - 1) for number in range(1, num_stages))]
    apart = simulate_stages(stages, num, by_turns=True, lags=lags).step
    assert apart >= least_pipeline_seconds(total, 1 / 3, num_stages, num) - 1e-9
