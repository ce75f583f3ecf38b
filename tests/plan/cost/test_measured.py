"""Measured costs: they take the place of predicted ones, region by region, and change what is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.lib.budgets import WAVE_WIDTH as WIDTH
from tests.lib.budgets import Waves
from tests.lib.graphs import Prepared, prepare, target
from tests.lib.lowered import Deep
from zerofx.choices import RecomputeOption
from zerofx.codegen.regions import Region, cut, regions_of
from zerofx.errors import PlanError
from zerofx.ir.facts import origin
from zerofx.options import check_options
from zerofx.scheduler.cost.links import MeasuredLink, predict_link
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.measured import MeasuredCosts
from zerofx.scheduler.cost.roofline import node_cost
from zerofx.scheduler.cost.simulate import Simulation, simulate
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.search.planner import make_plan
from zerofx.scheduler.search.problem import Problem

CPU = Machine.named("cpu")


def regions(prepared: Prepared) -> list[Region]:
    return regions_of(cut(prepared.step))


def simulated(prepared: Prepared, costs: MeasuredCosts | None) -> Simulation:
    measured = costs.seconds_by_node(regions(prepared), CPU) if costs is not None else None
    return simulate(prepared.step, CPU, prepared.layout.mesh, on_cpu=True, measured=measured)


def seconds_of(region: Region, simulation: Simulation) -> float:
    return sum(simulation.timings[node].seconds for node in region.own)


def test_a_measured_region_takes_what_was_measured_wherever_it_runs() -> None:
    prepared = prepare(Deep(4), num_ranks=2).run()
    ours = regions(prepared)
    key = next(region.key for region in ours if sum(other.key == region.key for other in ours) > 1)
    before, after = simulated(prepared, MeasuredCosts()), simulated(prepared, MeasuredCosts({key: 0.125}))
    for region in ours:
        expected = 0.125 if region.key == key else seconds_of(region, before)
        assert seconds_of(region, after) == pytest.approx(expected)
    assert after.live.peak_bytes == before.live.peak_bytes and after.wire_bytes == before.wire_bytes


def test_nodes_share_a_region_as_predicted() -> None:
    prepared = prepare(Deep(2), num_ranks=1).run()
    region = max(regions(prepared), key=lambda region: len(region.own))
    found = MeasuredCosts({region.key: 2.0}).seconds_by_node([region], CPU)
    predicted = {node.name: node_cost(node, CPU).seconds for node in region.own}
    assert found.keys() == predicted.keys()
    assert all(found[name] == pytest.approx(2.0 * predicted[name] / sum(predicted.values())) for name in found)


def test_without_measurements_nothing_changes() -> None:
    prepared = prepare(Deep(3), num_ranks=2).run()
    plain, empty = simulated(prepared, None), simulated(prepared, MeasuredCosts())
    assert empty.step_seconds == pytest.approx(plain.step_seconds)
    assert empty.exposed_seconds == pytest.approx(plain.exposed_seconds)


def test_what_was_not_measured_is_off_as_much_as_what_was() -> None:
    prepared = prepare(Deep(3), num_ranks=1).run()
    ours = regions(prepared)
    half = {region.key: 3 * seconds_of(region, simulated(prepared, None)) for region in ours[::2]}
    costs = MeasuredCosts.from_times(half, ours, CPU)
    assert costs.scale == pytest.approx(3.0)
    # One rank has no communication: the step is its regions.
    assert simulated(prepared, costs).step_seconds == pytest.approx(3 * simulated(prepared, None).step_seconds)


def test_costs_measured_for_one_plan_hold_for_another() -> None:
    plain = prepare(Deep(4), num_ranks=2, prefetch=0).run()
    other = prepare(Deep(4), num_ranks=2, prefetch=2).run()
    keys = [{region.key for region in regions(one)} for one in (plain, other)]
    assert keys[0] == keys[1]


def test_updates_are_regions_like_others() -> None:
    prepared = prepare(Deep(2), num_ranks=1).run()
    update = next(region for region in regions(prepared) if region.is_update)
    before, after = simulated(prepared, None), simulated(prepared, MeasuredCosts({update.key: 1.0}))
    same = sum(region.key == update.key for region in regions(prepared))
    grown = sum(timing.seconds for node, timing in after.timings.items() if origin(node).phase == "update")
    assert grown >= same and before.step_seconds < after.step_seconds


def made(
    prepared: Prepared, costs: MeasuredCosts | None, budget: int | None, prefetch: int, recompute: RecomputeOption
) -> Plan:
    options = check_options(
        stage=3, backend="eager", machine=CPU, prefetch=prefetch, memory_budget=budget, recompute=recompute
    )
    asked = target(CPU, costs=costs, num_ranks=prepared.layout.num_ranks)
    return make_plan(Problem.create(prepared, asked, options, budget))


def predicted_seconds(prepared: Prepared, plan: Plan, costs: MeasuredCosts) -> float:
    rehearsal = prepared.rehearsal(target(CPU, costs=costs, num_ranks=prepared.layout.num_ranks))
    return rehearsal.predict(plan).step_seconds


def test_corrected_costs_change_which_plan_is_the_fastest() -> None:
    """One plan computes again and hides its gathers, the other computes once and waits for them: the slower computation
    turns out to be, the more the second is worth."""
    prepared = prepare(Waves(), (torch.randn(64, WIDTH),), num_ranks=2)
    again = made(prepared, None, None, prefetch=1, recompute="full")
    once = made(prepared, None, None, prefetch=0, recompute="none")
    assert again.recomputes and not once.recomputes
    as_predicted, slower = MeasuredCosts(), MeasuredCosts(scale=100.0)
    for costs, faster, other in ((as_predicted, again, once), (slower, once, again)):
        assert predicted_seconds(prepared, faster, costs) < predicted_seconds(prepared, other, costs)


def test_links_that_were_measured_are_those_of_the_prediction() -> None:
    """Gathers that are awaited at once are exposed for as long as they take."""
    prepared = prepare(Waves(), (torch.randn(64, WIDTH),), num_ranks=2)
    plan = made(prepared, None, None, prefetch=0, recompute="none")
    said = predict_link("collective", CPU, Mesh(shard=2))
    assert said is not None
    seconds = []
    for factor in (1.0, 10.0, 1000.0):
        link = MeasuredLink(said.latency * factor, said.seconds_per_byte * factor)
        seconds.append(predicted_seconds(prepared, plan, MeasuredCosts(links={"collective": link})))
    assert seconds[0] == pytest.approx(predicted_seconds(prepared, plan, MeasuredCosts()))
    assert seconds[2] - seconds[1] > 50 * (seconds[1] - seconds[0]) > 0


def test_plans_that_are_sought_within_a_budget_go_by_measured_costs() -> None:
    prepared = prepare(Waves(), (torch.randn(64, WIDTH),), num_ranks=2)
    costs = MeasuredCosts(scale=100.0)
    budget = made(prepared, None, 10**9, prefetch=1, recompute="auto").peak_bytes["device"] - 64
    plan = made(prepared, costs, budget, prefetch=1, recompute="auto")
    assert plan.peak_bytes["device"] <= budget
    assert plan.step_seconds == predicted_seconds(prepared, plan, costs)


def test_numbers_that_cannot_be_are_refused() -> None:
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="finite and positive"):
            MeasuredCosts({"a": wrong})
        with pytest.raises(PlanError, match="as scale"):
            replace(MeasuredCosts(), scale=wrong)
