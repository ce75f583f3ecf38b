"""Steps whose optimizer states live in a slower tier: the same bits as without, and the bytes that were predicted."""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.graphs import prepare
from tests.lib.models import CASES, batches
from tests.lib.runs.offloads import (
    check_measured,
    check_saved_and_loaded,
    placing,
    prepare_case,
    trains_and_holds_as_planned,
)
from tests.lib.runs.training import build, differences, step_of, train_compiled, train_plain
from zerofx.scheduler.plan.decisions import Absence

pytestmark = pytest.mark.usefixtures("drive", "verified")

PLACES = [("host", "device"), ("host", "host"), ("nvme", "device"), ("nvme", "host")]


ALTERNATING = [(*place, 1 + number % 2) for number, place in enumerate(PLACES)]
OTHERWISE = [(tier, update, 3 - every) for tier, update, every in ALTERNATING]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("tier", "update", "every"), [*ALTERNATING, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERWISE)]
)
def test_training_is_the_same_to_the_bit(tier: str, update: str, every: int) -> None:
    case = CASES["gpt"]
    plan = placing(prepare_case(case, 0, 1), tier, update, every)
    assert not differences(train_plain(case, 4), train_compiled(case, 0, 4, plan=plan))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["batchnorm", "llama", "frozen", "mixed dtypes", "param groups"])
def test_other_models_and_optimizers(name: str) -> None:
    case = CASES[name]
    prepared = prepare_case(case, 0, 1)
    expected = train_plain(case, 3)
    for tier, update in PLACES[:2]:
        assert not differences(expected, train_compiled(case, 0, 3, plan=placing(prepared, tier, update)))


def _on_ranks(drive: str, stage: int, places: list[tuple[str, str]]) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    prepared = prepare_case(CASES["gpt"], stage, 2)
    return [text for place in places for text in trains_and_holds_as_planned("gpt", stage, placing(prepared, *place))]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("places", [("host", "host"), ("nvme", "device")])
def test_two_ranks(places: tuple[str, str], drive: Path) -> None:
    assert run_ranks(_on_ranks, 2, str(drive), 3, [places]) == [[], []]
    assert not list(drive.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_all_stages_on_two_ranks(drive: Path, stage: int) -> None:
    assert run_ranks(_on_ranks, 2, str(drive), stage, PLACES) == [[], []]
    assert not list(drive.iterdir())


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("tier", "update"), PLACES)
def test_bytes_in_every_tier_are_those_predicted(tier: str, update: str) -> None:
    prepared = prepare_case(CASES["gpt"], 0, 1)
    step, args = step_of("gpt", plan=placing(prepared, tier, update))
    kept, _ = step_of("gpt")
    found, without = step.measure(*args), kept.measure(*args)
    # The batch's two tensors overlap, which is measured once.
    check_measured(found, step.plan, args[0].nbytes)
    full = sum(bucket.full_bytes for bucket in prepared.layout.buckets)
    stored = 3 * full if update == "host" else 2 * full  # Adam's two moments; parameters too, if updated on the host
    assert step.tiers() == {"device": full, tier: stored} and kept.tiers() == {"device": 3 * full}
    assert found.peak_bytes["device"] < without.peak_bytes["device"]
    moved = full if update == "host" else 2 * full
    assert found.link_bytes["to_host"] == found.link_bytes["to_device"] == moved


def test_a_measured_timeline_shows_what_was_hidden_behind_computation() -> None:
    step, args = step_of("gpt", plan=placing(prepare_case(CASES["gpt"], 0, 1), "nvme", "host"))
    found = step.measure(*args)
    assert set(found.streams) == {"compute", "host", *step.plan.link_bytes}
    assert {stream: found.streams[stream].num_bytes for stream in step.plan.link_bytes} == step.plan.link_bytes
    for use in found.streams.values():
        assert 0 < use.busy_seconds <= found.step_seconds * 2 and 0 <= use.hidden_seconds <= use.busy_seconds * 1.001
    assert found.streams["host"].hidden_seconds == pytest.approx(found.streams["host"].busy_seconds)
    assert "overlapped" in str(step) and "nvme_read" in str(step)


