"""Optimizers that need whole parameters, or combine them, have the bits that their own step has on one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.whole_optimizers import MAKES, Closing, Drawing, Mixed
from tests.lib.runs.whole_updates import (
    AllRanks,
    WholeCase,
    compiled,
    differences_of,
    resumed_differences,
    unlike,
)

pytestmark = pytest.mark.usefixtures("drive")

MESH = {"replicate": 2, "shard": 2}
SUMMED = {"accumulate": 4, "reduce": "once"}
ALONE = [*((name, 3) for name in MAKES), ("Muon", 0), ("by all norms", 0)]
ON_TWO = [
    WholeCase("Muon", {"stage": 3}),
    WholeCase("Muon, groups", {"stage": 1, **SUMMED}),
    WholeCase("Adafactor", {"stage": 2}),
    WholeCase("by norms, groups", {"stage": 3, "max_grad_norm": 0.1}),
    WholeCase("by all norms, groups", {"stage": 3, **SUMMED}),
    WholeCase("by all norms", {"stage": 0}),
]
ON_THREE = [WholeCase("Muon", {"stage": 3, "max_grad_norm": 0.1}), WholeCase("by all norms, groups", {"stage": 2})]
ON_FOUR = [WholeCase(name, {"stage": 3, "mesh": MESH}) for name in ("Muon", "by norms", "by all norms")]
EVERY = [
    WholeCase(name, {"stage": stage, **options})
    for name in MAKES
    for stage in range(4)
    for options in ({}, {**SUMMED, "max_grad_norm": 0.1})
]


def _all_differences(cases: list[WholeCase]) -> list[str]:
    return [text for case in cases for text in differences_of(case)]


@pytest.mark.days(3)
@pytest.mark.parametrize(("name", "stage"), ALONE)
def test_one_process_has_the_bits_of_the_optimizers_own_step(name: str, stage: int) -> None:
    assert differences_of(WholeCase(name, {"stage": stage})) == []


@pytest.mark.days(3)
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        pytest.param(2, ON_TWO[::2], id="two"),
        pytest.param(2, ON_TWO[1::2], id="two, others"),
        pytest.param(3, ON_THREE, id="three"),
        pytest.param(4, ON_FOUR, id="mesh of four", marks=pytest.mark.slow),
        *(pytest.param(count, EVERY, id=f"every on {count}", marks=pytest.mark.slow) for count in (2, 3, 4)),
    ],
)
def test_ranks_have_the_bits_of_one_process(num_ranks: int, cases: list[WholeCase]) -> None:
    assert run_ranks(_all_differences, num_ranks, cases) == [[]] * num_ranks


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("Muon, groups", 2, 1),
        ("by all norms, groups", 1, 2),
        pytest.param("Adafactor", 2, 4, marks=pytest.mark.slow),
        pytest.param("by norms, groups", 4, 2, marks=pytest.mark.slow),
        pytest.param("by all norms", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_some_ranks_goes_on_to_the_bit_on_others(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    # All ranks train on the same rows: the mean over one, two or four of them is the same to the bit.
    case = WholeCase(name, {"stage": 3})
    assert run_ranks(resumed_differences, before, str(tmp_path), case, 3) == [[]] * before
    assert run_ranks(resumed_differences, after, str(tmp_path), case, 3) == [[]] * after


def _saved_again(folder: str, case: WholeCase) -> list[str]:
    """Load a state, and read and save what was loaded before any step: what is not as it was."""
    step, optimizer = compiled(case)
    rows = case.batches(1)[0][0]
    step(rows)
    weights, state = expected = step.full_state_dict(), optimizer.state_dict()
    optimizer.load_state_dict(state)
    wrong = unlike(expected, (weights, optimizer.state_dict()))
    optimizer.load_state_dict(state)
    step.save_checkpoint(folder)
    step(rows)
    step.load_checkpoint(folder)
    wrong += unlike(expected, (step.full_state_dict(), optimizer.state_dict()))
    step.close()
    return wrong


def test_what_is_loaded_is_read_and_saved_before_a_step_comes(tmp_path: Path) -> None:
    assert run_ranks(_saved_again, 2, str(tmp_path), WholeCase("Muon", {"stage": 3})) == [[], []]


@pytest.mark.parametrize("name", ["Muon, groups", "by all norms, groups", "by norms"])
def test_a_state_of_the_plain_optimizer_is_gone_on_from(name: str) -> None:
    case = WholeCase(name, {"stage": 3})
    plain = AllRanks(case)
    batches = case.batches(1)
    for batch in batches[:2]:
        plain.step(batch)
    step, optimizer = compiled(case, plain.saved())
    for batch in batches[2:]:
        plain.step(batch)
        step(batch[0])
    assert unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict())) == []
    step.optimizer.load_state_dict(plain.saved()[1])
    assert unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict())) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_loss_falls_in_low_precision(precision: str) -> None:
    step, _ = compiled(WholeCase("Muon"), precision=precision)
    (rows,) = WholeCase("Muon", steps=1).batches(1)[0]
    losses = [float(step(rows)) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", ["Muon", "by all norms"])
def test_a_step_that_overflows_leaves_momentum_and_weights_alone(name: str) -> None:
    case = WholeCase(name, {"stage": 3})
    step, optimizer = compiled(case, precision=zerofx.Precision(loss_scale=zerofx.LossScale(256.0)))
    first, second = case.batches(1)[:2]
    step(first[0])
    before = step.full_state_dict(), optimizer.state_dict()
    step(torch.full_like(second[0], torch.inf))
    assert step.num_skipped == 1
    assert unlike(before, (step.full_state_dict(), optimizer.state_dict())) == []
    plain = AllRanks(case)
    for batch in (first, second):
        plain.step(batch)
    step(second[0])
    assert unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict())) == []


def test_states_on_a_drive_or_the_host_have_the_same_bits() -> None:
    for tier in ("host", "nvme"):
        case = WholeCase("Muon")
        free, _ = compiled(case)
        free.prepare(case.batches(1)[0][0])
        budget = free.plan.peak_bytes["device"] - 600
        away = WholeCase("Muon", {"offload": tier, "memory_budget": budget, "recompute": "none"})
        step, _ = compiled(away)
        step.prepare(case.batches(1)[0][0])
        assert {decision.tier for decision in step.plan.states} == {tier}
        assert differences_of(away) == []


@pytest.mark.parametrize(("width", "num_rows", "between"), [(32, 64, True), (8, 16, False)])
def test_peaks_between_updates_and_in_them_are_as_planned(width: int, num_rows: int, between: bool) -> None:
    # The last layer is updated first; of small layers updates take more than backward does.
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)),
        nn.LayerNorm(width),
    )
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)  # which counts its steps in tensors
    step = zerofx.compile(model, optimizer, backend="eager", loss_fn=lambda outputs, _: outputs.square().mean())
    rows = torch.randn(num_rows, width)
    step(rows)
    measured = step.measure(rows)
    schedule = step.schedule().rows
    first, *_, last = (row.position for row in schedule if "update_whole" in row.op)
    peak = max(schedule, key=lambda row: row.peak_bytes)
    assert first < peak.position < last if between else "update_whole" in peak.op
    assert measured.peak_bytes["device"] == step.plan.peak_bytes["device"]
    step.close()


def _given_other_owners() -> str:
    """The refusal of a plan that has a bucket's owners exchanged."""
    case = WholeCase("Muon", {"stage": 3})
    rows = case.batches(1)[0][0]
    step, _ = compiled(case)
    step.prepare(rows)
    plan = step.plan
    step.close()
    step, _ = compiled(case, plan=plan)
    step(rows)
    step.close()
    first, *others = plan.buckets
    exchanged = replace(first, owners=tuple(1 - rank for rank in first.owners))
    step, _ = compiled(case, plan=replace(plan, buckets=(exchanged, *others)))
    try:
        step(rows)
    except zerofx.PlanError as error:
        return str(error)
    finally:
        step.close()
    return ""


def test_a_plan_with_other_owners_is_refused() -> None:
    for text in run_ranks(_given_other_owners, 2):
        assert "at the owners that the plan has" in text and "make the plan anew" in text


@pytest.mark.parametrize("kind", [Drawing, Closing])
def test_what_is_refused_is_refused_before_anything_is_changed(kind: Any) -> None:
    model = Mixed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reason = "draws no random numbers" if kind is Drawing else r"steps without arguments, found Closing.step\(closure\)"
    with pytest.raises(zerofx.OptimizerError, match=reason):
        zerofx.compile(model, kind(model.parameters()), backend="eager")(torch.ones(2, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
