"""Plans for the sizes that papers have published, and the formulas of their efficiencies."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import (
    headlines,
)
from tests.lib.checkout import ROOT


def _planned(seconds: float, host: float, num_bytes: int = 0) -> headlines.Planned:
    return headlines.Planned(seconds, seconds / 2, 8 * seconds, {"device": 30.0, "host": host}, 2, 9.0, 8.0, num_bytes)


def test_a_headline_of_some_layers_is_extended_in_a_line() -> None:
    found = headlines.extended(_planned(10.0, 4.0, 7), _planned(14.0, 8.0, 9), (8, 12), 108)
    assert (found.step_seconds, found.exposed_seconds, found.flops) == (110.0, 55.0, 880.0)
    assert found.peak_bytes == {"device": 30.0, "host": 104.0}
    assert found.planner_bytes == 9


def test_efficiencies_are_those_of_the_formulas() -> None:
    assert headlines.bandwidth_efficiency(1024, 70e9, 70e12) == pytest.approx(1024 / 2024, abs=1e-9)
    (row,) = (headline for headline in headlines.HEADLINES if headline.name == "1T")
    found = headlines.efficiencies(row, headlines.dgx2(), on_drives=True)
    intensity, bandwidth = 7 * 1024 / 4, 16 * 1.6e9
    assert found["optimizer states"] == headlines.bandwidth_efficiency(intensity, bandwidth, headlines.ACHIEVABLE)
    assert "50.6 %" in headlines.bandwidths()


def test_the_machine_of_the_headlines_counts_float16_at_bfloat16() -> None:
    machine = headlines.dgx2()
    assert machine.matmul_flops(torch.bfloat16) == machine.matmul_flops(torch.float16)
    assert machine.matmul_flops(torch.float16) == pytest.approx(headlines.ACHIEVABLE)
    alone = headlines.part_of(machine, 0.5)
    assert alone.nvme is not None and machine.nvme is not None
    assert 2 * alone.host.memory_bytes == machine.host.memory_bytes and 2 * alone.nvme.num_bytes == 28 * 10**12


def test_headlines_reach_what_was_published() -> None:
    """What is in the results, as the benchmark wrote it."""
    results = json.loads((ROOT / "benchmarks" / "results" / "headlines.json").read_text())
    assert list(results) == [headline.name for headline in headlines.HEADLINES]
    capacity = headlines.dgx2()
    assert capacity.nvme is not None
    for headline in headlines.HEADLINES:
        planned = headlines.Planned(**results[headline.name])
        assert headline.num_parameters >= headline.billions * 1e9
        assert planned.flops / planned.step_seconds >= (headline.tflops or 0) * 1e12
        ranks = min(headline.gpus, headlines.GPUS)
        assert planned.peak_bytes["device"] <= capacity.device.memory_bytes
        assert planned.peak_bytes.get("host", 0) <= capacity.host.memory_bytes / ranks
        assert planned.peak_bytes.get("nvme", 0) <= capacity.nvme.num_bytes / ranks
        assert planned.planner_seconds <= 120 and planned.planner_bytes <= 4 * 2**30
    assert (
        headlines.table({name: headlines.Planned(**found) for name, found in results.items()})
        in (ROOT / "benchmarks" / "results" / "headlines.md").read_text()
    )


def test_a_headline_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headlines, "VOCABULARY", 64)
    small = headlines.Headline("small", "none", 0.001, None, 2, 64, 2, 1, 2, {"mlp.up": 2}, 2)
    planned = headlines.plan(small, 2)
    assert planned.step_seconds > planned.exposed_seconds >= 0 and planned.flops > 0
    assert planned.peak_bytes["device"] > 0
