"""The schedule: every node with its bytes and time, folded for reading, and as files that other tools open."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.graphs import prepare, target
from tests.lib.lowered import Deep, lowered
from zerofx.ir import ops
from zerofx.ir.aliasing import is_view
from zerofx.lowering.lower import lower
from zerofx.report.schedule import make_schedule
from zerofx.scheduler.cost.categories import memory_curve, peak_memory
from zerofx.scheduler.cost.machine import Machine

STAGES = [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 8)]


@pytest.mark.parametrize(("stage", "num_ranks"), [(0, 1), (1, 2), (3, 2)])
def test_table(golden: Callable[..., None], stage: int, num_ranks: int) -> None:
    golden(str(make_schedule(lowered(stage=stage, num_ranks=num_ranks))))


def test_table_with_tiers(golden: Callable[..., None]) -> None:
    golden(str(make_schedule(lowered(tiers=["host", "nvme"]))))


def test_a_copy_of_two_legs_is_on_two_tracks(tmp_path: Path) -> None:
    schedule = make_schedule(lowered(tiers=["nvme"]))
    schedule.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "collective", "to_host", "to_device", "nvme_read", "nvme_write"]
    row = next(row for row in schedule.rows if row.op == "offload")
    slices = [event for event in events if event["ph"] == "X" and event["name"] == row.name]
    assert [tracks[event["tid"]] for event in slices] == ["to_host", "nvme_write"]
    assert slices[0]["ts"] + slices[0]["dur"] <= slices[1]["ts"] + 1e-6
    assert row.tier == "nvme" and next(row for row in schedule.rows if row.op == "reload").tier == "device"
    schedule.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(word in page for word in ("nvme_write", "writes to the drive", "peak on nvme"))
    assert schedule.totals.slower_peak_bytes.keys() == {"host", "nvme"}


def test_table_in_full(golden: Callable[..., None]) -> None:
    golden(make_schedule(lowered(2)).table(fold=False))


def test_what_stands_between_micro_batches_and_before_updates_is_of_no_bucket() -> None:
    prepared = prepare(Deep(2), num_ranks=2, num_micro_batches=2)
    prepared.step.guarded = True
    step = lower(
        prepared.step, prepared.plan, prepared.layout, prepared.programs, target(Machine.named("cpu"))
    )  # fmt: skip
    buckets = {row.op: row.bucket for row in make_schedule(step).rows}
    assert (buckets["next_micro_batch"], buckets["check_finite"]) == ("", "")
    assert all(buckets[op] for op in ("all_gather", "reduce_scatter", "hyperparameters", "wait", "release"))


def test_the_folded_table_is_flat_in_depth() -> None:
    lines = {len(str(make_schedule(lowered(depth))).splitlines()) for depth in (8, 20)}
    assert len(lines) == 1


class Between(nn.Module):
    """Layers with something of the model between each two, and around all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcde"})
        self.first, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks.values():
            x = torch.tanh(block(x))
        total: torch.Tensor = self.frozen(x).sum()
        return total


def test_a_repetition_without_a_layer_is_the_models() -> None:
    model = Between()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    planned = zerofx.plan(model, optimizer, (torch.randn(2, 4),), world_size=2, stage=3, machine="h100-sxm")
    assert "blocks.a" in str(planned.schedule())


def test_folding_hides_nothing_from_the_full_table() -> None:
    schedule = make_schedule(lowered(8))
    shown = [row for row in schedule.instructions if row.op != "hyperparameters"]
    assert len(schedule.table(fold=False).splitlines()) == len(shown) + 4 - _lines_saved(schedule.table(fold=False))


def _lines_saved(table: str) -> int:
    """Rows that a run of one event takes the place of."""
    runs = [int(line.split("  x")[1].split()[0]) for line in table.splitlines() if "  x" in line]
    return sum(count - 1 for count in runs)


@pytest.mark.parametrize(("stage", "num_ranks"), STAGES)
def test_rows_are_the_calls_that_cost_something_in_order(stage: int, num_ranks: int) -> None:
    step = lowered(stage=stage, num_ranks=num_ranks)
    calls = list(step.graph.calls())
    rows = make_schedule(step).rows
    expected = [node for node in calls if node.target in ops.EVENTS or not is_view(node)]
    assert [row.name for row in rows] == [node.name for node in expected]
    assert [calls[row.position] for row in rows] == expected
    for row, node in zip(rows, expected, strict=True):
        assert row.live_bytes == step.simulation.live.after[node]
        assert row.peak_bytes == step.simulation.live.during[node]
        assert (row.region == "") == (row.kind == "event")
        assert row.stream == ("collective" if node.target in ops.COLLECTIVES else "compute")


