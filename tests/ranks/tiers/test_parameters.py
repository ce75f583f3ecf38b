"""Steps whose parameters live in a slower tier: the same bits as without, and the bytes that were predicted."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.graphs import Prepared
from tests.lib.models import CASES
from tests.lib.runs.offloads import (
    check_measured,
    check_saved_and_loaded,
    parameters_away,
    prepare_case,
    same_tensors,
    trains_and_holds_as_planned,
)
from tests.lib.runs.training import differences, step_of, train_compiled, train_plain
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("drive", "verified")

STATES = [None, ("host", "device"), ("host", "host"), ("nvme", "device"), ("nvme", "host")]
# Each tier and each kind of update once; all pairs of them at night.
QUICK = [("host", None), ("host", ("host", "host")), ("nvme", ("nvme", "device"))]
PAIRS = [
    *QUICK,
    *(pytest.param(t, s, marks=pytest.mark.slow) for t in ("host", "nvme") for s in STATES if (t, s) not in QUICK),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("tier", "states"), PAIRS)
def test_training_is_the_same_to_the_bit(tier: str, states: tuple[str, str] | None) -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 3, 1)
    expected = train_plain(case, 3)
    for every in (1, 2):
        plan = parameters_away(prepared, tier, states, every=every)
        assert not differences(expected, train_compiled(case, 3, 3, plan=plan))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["llama", "batchnorm", "frozen", "tied", "mixed dtypes", "param groups"])
def test_other_models_and_optimizers(name: str) -> None:
    case = CASES[name]
    prepared = prepare_case(case, 3, 1)
    expected = train_plain(case, 3)
    for states in (None, ("host", "host")):
        plan = parameters_away(prepared, "host", states)
        assert not differences(expected, train_compiled(case, 3, 3, plan=plan))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "states"), PAIRS)
def test_bf16_parameters_with_masters_elsewhere(tier: str, states: tuple[str, str] | None) -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 3, 1, precision="bf16")
    expected = train_compiled(case, 3, 3, precision="bf16")
    plan = parameters_away(prepared, tier, states)
    assert not differences(expected, train_compiled(case, 3, 3, precision="bf16", plan=plan))


def test_an_update_on_the_host_writes_parameters_on_nvme() -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 3, 1, precision="bf16")
    expected = train_compiled(case, 3, 3, precision="bf16")
    for states in (("nvme", "host"), ("host", "host")):
        plan = parameters_away(prepared, "nvme", states)
        assert not differences(expected, train_compiled(case, 3, 3, precision="bf16", plan=plan))


def test_micro_batches_bring_parameters_up_once_for_each_residency() -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 3, 1, num_micro_batches=2)
    plan = parameters_away(prepared, "host", ("host", "device"))
    found = train_compiled(case, 3, 3, accumulate=2, plan=plan)
    assert not differences(train_plain(case, 3, 2), found)


def _on_ranks(drive: str, cases: Sequence[tuple[str, str, tuple[str, str] | None]]) -> list[str]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    return [
        text
        for name, tier, states in cases
        for text in trains_and_holds_as_planned(name, 3, parameters_away(prepare_case(CASES[name], 3, 2), tier, states))
    ]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "states"), [("host", None), ("nvme", ("nvme", "device")), ("host", ("host", "host"))])
def test_two_ranks(tier: str, states: tuple[str, str] | None, drive: Path) -> None:
    assert run_ranks(_on_ranks, 2, str(drive), [("gpt", tier, states)]) == [[], []]
    assert not list(drive.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_two_ranks_with_states_anywhere(drive: Path, name: str, tier: str) -> None:
    cases = [(name, tier, states) for states in STATES]
    assert run_ranks(_on_ranks, 2, str(drive), cases) == [[], []]
    assert not list(drive.iterdir())


def _step(plan: Plan | None, **options: Any) -> tuple[zerofx.Step, tuple[Any, ...]]:
    return step_of("gpt", 3, plan=plan, **options)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "states"), PAIRS)
def test_bytes_in_every_tier_are_those_predicted(tier: str, states: tuple[str, str] | None) -> None:
    prepared = prepare_case(CASES["gpt"], 3, 1)
    step, args = _step(parameters_away(prepared, tier, states))
    found = step.measure(*args)
    # The batch's two tensors overlap, which is measured once.
    check_measured(found, step.plan, args[0].nbytes)
    full = sum(bucket.full_bytes for bucket in prepared.layout.buckets)
    held = {"device": 0, "host": 0, "nvme": 0}
    held[tier] += full
    held[states[0] if states else "device"] += 2 * full  # Adam's two moments
    assert step.tiers() == {where: size for where, size in held.items() if size or where == "device"}


def test_each_residency_and_the_update_take_one_copy_up_and_the_update_one_down() -> None:
    prepared = prepare_case(CASES["gpt"], 3, 1)
    step, args = _step(parameters_away(prepared, "host", None))
    times = {bucket.index: 0 for bucket in prepared.layout.buckets}
    step.prepare(*args)
    for gather in step.plan.gathers:
        times[gather.bucket] += 1
    assert all(times.values())
    full = {bucket.index: bucket.full_bytes for bucket in prepared.layout.buckets}
    up = sum((1 + times[index]) * size for index, size in full.items())
    assert step.plan.link_bytes == {"to_host": sum(full.values()), "to_device": up}
    assert step.measure(*args).link_bytes == step.plan.link_bytes


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("tier", "states"), PAIRS)
def test_parameters_are_saved_loaded_and_given_back(tier: str, states: tuple[str, str] | None) -> None:
    step, args = _step(parameters_away(prepare_case(CASES["gpt"], 3, 1), tier, states))
    reference, _ = _step(None)
    step(*args)
    reference(*args)
    with pytest.raises(zerofx.ZeroFXError, match="full_parameters"):
        step.model(*args)
    check_saved_and_loaded(step, reference, args)


def test_parameters_move_when_another_plan_asks_for_it() -> None:
    prepared = prepare_case(CASES["gpt"], 3, 1)
    step, args = _step(parameters_away(prepared, "host", ("host", "host")))
    reference, _ = _step(None)
    assert torch.equal(step(*args), reference(*args))
    taken, tiers = step._steps.taken, step._steps.tiers
    assert taken is not None and tiers is not None
    for tier, states in (("nvme", None), ("host", ("nvme", "device")), (None, ("host", "host")), (None, None)):
        tiers.prepare({"nvme": 1}, 1)
        plan = prepared.plan if tier is None else parameters_away(prepared, tier, states, every=2)
        if tier is None and states is not None:
            plan = plan.replace_absences(states=parameters_away(prepared, "host", states).states)
        assert taken.state.place(plan)
        assert taken.state.resident is (tier is None)
        assert torch.equal(step(*args), reference(*args))  # moves them back first
        with pytest.raises(zerofx.ZeroFXError, match="full_parameters"):
            step.model(*args)


def test_wrong_decisions_are_refused() -> None:
    plan = parameters_away(prepare_case(CASES["gpt"], 3, 1), "host", None)

    def refusal(*parameters: Absence) -> str:
        step, args = _step(plan.replace_absences(parameters=parameters))
        with pytest.raises(zerofx.PlanError) as caught:
            step(*args)
        return str(caught.value)

    assert "decision about the parameters" in refusal(
        Absence(kind="parameters", bucket=0, tier="device", reason=""), *plan.parameters[1:]
    )
    no_tier = Absence(kind="parameters", bucket=0, tier=cast(Tier, "tape"), reason="")
    assert "tier: expected one of 'device', 'host', 'nvme'" in refusal(no_tier, *plan.parameters[1:])
    assert re.search(r"parameters of bucket \d+", refusal(*plan.parameters, plan.parameters[0]))


def test_only_stage_3_has_parameters_in_slower_tiers() -> None:
    away = Absence(kind="parameters", bucket=0, tier="host", reason="")
    plan = prepare_case(CASES["gpt"], 1, 1).plan.replace_absences(parameters=[away])
    step, args = step_of("gpt", 1, plan=plan)
    with pytest.raises(zerofx.PlanError, match="at stage 3"):
        step(*args)


def test_a_plan_with_parameters_elsewhere_contradicts_offload_none() -> None:
    plan = parameters_away(prepare_case(CASES["gpt"], 3, 1), "host", None)
    with pytest.raises(zerofx.UsageError, match="the parameters of"):
        _step(plan, offload="none")


def test_a_failure_before_the_update_changes_nothing(drive: Path) -> None:
    prepared: Prepared = prepare_case(CASES["gpt"], 3, 1)
    step, args = _step(parameters_away(prepared, "nvme", ("nvme", "device")))
    step(*args)
    before, states = step.full_state_dict(), step.optimizer.state_dict()["state"]
    bad = tuple(torch.full((arg.shape[0], arg.stride(0)), 10**6)[:, : arg.shape[1]] for arg in args)
    with pytest.raises(IndexError) as caught:
        step(*bad)
    assert "nothing had been updated yet" in "".join(caught.value.__notes__)
    after, later = step.full_state_dict(), step.optimizer.state_dict()["state"]
    assert same_tensors(before, after)
    assert same_tensors(states[0], later[0])
