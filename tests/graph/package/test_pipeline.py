"""The loop around the passes: what it reports, checks, prints and leaves out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import get_args, get_type_hints

import pytest
import torch

import zerofx.pipeline
from tests.lib.graphs import TwoBlocks, features, prepare, settings, sgd
from zerofx.driver.plan_only import plan
from zerofx.errors import InvalidGraphError, UsageError
from zerofx.ir.edit import insert_call
from zerofx.ir.facts import Origin, Phase
from zerofx.ir.graph import StepGraph
from zerofx.passes.base import Pass
from zerofx.passes.prefetch import Prefetch
from zerofx.pipeline import PLAN, PREPARE, PreparationInputs, check_disabled, find
from zerofx.scheduler.plan.decisions import ABSENCE_KINDS, Absence
from zerofx.scheduler.plan.plan import Plan

_NAMES = [
    "tile",
    "recompute",
    "offload",
    "shard",
    "gather",
    "reduce",
    "direct",
    "update",
    "buffers",
    "prefetch",
    "in_place",
]


def _lines(err: str, names: list[str]) -> list[str]:
    return [line.split()[0] for line in err.splitlines() if line.split() and line.split()[0] in names]


def test_stages_are_the_captured_graph_and_the_graph_behind_each_pass() -> None:
    prepared = prepare()
    captured = prepared.step.text()
    stages = prepared.run_pipeline()
    assert [stage.name for stage in stages] == ["capture", *_NAMES]
    assert stages[0].text == captured and stages[0].report is None
    assert stages[-1].text == prepared.step.text()


def test_there_is_no_gather_pass_where_parameters_are_whole() -> None:
    assert "gather" not in [stage.name for stage in prepare(stage=2).run_pipeline()]


def test_a_report_counts_operators_and_follows_the_peak() -> None:
    reports = [stage.report for stage in prepare().run_pipeline() if stage.report is not None]
    gather, reduce = (next(one for one in reports if one.name == name) for name in ("gather", "reduce"))
    assert gather.added["zerofx.release.default"] == 4
    assert reduce.added == {
        "aten.as_strided.default": 3, "aten.copy_.default": 3, "aten.div_.Tensor": 3,
        "zerofx.empty_gradients.default": 3, "zerofx.reduce_scatter.default": 3, "zerofx.wait.default": 3,
    }  # fmt: skip
    assert not reduce.removed
    assert all(one.peak_bytes_after == other.peak_bytes_before for one, other in itertools.pairwise(reports))


def test_level_0_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    prepare().run_pipeline()
    assert capsys.readouterr().err == ""


def test_level_1_says_passes_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    prepare().run_pipeline(debug=1)
    err = capsys.readouterr().err
    assert _lines(err, _NAMES) == _NAMES
    assert all(" peak " in line and " -> " in line for line in err.splitlines())


def test_level_2_says_operators_added_and_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, _Breaks(), _Mends())
    prepare().run_pipeline(debug=2, verify=0)
    lines = capsys.readouterr().err.splitlines()
    assert "  +3 zerofx.reduce_scatter.default" in lines
    assert lines[-1] == "  -1 zerofx.all_gather.default"


def test_level_5_says_the_graph_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    prepare().run_pipeline(debug=4)
    assert "# after" not in capsys.readouterr().err
    prepare().run_pipeline(debug=5)
    err = capsys.readouterr().err
    assert [line for line in err.splitlines() if line.startswith("# after")] == [
        f"# after {name}" for name in ["capture", *_NAMES]
    ]


@pytest.mark.parametrize(("level", "schedule", "source"), [(2, False, False), (3, True, False), (4, True, True)])
def test_level_3_says_the_schedule_and_4_the_source(
    level: int, schedule: bool, source: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROFX_DEBUG", str(level))
    model = TwoBlocks()
    planned = plan(model, sgd(model), features(), world_size=2)
    err = capsys.readouterr().err
    assert (str(planned.schedule()) in err) is schedule
    assert (planned.lowered.emitted.source in err) is source


def test_only_the_rank_that_talks_prints(capsys: pytest.CaptureFixture[str]) -> None:
    prepared = prepare()
    zerofx.pipeline.trace_passes(
        prepared.step, prepared.plan, prepared.layout, prepared.programs, settings(debug=5), on_cpu=True,
        verbose=False,
    )  # fmt: skip
    assert capsys.readouterr().err == ""


@dataclass(frozen=True)
class _Breaks:
    """A pass that starts a collective which nothing awaits."""

    name: str = "breaks"

    def run(self, step: StepGraph, plan: Plan) -> None:
        gather = next(node for node in step.calls() if node.name == "gather_0")
        with step.graph.inserting_after(gather):
            insert_call(step.graph, torch.ops.zerofx.all_gather.default, gather.args, Origin("", Phase.FORWARD))


@dataclass(frozen=True)
class _Mends:
    """A pass that takes out what ``_Breaks`` put in."""

    name: str = "mends"

    def run(self, step: StepGraph, plan: Plan) -> None:
        step.graph.erase_node(next(node for node in step.calls() if node.name.startswith("all_gather_default")))


def _with(monkeypatch: pytest.MonkeyPatch, *more: Pass) -> None:
    own = zerofx.pipeline.passes
    monkeypatch.setattr(zerofx.pipeline, "passes", lambda *given, **named: (*own(*given, **named), *more))


def test_verify_0_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, _Breaks())
    prepare().run_pipeline(verify=0)


def test_verify_1_checks_behind_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, _Breaks(), _Mends())
    prepare().run_pipeline(verify=1)
    _with(monkeypatch, _Breaks())
    with pytest.raises(InvalidGraphError, match="after pass breaks, waits"):
        prepare().run_pipeline(verify=1)


def test_verify_2_checks_behind_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, _Breaks(), _Mends())
    with pytest.raises(InvalidGraphError, match="after pass breaks, waits"):
        prepare().run_pipeline(verify=2)


def test_a_disabled_pass_is_left_out() -> None:
    prepared, without = prepare(), prepare()
    prepared.run_pipeline()
    stages = without.run_pipeline(disable=frozenset({"prefetch"}))
    assert "prefetch" not in [stage.name for stage in stages]
    assert without.step.text() != prepared.step.text()
    Prefetch().run(without.step, without.plan)
    assert without.step.text() == prepared.step.text()


def test_planning_can_do_without_simplify(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured() -> str:
        model = TwoBlocks()
        return plan(model, sgd(model), features(), world_size=2).lowered.stages[0].text

    simple = captured()
    monkeypatch.setenv("ZEROFX_DISABLE", "simplify")
    assert "aten.detach.default" in captured() and "aten.detach.default" not in simple


def test_planning_refuses_to_leave_out_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_DISABLE", "reduce")
    model = TwoBlocks()
    with pytest.raises(UsageError, match="found reduce"):
        plan(model, sgd(model), features())


@pytest.mark.parametrize("name", ["gather", "no_such_pass"])
def test_a_pass_that_is_needed_cannot_be_disabled(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"what can be left out \(channels, in_place, prefetch, simplify, stamp\), found {name}"
    ):
        check_disabled(settings(disable=frozenset({name, "prefetch"})))


def test_every_decision_is_carried_out_by_one_rewrite() -> None:
    carried = Counter(
        (entry, column)
        for one in (*PREPARE, *PLAN)
        for entry, columns in one.decisions.items()
        for column in columns or ("",)
    )
    besides = {"kind", "reason", "num_bytes", "layer", "weight", "seconds"}
    about = {"stage", "num_ranks", "precision", "machine", "graph", "buckets", "memory_budget", "wire", "summary"}
    # What a plan is for, and what it leads to.
    about |= {"micro_batches_reason", "ranks_per_node", "replicate", "model", "pipe", "states_reason"}
    about |= {"draws_together"}
    about |= {"prediction"}
    hints = get_type_hints(Plan)
    expected, ways = set(), set[str]()
    for entry in {one.name for one in fields(Plan)} - about:
        kinds = get_args(hints[entry])
        decided = kinds and not isinstance(kinds[0], type(None)) and hasattr(kinds[0], "__dataclass_fields__")
        columns = {one.name for one in fields(kinds[0])} - besides if decided else {""}
        for kind in ABSENCE_KINDS if entry == "absences" else (entry,):
            # What is away leaves and comes back in the ways of its kind.
            own = columns & {column for other, column in carried if other == kind} if kind != entry else columns
            ways |= own if kind != entry else set()
            expected |= {(kind, column) for column in own}
    assert ways == {one.name for one in fields(Absence)} - besides
    # A bucket's number says which decision the columns of a second pass are of.
    assert set(carried) == expected and set(carried.values()) == {1}


def test_a_pass_runs_only_where_it_has_something_to_do() -> None:
    bare = Plan(0, 2, None, "cpu", "", (), (), ())
    assert [entry.name for entry in PREPARE if entry.when(PreparationInputs())] == []
    prepared = PreparationInputs.from_plan(replace(bare, loss_scaled=True), ())
    assert [entry.name for entry in PREPARE if entry.when(prepared)] == ["simplify", "order_rows", "scale_loss"]
    assert [entry.name for entry in PLAN if entry.when(bare, False)] == [
        "tile", "recompute", "offload", "shard", "reduce", "direct", "update", "buffers", "prefetch",
    ]  # fmt: skip
    clipped = replace(bare, max_grad_norm=math.inf)
    assert {"clip", "guard_loss"} <= {one.name for one in PLAN if one.when(clipped, True)}
    assert find("update").about == "Inline each bucket's update program after its reduction."
