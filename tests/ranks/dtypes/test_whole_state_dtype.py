"""States of whole parameters that are stored in bfloat16: the bits of a plain loop that rounds them after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.whole_optimizers import MAKES
from tests.lib.runs.whole_updates import AllRanks, WholeCase, compiled, differences_of, resumed_differences, unlike
from zerofx import Precision

pytestmark = pytest.mark.usefixtures("drive", "verified")

LOW: dict[str, Any] = {"precision": Precision(state_dtype="bf16")}
NAMES = ["Muon, groups", "Adafactor", "by norms, groups", "by all norms, groups"]


def _all_differences(cases: list[WholeCase]) -> list[str]:
    return [text for case in cases for text in differences_of(case)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_trains_as_a_loop_that_rounds_states(name: str, stage: int) -> None:
    assert differences_of(WholeCase(name, {"stage": stage, **LOW})) == []


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"stage": 3}),
        (2, {"stage": 1, "accumulate": 4, "reduce": "once"}),
        (3, {"stage": 2, "max_grad_norm": 0.1}),
        pytest.param(4, {"stage": 3, "mesh": {"replicate": 2, "shard": 2}}, marks=pytest.mark.slow),
    ],
)
def test_ranks_have_the_bits_of_one_process(num_ranks: int, options: dict[str, Any]) -> None:
    cases = [WholeCase(name, {**options, **LOW}) for name in NAMES]
    assert run_ranks(_all_differences, num_ranks, cases) == [[]] * num_ranks


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_goes_on_to_the_bit_on_another_number_of_ranks(tmp_path: Path, name: str) -> None:
    case = WholeCase(name, {"stage": 3, **LOW})
    for num_ranks in (2, 1):
        assert run_ranks(resumed_differences, num_ranks, str(tmp_path), case, 3) == [[]] * num_ranks


@pytest.mark.days(3)
@pytest.mark.parametrize("name", ["Muon", "by all norms"])
@pytest.mark.parametrize("to_low", [False, True])
def test_a_checkpoint_is_loaded_into_a_step_of_another_dtype_of_states(tmp_path: Path, name: str, to_low: bool) -> None:
    cases = [WholeCase(name, {"stage": 3}), WholeCase(name, {"stage": 3, **LOW})]
    before, after = cases if to_low else cases[::-1]
    batches = before.batches(1)
    step, optimizer = compiled(before)
    for batch in batches[:2]:
        step(batch[0])
    saved = step.full_state_dict(), optimizer.state_dict()
    step.save_checkpoint(tmp_path)
    step.close()

    plain = AllRanks(after, saved)
    step, optimizer = compiled(after)
    step.load_checkpoint(tmp_path)
    for batch in batches[2:]:
        plain.step(batch)
        step(batch[0])
    assert unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict())) == []
    step.close()


def test_after_close_the_optimizer_steps_on_in_its_own_dtype() -> None:
    case = WholeCase("Muon", LOW)
    step, optimizer = compiled(case)
    for batch in case.batches(1):
        step(batch[0])
    low = optimizer.state_dict()["state"]
    assert {entry["momentum_buffer"].dtype for entry in low.values()} == {torch.bfloat16}
    step.close()
    for number, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["momentum_buffer"], low[number]["momentum_buffer"].float())
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_states_take_half_the_bytes_and_both_are_there_in_an_update() -> None:
    planned = []
    for options in ({}, LOW):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        step = zerofx.compile(
            model, torch.optim.Muon(model.parameters()), loss_fn=mean_square, backend="eager", **options
        )
        rows = torch.randn(2, 256)
        step(rows)
        measured = step.measure(rows, num_steps=2).peak_bytes["device"]
        assert 0.9 * step.plan.peak_bytes["device"] < measured <= step.plan.peak_bytes["device"]
        planned.append(step.plan)
        step.close()
    high, low = planned
    num = 3 * 256 * 256
    assert high.model_state_bytes - low.model_state_bytes == 2 * num


def mean_square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()
