"""A step whose updates run on into the next one is predicted as one among steps like it: its seconds, and its bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lib.plans import placed
from zerofx.ir import ops
from zerofx.ir.aliasing import storage_bytes
from zerofx.ir.edit import consumers
from zerofx.ir.facts import DEVICE, Role, tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.streams import HOST, LINKS, ends_of, runs_on_host
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.cost.machine import HostUpdate, Machine
from zerofx.scheduler.cost.simulate import _run, _UnderWay, simulate
from zerofx.scheduler.plan.mesh import Mesh

RATES = [1e4, 1e5, 1e6, 1e9]  # bytes a second that the host updates


def machine(rate: float) -> Machine:
    row = Machine.named("h100-sxm").for_ranks(1)
    return replace(row, host=replace(row.host, update=HostUpdate(16, rate, rate)))


def running_on() -> StepGraph:
    prepared = placed("host", "host", num_ranks=1, precision="bf16")
    prepared.run_pipeline()
    assert any(node.target is ops.run_on for node in prepared.step.calls())
    return prepared.step


@pytest.mark.parametrize("rate", RATES)
def test_seconds_are_those_of_a_step_among_steps_like_it(rate: float) -> None:
    step = running_on()
    found = simulate(step, machine(rate), Mesh(), on_cpu=False)
    before, took = _UnderWay(), []
    for _ in range(12):
        clocks = _run(step, machine(rate), Mesh(), None, before)
        before = clocks.work_left()
        took.append(clocks.compute)
    assert took[0] < found.step_seconds, "nothing is under way as the first step begins"
    assert took[2:] == pytest.approx([found.step_seconds] * 10)
    # No lane has more to do in a step than the step takes.
    busy = found.busy_by_stream
    assert all(busy.get(stream, 0.0) <= found.step_seconds * (1 + 1e-9) for stream in (HOST, *LINKS))


@pytest.mark.parametrize("rate", RATES)
def test_background_work_ends_after_the_step_and_before_the_next_one_needs_it(rate: float) -> None:
    step = running_on()
    found = simulate(step, machine(rate), Mesh(), on_cpu=False)
    end = found.step_seconds
    settled = {node.args[0]: node for node in step.calls() if node.target is ops.settle}
    for node in (node for node in step.calls() if node.target is ops.run_on):
        needed = end + found.timings[settled[node.args[0]]].start_seconds
        for copy in node.args[1]:  # type: ignore[union-attr]  # a list of nodes
            timing = found.timings[copy]  # type: ignore[index]
            assert timing.start_seconds + timing.seconds <= needed + 1e-9
    updates = [found.timings[node] for node in step.calls() if runs_on_host(node)]
    assert max(timing.start_seconds + timing.seconds for timing in updates) > end


def test_bytes_that_run_on_are_there_until_they_are_settled() -> None:
    step = running_on()
    host = liveness(step, on_cpu=False).slower["host"]
    left = [node for node in step.calls() if node.target is ops.run_on]
    values = [value for node in left for value in node.all_input_nodes if value.target is ops.empty_stored]
    held = sum(storage_bytes(tensor(value)) for value in values)
    calls = list(step.calls())
    assert held and host.after[calls[0]] == host.after[calls[-1]] == host.persistent_bytes + held
    last = [node for node in calls if node.target is ops.settle][-1]
    assert host.after[last] == host.persistent_bytes


def going_back(tier: str, update: str) -> StepGraph:
    """A step with the states of one bucket in ``tier``, which go back until the middle of the next forward."""
    prepared = placed(tier, update, num_ranks=1, precision="bf16")
    read = sorted(consumers(node)[0] for node in prepared.step.placeholders(Role.PARAMETER))
    states = (replace(prepared.plan.states[-1], back_by=read[len(read) // 2].name),)
    prepared.plan = prepared.plan.replace_absences(states=states)
    prepared.run_pipeline()
    return prepared.step


@pytest.mark.parametrize(("tier", "update"), [("host", "device"), ("nvme", "device"), ("nvme", "host")])
def test_bytes_that_go_back_are_there_until_the_plan_has_them_awaited(tier: str, update: str) -> None:
    step = going_back(tier, update)
    live = liveness(step, on_cpu=False)
    (left,) = (node for node in step.calls() if node.target is ops.run_on)
    (awaited,) = (node for node in step.calls() if node.target is ops.settle and node.kwargs.get("back"))
    calls = list(step.calls())
    assert calls[0] is not awaited and left.kwargs["back"]
    copies = [node for node in left.all_input_nodes if node.target in ops.TRANSFERS]
    size = sum(storage_bytes(tensor(copy)) for copy in copies)
    held = {DEVICE: size if update == "device" else 0}
    # What is written to nvme is on the host meanwhile: a block of each copy's own, or where the host has updated it.
    held["host"] = size if tier == "nvme" else 0
    given = sum(storage_bytes(tensor(node)) for node in step.output.all_input_nodes)
    host = live.slower["host"]
    assert live.after[calls[-1]] == live.persistent_bytes + held[DEVICE] + given
    assert live.after[awaited.prev] - live.after[awaited] == held[DEVICE]
    assert host.after[calls[0]] == host.after[awaited.prev] == host.after[calls[-1]]
    assert host.after[calls[0]] == host.persistent_bytes + held["host"]
    assert host.after[awaited] == host.persistent_bytes
    assert all(ends_of(node)[1] == tier for node in copies)


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e9])
def test_what_goes_back_takes_its_link_in_the_next_step(rate: float) -> None:
    step, row = going_back("host", "device"), machine(1e9)
    slow = replace(row, host=replace(row.host, to_host=replace(row.host.to_host, bandwidth=rate)))
    found = simulate(step, slow, Mesh(), on_cpu=False)
    (left,) = (node for node in step.calls() if node.target is ops.run_on)
    (awaited,) = (node for node in step.calls() if node.target is ops.settle and node.kwargs.get("back"))
    timings = [found.timings[node] for node in left.all_input_nodes if node.target in ops.TRANSFERS]
    ends = [timing.start_seconds + timing.seconds for timing in timings]
    waits = found.timings[awaited].start_seconds
    assert found.timings[left].exposed_seconds == 0.0 and max(ends) > found.step_seconds
    assert max(ends) <= found.step_seconds + waits + 1e-12
    before = max(0.0, max(ends) - found.step_seconds - (waits - found.timings[awaited].exposed_seconds))
    assert found.timings[awaited].exposed_seconds == pytest.approx(before)
