"""The benchmarks' own arithmetic, and that they run."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import (
    compile_depth,
    cpu_extras,
    headlines,
    host_update,
    launch_cost,
    layouts,
    nvme_throughput,
    one_gpu,
    rounding,
)
from benchmarks.checkpoints import measure as checkpoints
from benchmarks.kernels import __main__ as kernels_command
from benchmarks.kernels import groups_cpu as kernel_groups_cpu
from benchmarks.kernels import groups_cuda as cuda
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.groups import Group
from benchmarks.largest_trainable import search as largest_trainable
from benchmarks.lib.wire_count import WireCount
from benchmarks.memory_frontier.measure import BASELINE, Contender, Result, rows, table
from benchmarks.peers import groups
from benchmarks.peers import measure as peers
from benchmarks.peers import report as peers_report
from tests.lib.checkout import ROOT
from zerofx.codegen.cpu.extras import EXTRAS
from zerofx.ir.op_kernels import norms


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


def measured(name: str, seconds: list[float], peak: int = 100, chunk: int = 0, **facts: object) -> dict[str, Any]:
    shape = {"sequences": 2, "tokens": 10}
    known = {
        "shape": shape,
        "flops": 30,
        "peak_bytes": peak,
        "resident_bytes": 1,
        "wire_bytes": 2,
        "ready_seconds": 3.0,
    }
    rounds = [[(one, 2 * one) for one in seconds]]
    return {"name": name, "chunk": chunk, "rounds": rounds, "request": {}, "facts": {**known, **facts}}


def test_peers_are_compared_through_the_baseline_that_ran_beside_each() -> None:
    group = {
        "num_ranks": 2,
        "contenders": [
            measured("matmul", [1.0], flops=60),
            measured("FSDP2 + compile", [2.0, 4.0, 3.0], peak=200),
            measured("zerofx stage 3", [1.5], peak=150),
            measured("zerofx stage 3, 70 %", [1.6], peak=100),
            measured("matmul", [2.0], chunk=1, flops=60),
            measured("FSDP2 + compile", [6.0], peak=200, chunk=1),
            measured("FSDP2", [9.0], chunk=1),
            {**measured("DeepSpeed ZeRO-3", []), "rounds": [], "facts": {"failed": "no such thing"}},
        ],
    }
    found = {row.name: row for row in peers_report.rows(group)}
    assert list(found) == ["FSDP2 + compile", "zerofx stage 3", "zerofx stage 3, 70 %", "FSDP2"]
    ours = found["zerofx stage 3"]
    assert (ours.ratio, ours.min_ratio, found["FSDP2"].ratio) == (0.5, 0.75, 1.5)
    assert ours.tokens_per_second == 2 * 2 * 10 / 1.5
    assert ours.peak_share == 30 / 1.5 / 60 and found["FSDP2"].peak_share == 30 / 9 / 30
    verdicts = {(one.target.peer, one.target.measure): one for one in peers_report.verdicts(list(found.values()))}
    assert verdicts["FSDP2 + compile", "peak"].ratio == 0.5 and verdicts["FSDP2 + compile", "peak"].met
    assert verdicts["FSDP2", "time"].ratio == 0.5 / 1.5 and verdicts["FSDP2", "time"].met
    text = peers_report.markdown({"runs": {"27m": {"machine": _MACHINE, "groups": {"sharded": group}}}})
    assert "- DeepSpeed ZeRO-3: no such thing" in text and "| zerofx stage 3 / FSDP2 " in text


def test_ranks_that_share_a_batch_have_its_tokens_once() -> None:
    contenders = [measured(name, [2.0], ranks_per_batch=2) for name in ("DTensor + compile", "zerofx, shared")]
    found = peers_report.rows({"num_ranks": 2, "contenders": contenders})
    assert [row.tokens_per_second for row in found] == [2 * 10 / 2.0] * 2


_MACHINE = {"name": "a machine", "cores": 2, "torch": "2"}


def test_the_baseline_is_among_each_few_that_fit() -> None:
    few = [groups.Contender(name, {}) for name in "abcd"]
    assert [[one.name for one in part] for part in peers.chunks(few, 3)] == [["a", "b", "c"], ["a", "d"]]
    assert [[one.name for one in part] for part in peers.chunks(few[:1], 3)] == [["a"]]


def test_offloads_are_held_to_the_better_peer_and_peaks_to_their_predictions() -> None:
    whole = [
        measured("torch.compile", [2.0]),
        measured("zerofx", [1.8], peak=101, predicted_peak_bytes=100),
        measured("zerofx, CUDA graphs", [1.5], peak=50, predicted_peak_bytes=100),
    ]
    capped = [
        measured("FSDP2 + CPU offload", [6.0]),
        measured("zerofx, capped", [2.0], peak=103, predicted_peak_bytes=100),
        measured("FSDP2 + CPU offload", [3.0], chunk=1),
        measured("DeepSpeed ZeRO-Offload", [1.5], chunk=1),
        {**measured("DeepSpeed ZeRO-3 offload + checkpoint", []), "rounds": [], "facts": {"failed": "out of memory"}},
    ]
    data: dict[str, Any] = {
        "machine": _MACHINE, "shape": "tiny", "dtype": "float32", "device": "cuda",
        "groups": {
            "whole": {"num_ranks": 1, "contenders": whole},
            "capped": {"num_ranks": 1, "cap_bytes": 2e9, "contenders": capped},
        },
    }  # fmt: skip
    listed = {name: peers_report.rows(group) for name, group in data["groups"].items()}
    found = {one.what: one for one in one_gpu.verdicts(listed, on_cpu=False)}
    assert found["time: zerofx / torch.compile"].measured == 0.9
    # A third of the baseline beside it, where the peer took half of the baseline beside itself.
    assert found["time: zerofx, capped / DeepSpeed ZeRO-Offload"].measured == pytest.approx(2 / 3)
    peaks = {what: one.met for what, one in found.items() if what.startswith("peak")}
    assert peaks == {
        "peak: zerofx, measured / predicted": True,
        "peak: zerofx, capped, measured / predicted": False,
    }
    assert len(one_gpu.verdicts(listed, on_cpu=True)) == len(found) - 1
    text = one_gpu.markdown(data)
    assert "capped, within 2 GB" in text and "- DeepSpeed ZeRO-3 offload + checkpoint: out of memory" in text


def test_a_cap_is_told_to_all_and_leaves_zerofx_some_room() -> None:
    group = one_gpu.capped(1000, mixed=True)
    assert {one.request["cap"] for one in group.contenders} == {1000}
    ours = [one.request for one in group.contenders if one.request["family"] == "zerofx"]
    assert [one["budget"] for one in ours] == [950] and all(one.request["mixed"] for one in group.contenders)
    assert [one.name for one in groups.wanted(group, ["zerofx"])] == [
        "FSDP2 + CPU offload + checkpoint",
        "zerofx, capped",
    ]
    assert not any("graphs" in one.name for one in one_gpu.whole("cpu").contenders)
    assert sum("graphs" in one.name for one in one_gpu.whole("cuda").contenders) == 2


@pytest.mark.slow
def test_one_device_with_a_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.one_gpu", "--device", "cpu", "--shape", "tiny", "--rounds", "1"]
    command += ["--steps", "1", "--only", "zerofx", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    data = json.loads((tmp_path / "one_gpu.json").read_text())
    listed = {name: {row.name for row in peers_report.rows(group)} for name, group in data["groups"].items()}
    assert listed == {"whole": {"torch.compile", "zerofx"}, "capped": {"FSDP2 + CPU offload", "zerofx, capped"}}
    verdicts = one_gpu.verdicts({name: peers_report.rows(group) for name, group in data["groups"].items()}, on_cpu=True)
    assert len(verdicts) == 3 and all(one.met for one in verdicts if one.what.startswith("peak"))
    assert "| zerofx, capped" in (tmp_path / "one_gpu.md").read_text()


def test_collectives_are_counted_as_rings_send_them() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shard, full = torch.ones(100), torch.ones(400)
        group = dist.group.WORLD
        assert group is not None
        sent = []
        for collective in (
            lambda: group._allgather_base(full, shard),
            lambda: group._reduce_scatter_base(shard, full, dist.ReduceScatterOptions()),
            lambda: group.allreduce([full]),
            lambda: group.broadcast(full, 0),
            lambda: group.alltoall_base(torch.empty(400), full, [], []),
            lambda: group.allgather_into_tensor_coalesced([full, full], [shard, shard]),
            lambda: shard.add(1),
        ):
            with WireCount(4) as wire:
                collective()
            sent.append(wire.num_bytes)
        assert sent == [1200, 1200, 2400, 1200, 1200, 2400, 0]
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(layouts.MODELS))
def test_no_layout_by_hand_is_faster_than_the_chosen_one_on_two_ranks(name: str) -> None:
    model = replace(layouts.MODELS[name], shape=replace(layouts.MODELS[name].shape, depth=2))
    seconds = {
        layout: layouts.planned(model.shape, pins, 2, backend="eager").step_seconds
        for layout, pins in layouts.layouts(model).items()
    }
    assert len(seconds) == 5 and min(seconds.values()) == seconds[layouts.CHOSEN]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
def test_what_is_shared_by_hand_trains_what_is_shared_by_plan(shape: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--shape", shape, "--device", "cpu", "--groups", "shared"]
    command += ["--rounds", "1", "--steps", "1", "--only", "zerofx, shared", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    data = json.loads((tmp_path / "peers_cpu.json").read_text())
    contenders = data["runs"][f"{shape}, float32"]["groups"]["shared"]["contenders"]
    losses = {one["name"]: one["facts"]["loss"] for one in contenders if "loss" in one["facts"] and one["rounds"]}
    assert losses["zerofx, shared"] == pytest.approx(losses["DTensor + compile"], rel=1e-5)


@pytest.mark.slow
def test_peers_of_a_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--device", "cpu", "--groups", "sharded"]
    command += ["--only", "zerofx stage 3", "checkpoint", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT)
    data = json.loads((tmp_path / "peers_cpu.json").read_text())
    rows = {row.name: row for row in peers_report.rows(data["runs"]["tiny, float32"]["groups"]["sharded"])}
    assert set(rows) >= {"FSDP2 + compile", "FSDP2 + checkpoint", "zerofx stage 3"}
    ours = rows["zerofx stage 3"]
    # Bytes are counted from outside the step: they must be what the plan predicts.
    assert ours.predicted_peak_bytes is not None and ours.peak_bytes <= 1.02 * ours.predicted_peak_bytes
    assert ours.wire_bytes is not None and 0 < ours.wire_bytes < 1.2 * (rows["FSDP2 + compile"].wire_bytes or 0)


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
    assert [len(taken) for taken in rounds.values()] == [3, 3]
    found = host_update.row({"copy": [2e9, 1e9, 4e9], "update": [1e9, 6e9, 3e9]})
    assert (found["ratio"], found["best_ratio"]) == (1.5, 1.5)
    assert "| 2.00" in host_update.table(found)


def trial(size: int, trained: bool) -> largest_trainable.Trial:
    reason = "" if trained else "over the cap"
    return largest_trainable.Trial(size, 1_000_000 * size, trained, 1.0, 1 << 20, 1 << 21, [2.0, 1.0], reason)


@pytest.mark.parametrize("first", [1, 30, 37, 200])
@pytest.mark.parametrize("limit", [1, 37, 500])
def test_the_search_ends_next_to_the_largest_that_trains(first: int, limit: int) -> None:
    search = largest_trainable.Search("plain AdamW", "layers")
    largest_trainable.find_largest(search, first, lambda size: trial(size, size <= limit), until=time.monotonic() + 1e6)
    assert search.largest is not None and search.smallest_failed is not None
    assert search.largest.size <= limit < search.smallest_failed.size
    assert search.smallest_failed.size - search.largest.size <= max(1, 0.05 * limit)
    assert len(search.trials) == len({one.size for one in search.trials}) <= 24


def test_nothing_is_begun_that_the_time_is_too_short_for() -> None:
    search = largest_trainable.Search("zerofx", "layers")
    largest_trainable.find_largest(search, 10, lambda size: trial(size, True), until=time.monotonic())
    assert [one.size for one in search.trials] == [10] and search.ended == "out of time"
    plain = largest_trainable.Search("plain AdamW", "layers", [trial(2, True), trial(3, False)])
    text = largest_trainable.table([plain, search], 1 << 31)
    assert "| 10 M " in text and "| 5.0 " in text and "3 M: over the cap" in text and "out of time" in text


@pytest.mark.parametrize(("allocated", "cap", "reason"), [(1 << 28, 1 << 27, "over the cap"), (1, 1 << 27, "")])
def test_a_process_is_held_to_its_cap(allocated: int, cap: int, reason: str) -> None:
    code = f"import time; held = b'x' * {allocated}; time.sleep(0.5)"
    process = subprocess.Popen([sys.executable, "-c", code])
    peak, found = largest_trainable.watch(process, cap, time.monotonic() + 60)
    assert found == reason and (process.returncode != 0) == bool(reason)
    assert (peak > cap) == bool(reason) and peak > 1 << 20


@pytest.mark.slow
def test_a_size_is_tried_in_a_process_of_its_own(tmp_path: Path) -> None:
    axis = largest_trainable.Axis("layers", 1, 128)
    for contender in ("plain AdamW", "AdamW in backward", "zerofx"):
        found = largest_trainable.attempt(contender, axis, 1 << 31, tmp_path, 600.0, 2)
        assert found.trained and found.losses[1] < found.losses[0] and found.numel == axis.numel(2), found
        assert 0 < found.imported_bytes < found.peak_bytes
        assert not largest_trainable.attempt(contender, axis, 1 << 26, tmp_path, 600.0, 2).trained
    assert not list(tmp_path.iterdir())


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
    values = torch.randn(3 * norms.ROW).bfloat16()
    torch.testing.assert_close(cuda.squares_written_out(values), norms.square_sum(values), rtol=2e-6, atol=0.0)
    given = cuda.loss_inputs(17, 8, 50, torch.device("cpu"))
    whole, tiled = cuda.loss_whole(*given), cuda.loss_by_classes(*given, 3)
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