@pytest.mark.parametrize(("stage", "num_ranks"), STAGES)
def test_sums_are_the_plans_predictions(stage: int, num_ranks: int) -> None:
    step = lowered(stage=stage, num_ranks=num_ranks)
    schedule, prediction = make_schedule(step), step.plan.prediction
    assert prediction is not None
    for rows in (schedule.rows, schedule.instructions):
        assert max(row.peak_bytes for row in rows) == prediction.peak_bytes["device"] == schedule.totals.peak_bytes
        assert sum(row.wire_bytes for row in rows) == prediction.wire_bytes
        assert sum(row.flops for row in rows) == prediction.flops
        assert sum(row.exposed_seconds for row in rows) == pytest.approx(prediction.exposed_seconds)
        assert sum(row.bytes_out for row in rows) == sum(row.bytes_out for row in schedule.rows)
        assert max(row.start_seconds + row.seconds for row in rows) == pytest.approx(prediction.step_seconds)


def test_events_name_their_bucket_and_layer() -> None:
    rows = [row for row in make_schedule(lowered(3)).rows if row.kind == "event"]
    assert {row.op for row in rows} >= {"all_gather", "wait", "release", "reduce_scatter", "empty_gradients"}
    assert all(row.bucket for row in rows)
    assert {row.unit for row in rows} == {"layers.0", "layers.1", "layers.2", ""}


@pytest.mark.parametrize(("stage", "num_ranks"), STAGES)
@pytest.mark.parametrize("fused", [False, True])
def test_categories_add_up_to_what_is_live(stage: int, num_ranks: int, fused: bool) -> None:
    step = lowered(stage=stage, num_ranks=num_ranks, fused=fused)
    live = step.simulation.live
    for moment in memory_curve(step.graph, live):
        assert sum(moment.during.values()) == max(live.during[node] for node in moment.nodes)
        assert sum(moment.after.values()) == live.after[moment.nodes[-1]]
        assert all(num_bytes > 0 for held in (moment.during, moment.after) for num_bytes in held.values())
    peak = peak_memory(step.graph, live)
    assert sum(peak.values()) == live.peak_bytes
    assert all(num_bytes > 0 for num_bytes in peak.values())


def test_json_has_everything(tmp_path: Path) -> None:
    schedule = make_schedule(lowered(3))
    path = tmp_path / "schedule.json"
    text = schedule.to_json(path)
    assert path.read_text() == text
    found = json.loads(text)
    assert found["format"] == 2
    assert [row["name"] for row in found["rows"]] == [row.name for row in schedule.rows]
    assert found["totals"]["wire_bytes"] == schedule.totals.wire_bytes


@pytest.mark.parametrize(("stage", "num_ranks"), STAGES)
def test_trace_has_a_track_a_stream_and_the_memory_curve(tmp_path: Path, stage: int, num_ranks: int) -> None:
    schedule = make_schedule(lowered(stage=stage, num_ranks=num_ranks))
    path = tmp_path / "trace.json"
    schedule.to_chrome_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert set(kinds) == {"M", "X", "C"}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["collective", "compute"]
    for track in tracks:
        _assert_nested([e for e in events if e["ph"] == "X" and e["tid"] == track])
    curve = [event for event in events if event["ph"] == "C"]
    assert [event["ts"] for event in curve] == sorted(event["ts"] for event in curve)
    assert all(len(event["args"]) == len(curve[0]["args"]) for event in curve)
    assert sum(curve[-1]["args"].values()) == schedule.rows[-1].live_bytes
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(schedule.totals.step_seconds * 1e6)


def _assert_nested(slices: list[dict[str, Any]]) -> None:
    """Viewers drop slices of one track that overlap without one being inside the other."""
    rounding = 1e-6
    open_until: list[float] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        assert event["dur"] > 0 and event["ts"] >= -rounding
        while open_until and open_until[-1] <= event["ts"] + rounding:
            open_until.pop()
        assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + rounding, event["name"]
        open_until.append(event["ts"] + event["dur"])
