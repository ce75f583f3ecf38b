"""The simulated step: streams as resources, and sums as closed formulas have them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.lib.graphs import TwoBlocks, calls, prepare
from tests.lib.lowered import lowered
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import STREAMS, stream_of
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.cost.simulate import Leg, Simulation, predict, simulate
from zerofx.scheduler.cost.transfers import collective_seconds, copy_seconds
from zerofx.scheduler.plan.mesh import Mesh

CASES = [(stage, ranks, prefetch) for stage in range(4) for ranks in (2, 4) for prefetch in (0, 1, 2)]
CPU = Machine.named("cpu")


def simulated(
    stage: int = 3, num_ranks: int = 2, prefetch: int = 1, machine: Machine = CPU
) -> tuple[StepGraph, Simulation]:
    step = prepare(TwoBlocks(), stage=stage, num_ranks=num_ranks, prefetch=prefetch).run().step
    return step, simulate(step, machine, Mesh(shard=num_ranks), on_cpu=True)


def with_latency(seconds: float) -> Machine:
    link = Link(CPU.intra_node.bandwidth, seconds)
    return replace(CPU, intra_node=link, inter_node=link)


@pytest.mark.parametrize(("stage", "num_ranks", "prefetch"), CASES)
def test_a_wait_is_exposed_for_what_is_left_of_its_collective(stage: int, num_ranks: int, prefetch: int) -> None:
    step, simulation = simulated(stage, num_ranks, prefetch)
    compute = 0.0
    for node in step.calls():
        timing = simulation.timings[node]
        if node.target is ops.wait:
            started = node.args[0]
            assert isinstance(started, torch.fx.Node)
            collective = simulation.timings[started]
            left = collective.start_seconds + collective.seconds - compute
            assert timing.exposed_seconds == pytest.approx(max(0.0, left), abs=1e-12)
        elif node.target in ops.COLLECTIVES:
            assert timing.start_seconds >= compute - 1e-12
            continue
        compute = timing.start_seconds + timing.seconds


def test_a_collective_takes_what_the_machine_says() -> None:
    step, simulation = simulated(stage=3, num_ranks=4)
    for gather in calls(step, ops.all_gather):
        num_bytes = storage_bytes(gather.meta["val"])
        assert simulation.timings[gather].seconds == collective_seconds("all_gather", num_bytes, 4, CPU)


def test_prefetch_hides_communication() -> None:
    exposed = [simulated(prefetch=ahead)[1].exposed_seconds for ahead in (0, 1)]
    assert exposed[1] < exposed[0]


def test_a_slower_link_exposes_more_and_never_shortens_the_step() -> None:
    found = [simulated(machine=with_latency(seconds))[1] for seconds in (1e-6, 1e-4, 1e-2)]
    assert [s.exposed_seconds for s in found] == sorted(s.exposed_seconds for s in found)
    assert [s.step_seconds for s in found] == sorted(s.step_seconds for s in found)
    assert found[0].live.peak_bytes == found[2].live.peak_bytes


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_sends_and_waits_for_nothing(stage: int) -> None:
    _, simulation = simulated(stage, num_ranks=1)
    assert simulation.wire_bytes == 0 and simulation.exposed_seconds == 0
    assert simulation.step_seconds == pytest.approx(sum(t.seconds for t in simulation.timings.values()))


def test_the_prediction_is_the_simulations_sums() -> None:
    prepared = prepare(TwoBlocks(), num_ranks=2).run()
    simulation = simulate(prepared.step, CPU, Mesh(shard=2), on_cpu=True)
    found = predict(prepared.step, prepared.plan, prepared.layout, simulation)
    assert found.peak_bytes == {"device": simulation.live.peak_bytes}
    assert sum(found.peak_live.values()) == simulation.live.peak_bytes
    assert simulation.live.peak_node is not None and found.peak_node == simulation.live.peak_node.name
    assert (found.step_seconds, found.exposed_seconds) == (simulation.step_seconds, simulation.exposed_seconds)
    assert (found.wire_bytes, found.flops) == (simulation.wire_bytes, simulation.flops)


def test_equal_inputs_give_an_equal_simulation() -> None:
    first, second = (list(simulated()[1].timings.values()) for _ in range(2))
    assert first == second


def offloaded(*tiers: str) -> tuple[StepGraph, Simulation]:
    step = lowered(6, tiers=tiers)
    return step.graph, step.simulation


@pytest.mark.parametrize("tiers", [(), ("host",), ("nvme",), ("host", "nvme")])
def test_every_stream_does_one_thing_at_a_time(tiers: tuple[str, ...]) -> None:
    step, simulation = offloaded(*tiers)
    free = dict.fromkeys(STREAMS, 0.0)
    for node in step.calls():
        timing = simulation.timings[node]
        legs = timing.legs or (Leg(stream_of(node), timing.start_seconds, timing.seconds, 0),)
        for leg in legs:
            assert leg.start_seconds >= free[leg.stream] - 1e-12
            free[leg.stream] = leg.start_seconds + leg.seconds
        for first, second in itertools.pairwise(legs):
            assert second.start_seconds >= first.start_seconds + first.seconds - 1e-12
    assert simulation.step_seconds == pytest.approx(max(free.values()))
    assert simulation.busy_by_stream == pytest.approx(
        {stream: seconds for stream in free if (seconds := _busy(step, simulation, stream))}
    )


def _busy(step: StepGraph, simulation: Simulation, stream: str) -> float:
    timings = [simulation.timings[node] for node in step.calls() if stream_of(node) == stream]
    legs = [leg for timing in simulation.timings.values() for leg in timing.legs if leg.stream == stream]
    return sum(leg.seconds for leg in legs) + sum(timing.seconds for timing in timings if not timing.legs)


def test_a_copy_takes_what_the_machine_says() -> None:
    step, simulation = offloaded("nvme")
    for node in calls(step, ops.offload):
        size = storage_bytes(node.meta["val"])
        legs = [leg.seconds for leg in simulation.timings[node].legs]
        assert sum(legs) == pytest.approx(copy_seconds(size, "device", "nvme", CPU))
        assert legs == [copy_seconds(size, "device", "host", CPU), copy_seconds(size, "host", "nvme", CPU)]


def test_link_bytes_are_those_of_the_decisions() -> None:
    plan = lowered(6, tiers=["host", "nvme"]).plan
    every = sum(decision.num_bytes for decision in plan.offloads)
    nvme = sum(decision.num_bytes for decision in plan.offloads if decision.tier == "nvme")
    assert plan.link_bytes == {"to_host": every, "to_device": every, "nvme_read": nvme, "nvme_write": nvme}
    assert plan.wire_bytes == lowered(6).plan.wire_bytes
    assert lowered(6).plan.link_bytes == {}


def test_bookkeeping_takes_no_time() -> None:
    step, simulation = simulated(stage=3)
    free = [node for node in step.calls() if node.target in (ops.release, ops.empty_gradients, ops.hyperparameters)]
    assert {node.target for node in free} == {ops.release, ops.empty_gradients, ops.hyperparameters}
    assert all(simulation.timings[node].seconds == simulation.timings[node].flops == 0 for node in free)
