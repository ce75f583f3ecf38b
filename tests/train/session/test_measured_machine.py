"""Steps are planned for the machine as it was measured; one whose times are far off says how to measure it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zerofx
from tests.lib.runs.tuning import noisy, rows, tune
from tests.lib.users import adamw
from zerofx import Machine
from zerofx.scheduler.cost import probe
from zerofx.scheduler.cost.probe import read_kept_machine

ROW = Machine.named("cpu")


def step_for(machine: Machine | None) -> zerofx.Step:
    model = noisy()
    step = zerofx.compile(model, adamw(model), backend="eager", machine=machine)
    step.measure(*rows())
    return step


def with_latency(machine: Machine, seconds: float) -> Machine:
    """The machine with a device that takes so long for an operator without work."""
    return replace(machine, device=replace(machine.device, launch_latency=seconds))


@pytest.mark.parametrize("seconds", [1.0, 1e-12])
def test_a_time_that_is_far_off_offers_a_measurement(seconds: float) -> None:
    text = str(step_for(with_latency(ROW, seconds)))
    assert "times what is predicted for the machine 'cpu': zerofx.Machine.measure()" in text
    assert "Machine.measure" not in str(step_for(with_latency(replace(ROW, name="cpu-measured"), seconds)))


def test_a_machine_is_measured_once_to_tune_and_planned_for_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    assert step_for(None).plan.machine == "cpu"
    measured: list[int] = []

    def measure(num_ranks: int) -> Machine:
        measured.append(num_ranks)
        return replace(ROW, name="cpu-measured")

    monkeypatch.setattr(probe, "_measure_cpu", measure)
    for _ in range(2):
        result = tune(model := noisy(), adamw(model), machine=None, num_candidates=1)
        assert result.plan.machine == "cpu-measured"
    assert measured == [1] and read_kept_machine(torch.device("cpu"), 1) is not None
    assert step_for(None).plan.machine == "cpu-measured"
    plan = step_for(ROW).plan
    assert plan.machine == "cpu"
    # What a plan was made for is this machine, with other numbers.
    zerofx.compile(model := noisy(), adamw(model), backend="eager", plan=plan)(*rows())
