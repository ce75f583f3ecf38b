"""The benchmarks' own arithmetic, and that they run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    compile_depth,
    cpu_extras,
    host_update,
    launch_cost,
    layouts,
    mesh_choice,
    nvme_throughput,
    rounding,
)
from benchmarks.checkpoints import measure as checkpoints
from benchmarks.kernels import __main__ as kernels_command
from benchmarks.kernels import groups_cpu as kernel_groups_cpu
from benchmarks.kernels import groups_cuda as cuda
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.groups import Group
from benchmarks.memory_frontier.measure import BASELINE, Contender, Result, rows, table
from tests.lib.checkout import ROOT
from zerofx.codegen.cpu.extras import EXTRAS


def result(name: str, peak: int, rounds: list[list[tuple[float, float]]], group: int = 0) -> Result:
    return Result(Contender(name, name, {}), {"peak_bytes": peak, "compile_seconds": 1.0}, group, rounds)


def test_ratios_are_of_minima_and_to_the_baseline_of_the_same_group() -> None:
    found = rows(
        [
            result(BASELINE, 4_000_000, [[(2.0, 4.0), (3.0, 5.0)]]),
            result("other", 1_000_000, [[(9.0, 6.0)], [(3.0, 8.0)]]),
            result(BASELINE, 4_000_000, [[(4.0, 8.0)]], group=1),
            result("third", 1_000_000, [[(4.0, 4.0)]], group=1),
        ]
    )
    assert [(row["ratio"], row["cpu_ratio"]) for row in found] == [(1.0, 1.0), (1.5, 1.5), (1.0, 1.0), (1.0, 0.5)]
    assert found[1]["median_seconds"] == 6.0 and found[1]["peak_mb"] == 1.0
    assert "| other" in table(found)


def test_saving_is_compared_with_plain_writes_of_the_slowest_rank() -> None:
    def rounds(*seconds: float) -> list[dict[str, Any]]:
        answers = [{"seconds": 1.0, "more_bytes": 9 << 20}, *({"seconds": s, "more_bytes": 3 << 20} for s in seconds)]
        both = [[{**answer, "seconds": answer["seconds"] / 2}, answer] for answer in answers]
        return [{"save": ranks, "load": ranks} for ranks in both]

    contenders = {
        checkpoints.PLAIN: {"facts": [{}], "rounds": rounds(2.0, 4.0, 6.0)},
        "zerofx": {"facts": [{"bucket_bytes": 5 << 20}], "rounds": rounds(3.0, 5.0, 8.0)},
    }
    _, row = checkpoints.rows([{"num_ranks": 2, "contenders": contenders}])
    assert row == ["zerofx, 2 ranks", *["5.00", "1.25", "1.50", "3"] * 2, "5"]


def test_what_an_extra_saves_is_the_median_of_the_rounds_ratios() -> None:
    rounds = [[[1.0, 1.0], [1.5, 1.0]], [[2.0, 1.0], [4.0, 1.25]], [[1.0, 1.0], [9.0, 2.0]]]
    assert cpu_extras.ratios(rounds) == (2.0, 1.25)
    pair = {"extra": "products", "shape": "27m", "rounds": rounds}
    row = cpu_extras.table({"products, 27m": pair}).splitlines()[-1]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["products", "27m", "2.000", "1.250", "20.0%", "3"]


def test_the_two_of_a_pair_differ_by_the_extras_switch() -> None:
    assert {extra.name: cpu_extras.environments(extra) for extra in EXTRAS} == {
        "attention": ({"ZEROFX_KERNELS": "attention,products"}, {"ZEROFX_KERNELS": "products"}),
        "products": ({"ZEROFX_KERNELS": "attention,products"}, {"ZEROFX_KERNELS": "attention"}),
        "channels": ({"ZEROFX_DISABLE": ""}, {"ZEROFX_DISABLE": "channels"}),
        "in_place": ({"ZEROFX_DISABLE": ""}, {"ZEROFX_DISABLE": "in_place"}),
    }


def test_what_was_refused_is_in_no_row() -> None:
    refused = Result(Contender("zerofx", "zerofx", {}), {"refused": "too little"}, 0)
    assert [row["contender"] for row in rows([result(BASELINE, 1, [[(1.0, 1.0)]]), refused])] == [BASELINE]


@pytest.mark.slow
def test_the_memory_frontier_of_a_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "benchmarks.memory_frontier", "--shape", "tiny", "--rounds", "1"]
    command += ["--steps", "1", "--peers", "dp:0.5", "greedy:0.5", "ilp:0.5", "--budgets", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    found = json.loads((tmp_path / "memory_frontier.json").read_text())
    assert {row["family"] for row in found["rows"]} >= {
        BASELINE,
        "zerofx",
        "checkpoint per block",
        "dp budget",
        "greedy budget",
        "ilp budget",
    }
    assert (tmp_path / "memory_frontier.png").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(layouts.MODELS))
def test_no_layout_by_hand_is_faster_than_the_chosen_one_on_two_ranks(name: str) -> None:
    model = replace(layouts.MODELS[name], shape=replace(layouts.MODELS[name].shape, depth=2))
    seconds = {
        layout: layouts.planned(model.shape, pins, mesh={"model": 2}, backend="eager").plan.step_seconds
        for layout, pins in layouts.layouts(model).items()
    }
    assert len(seconds) == 5 and min(seconds.values()) == seconds[layouts.CHOSEN]


def test_meshes_by_hand_are_compared_with_the_chosen_one_and_choosing_with_one_plan() -> None:
    def found(mesh: str, seconds: float, cpu_seconds: float) -> dict[str, Any]:
        return {
            "mesh": mesh, "step_seconds": 8 * seconds, "seconds_per_sample": seconds, "exposed_seconds": 0.0,
            "peak_bytes": 3 << 30, "cpu_seconds": cpu_seconds, "resident_bytes": 1 << 30,
        }  # fmt: skip

    case = mesh_choice.CASES["llama-8b"]
    plans = mesh_choice.plans_of(case)
    assert plans["TP 4 + SP + FSDP"].mesh == {"shard": 2, "model": 4} and plans["HSDP, 4 replicas"].mesh == {
        "replicate": 4,
        "shard": 2,
    }
    assert plans["Ulysses 8 + FSDP, equal batch"].times == 8 and set(plans["TP 2 + SP + FSDP"].pins) > {"*layers.??"}
    results = {
        mesh_choice.ONE: found("shard 8", 0.5, 10.0), mesh_choice.CHOSEN: found("shard 4 x model 2", 0.4, 25.0),
        "Ulysses 8 + FSDP": {"refused": "cannot be met", "cpu_seconds": 5.0, "resident_bytes": 1 << 30},
    }  # fmt: skip
    text = mesh_choice.table({"llama-8b": results})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "llama-8b" in line]
    assert rows[0][1:4] == ["10", "25", "2.50"]
    assert rows[1][1:5] == ["FSDP", "shard 8", "500.00 ms", "1.250"] and rows[2][4] == "1.000"
    assert rows[3][1:] == ["Ulysses 8 + FSDP", "", "", "", "", "", "does not fit"]


def test_the_cost_of_launches_has_a_share_of_the_step() -> None:
    between = {"num_regions": 24, "step_seconds": 0.5, "between_seconds": 0.005, "share": 0.01}
    row = {"shape": "27m", "dtype": "float32", "backend": "inductor", "device": "cuda", "between": between}
    text = launch_cost.table({**row, "launched": {"one by one": [0.4, 0.2, 0.3], "CUDA graphs": [0.1, 0.2, 0.15]}})
    assert "| 24        | 500.00    | 5.00                 | 1.00 %  |" in text
    assert (
        "| one by one         |       300 |     1   |" in text
        and "| CUDA graphs        |       150 |     0.5 |" in text
    )


def test_regions_of_a_tiny_model_are_told_from_what_is_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--shape", "tiny", "--device", "cpu", "--backend", "eager", "--steps", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["launch_cost", *arguments])
    launch_cost.main()
    found = json.loads((tmp_path / "launch_cost_cpu.json").read_text())
    assert 0 < found["between"]["share"] < 1 and found["launched"] == {}


def test_depths_are_compared_with_the_first_with_torch_compile_and_warm_with_cold() -> None:
    def run(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "cpu_seconds": 2 * seconds, "regions": 24, "distinct_regions": 9}

    found = {
        "6": {"zerofx cold": [run(8.0), run(10.0), run(90.0)], "zerofx warm": [run(1.0)]},
        "24": {"zerofx cold": [run(12.0)], "zerofx warm": [run(3.0)], "torch.compile cold": [run(48.0)]},
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in compile_depth.table(found).splitlines()]
    assert rows[2][5:] == ["1.00 (CPU 1.00)", "", "0.10 (CPU 0.10)"]
    assert rows[3][5:] == ["1.20 (CPU 1.20)", "0.25 (CPU 0.25)", "0.25 (CPU 0.25)"]


def test_drive_throughput_is_compared_by_medians() -> None:
    def round_(write: float, read: float) -> nvme_throughput.Round:
        return {"write": nvme_throughput.Taken(write, 1 / write), "read": nvme_throughput.Taken(read, 1 / read)}

    rounds = {
        "plain": [round_(4e8, 1e9), round_(2e8, 2e9), round_(9e8, 3e9)],
        "zerofx": [round_(2e8, 3e9), round_(1e8, 1e9), round_(9e8, 1e9)],
    }
    found = nvme_throughput.rows("plain", rounds)
    assert [(row["ratio"], row["best_ratio"]) for row in found] == [(0.5, 1.0), (0.5, 1.0)]
    text = nvme_throughput.table("plain", found)
    assert "| write | 400" in text and "| 2.50 " in text and "| 5.00 " in text  # CPU seconds of 1e9 bytes


def test_both_write_and_read_and_leave_nothing(tmp_path: Path) -> None:
    name, rounds = nvme_throughput.measure(tmp_path, 32 << 20, 2)
    assert set(rounds) == {name, "zerofx"}
    assert all(taken[direction].rate > 0 for one in rounds.values() for taken in one for direction in ("write", "read"))
    assert not list(tmp_path.iterdir())


def test_without_fio_a_plain_loop_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name, rounds = nvme_throughput.measure(tmp_path, 8 << 20, 1)
    assert name == "plain loop of pwritev and preadv"
    assert all(taken.rate > 0 and taken.cpu_seconds >= 0 for taken in rounds[name][0].values())


def test_the_update_is_compared_with_the_copy_round_by_round() -> None:
    rounds = host_update.measure(1 << 20, 3)
    assert [len(times) for times in rounds.values()] == [3, 3, 3]
    assert all(seconds > 0 for times in rounds.values() for seconds, _ in times)
    times = {"copy": [(2.0, 2.0)], "whole": [(4.0, 8.0), (8.0, 6.0), (2.0, 4.0)], "blocks": [(1.0, 1.0)]}
    found = host_update.rows(times, 16 << 20)
    assert found[0]["median"] == (16 << 20) / 2 and found[2]["median"] == 28 * (1 << 20)
    assert found[1]["best"] == 28 * (1 << 20) / 2 and found[1]["median"] == 28 * (1 << 20) / 4
    assert (found[1]["ns"], found[1]["computed_ns"]) == (4e9 / (1 << 20), 4e9 / (1 << 20))
    assert "| whole  |" in host_update.table(found)


def test_kernels_are_compared_with_the_first_contender_and_a_copy() -> None:
    group = Group("update", {}, num_bytes=4000)
    found = {"torch": kernels.Measured([4.0, 2.0, 3.0], 1 << 20), "kernel": kernels.Measured([1.5, 1.0, 9.0], 0)}
    first, second = kernels.rows(group, found, copy_bandwidth=2000.0)
    assert (first["ratio"], second["ratio"], second["min_ratio"]) == (1.0, 0.5, 0.5)
    assert second["of_copy"] == pytest.approx(4000 / 1.5 / 2000)
    assert "| kernel" in kernels.table([first, second]) and "133%" in kernels.table([first, second])


def test_contenders_compute_the_same() -> None:
    by_aten = cuda.update_inputs(301, torch.device("cpu"))
    written_out = [tensor.clone() for tensor in by_aten]
    hyper = (cuda.LR, cuda.BETA1, cuda.BETA2, cuda.DECAY, cuda.EPS)
    for _ in range(2):
        cuda.adamw_written_out(*written_out)
        cuda.adamw_region([*by_aten, hyper])
        by_aten[1].copy_(written_out[1])
    torch.testing.assert_close(written_out, by_aten, rtol=1e-5, atol=1e-6)
    given = cuda.loss_inputs(17, 8, 50, torch.device("cpu"))
    given[2][::5] = cuda.IGNORED
    whole = cuda.loss_whole(*given)
    for tiled in (cuda.loss_by_classes(*given, 3), cuda.loss_by_rows(*given, 3)):
        for one, other in zip(tiled, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-6, atol=1e-3)
    for seen, backward in itertools.product(("causal", "mask", "all"), (False, True)):
        group = kernel_groups_cpu.attention_group(2, 2, 9, 8, seen=seen, backward=backward)
        theirs, own = (run() for run in group.contenders.values())
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-5)


def test_the_documentation_has_what_is_rounded_off() -> None:
    page = " ".join((ROOT / "docs" / "wire.md").read_text().split())
    for line in rounding.table(rounding.made_up()).splitlines()[2:]:
        assert " ".join(line.split()) in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_not_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels"])
    with pytest.raises(SystemExit, match="expected a CUDA GPU, found none"):
        kernels_command.main()