def test_an_update_on_the_host_moves_gradients_down_and_parameters_up() -> None:
    # ZeRO-Offload (2101.06840, section 3): 2 bytes of gradients down and 2 of parameters up for each parameter; no
    # other way to divide the step moves less and has the fp32 states on the host, which are 12 bytes for each.
    case = CASES["gpt"]
    args, _ = next(batches(case, 0, 1))
    model = build(case)
    prepared = prepare(model, args, stage=0, num_ranks=1, optimizer=case.optimizer(model), precision="bf16")
    step, _ = step_of("gpt", plan=placing(prepared, "host", "host"), precision="bf16")
    found = step.measure(*args)
    numel = sum(bucket.numel for bucket in prepared.layout.buckets)
    assert found.link_bytes == step.plan.link_bytes == {"to_host": 2 * numel, "to_device": 2 * numel}
    assert step.tiers() == {"device": 2 * numel, "host": 12 * numel}
    reference, _ = step_of("gpt", precision="bf16")
    for _ in range(3):
        expected = reference(*args)
    assert torch.equal(step(*args), reference(*args)) and torch.isfinite(expected)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("tier", "update"), [*PLACES[1:3], *(pytest.param(*PLACES[i], marks=pytest.mark.slow) for i in (0, 3))]
)
def test_states_are_saved_and_loaded(tier: str, update: str) -> None:
    step, args = step_of("gpt", plan=placing(prepare_case(CASES["gpt"], 0, 1), tier, update))
    check_saved_and_loaded(step, step_of("gpt")[0], args)


def test_states_move_when_another_plan_asks_for_it() -> None:
    step, args = step_of("gpt", plan=placing(prepare_case(CASES["gpt"], 0, 1), "host", "host"))
    reference, _ = step_of("gpt")
    assert torch.equal(step(*args), reference(*args))
    taken, tiers = step._steps.taken, step._steps.tiers
    assert taken is not None and tiers is not None
    buckets = [decision.bucket for decision in step.plan.states]
    for decisions in (
        [Absence(kind="states", bucket=bucket, tier="nvme", update="device", reason="") for bucket in buckets],
        [Absence(kind="states", bucket=bucket, tier="host", update="device", reason="") for bucket in buckets[:1]],
        [],
    ):
        tiers.prepare({"nvme": 1}, 1)
        taken.state.place(step.plan.replace_absences(states=tuple(decisions)))
        held = step.tiers()
        assert set(held) == {"device", *(decision.tier for decision in decisions)}
        assert torch.equal(step(*args), reference(*args))  # moves them back first


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"tier": "device"}, "expected one decision about the states of"),
        ({"tier": "tape"}, "tier: expected one of 'device', 'host', 'nvme'"),
        ({"update": "nvme"}, "expected one decision about the states of"),
    ],
)
def test_wrong_decisions_are_refused(wrong: dict[str, Any], refusal: str) -> None:
    plan = placing(prepare_case(CASES["gpt"], 0, 1), "host", "device")
    step, args = step_of("gpt", plan=plan.replace_absences(states=(replace(plan.states[0], **wrong), *plan.states[1:])))
    with pytest.raises(zerofx.PlanError, match=refusal):
        step(*args)
    step, args = step_of("gpt", plan=plan.replace_absences(states=(*plan.states, plan.states[0])))
    with pytest.raises(zerofx.PlanError, match=r"states of bucket \d+: .*found 2"):
        step(*args)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_regions_and_fused_kernels() -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 0, 1)
    expected = train_compiled(case, 0, 3, backend="inductor")
    for tier, update in (("host", "device"), ("host", "host")):
        found = train_compiled(case, 0, 3, backend="inductor", plan=placing(prepared, tier, update))
        assert not differences(expected, found)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_without_states_and_one_whose_states_come_with_the_second_step(momentum: float) -> None:
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    case = replace(CASES["stack"], optimizer=lambda model: optimizer(model.parameters()))
    prepared = prepare_case(case, 0, 1)
    expected = train_plain(case, 4)
    for tier, update in PLACES:
        assert not differences(expected, train_compiled(case, 0, 4, plan=placing(prepared, tier, update)))
