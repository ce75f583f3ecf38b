"""Evaluations whose regions are compiled: the values of eager mode within rounding, and the training without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zerofx
from tests.lib import compiling
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.evaluating import evaluated, own_batches, step_of_case

pytestmark = compiling.trainings


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gpt", "batchnorm"])
def test_one_rank(name: str) -> None:
    assert evaluated(name, 0, tolerance=1e-5, backend="inductor") == []


def _sharded(name: str) -> list[str]:
    return evaluated(name, 3, tolerance=1e-5, backend="inductor")


@pytest.mark.slow
def test_two_ranks_at_stage_3() -> None:
    for rank, wrong in enumerate(run_ranks(_sharded, 2, "llama")):
        assert wrong == [], f"rank {rank}"


@pytest.mark.days(3)
def test_a_budget_holds_where_regions_are_compiled() -> None:
    case = CASES["gpt"]
    (args, kwargs), (others, named) = own_batches(case, 0, 2)
    free = step_of_case(case, 3, backend="inductor")
    free.prepare(*args, **kwargs)
    budget = int(0.6 * free.plan.peak_bytes["device"])
    step = step_of_case(case, 3, backend="inductor", memory_budget=budget, offload="host")
    step(*args, **kwargs)
    step.evaluate(*others, **named)
    assert step.evaluation.plan.parameters
    assert step.measure_evaluation(*others, **named).peak_bytes["device"] <= budget


def test_the_next_run_finds_the_evaluation_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    case = CASES["gpt"]
    ((args, kwargs),) = own_batches(case, 0, 1)
    steps: list[zerofx.Step] = []
    found = []
    for _ in range(2):
        step = step_of_case(case, 0, backend="inductor")
        step(*args, **kwargs)
        found.append(step.evaluate(*args, **kwargs))
        steps.append(step)
    assert torch.equal(*found)
    # A step that was read is lowered when a report asks for it first.
    assert steps[1].evaluation.details is not steps[0].evaluation.details
    assert str(steps[1].evaluation.plan) == str(steps[0].evaluation.plan)
    assert steps[1].evaluation.lowered.stages[-1].text == steps[0].evaluation.lowered.stages[-1].text
