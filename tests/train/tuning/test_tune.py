"""Tuning: what is trained stays as it was, and of the plans that run the fastest that fits is kept."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zerofx
from tests.lib.runs.tuning import WIDTH, check, noisy, peak_of, rows, tune
from tests.lib.users import adamw, eager_step, ids, same_parameters, tiny, untouched
from zerofx import MemoryBudgetError, Plan, UsageError, ZeroFXWarning
from zerofx.options import check_options
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.tuning import tuner as tuning
from zerofx.tuning.candidates import variations


def test_micro_batches_are_tuned_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    options: dict[str, Any] = {"backend": "eager", "loss_fn": lambda found, _: found.square().mean()}
    result = tune(model, adamw(model), accumulate=4, **options)
    check(result)
    assert result.plan.num_micro_batches == 4
    # As much as two micro-batches need, which is less than the whole batch does.
    whole, half = (
        zerofx.plan(model, adamw(model), rows(512), machine="cpu", accumulate=n, **options).plan.peak_bytes["device"]
        for n in (1, 2)
    )
    assert half < whole
    options |= {"memory_budget": half + 256, "recompute": "none"}  # and numbers on the way to a kernel
    result = tune(model, adamw(model), rows(512), accumulate="auto", **options)
    check(result)
    assert result.plan.num_micro_batches > 1


def test_nothing_is_trained() -> None:
    model, other = noisy(), noisy()
    optimizer, theirs = adamw(model), adamw(other)
    for one, own in ((model, optimizer), (other, theirs)):
        torch.manual_seed(1)
        eager_step(one, own, *rows())
    bits, states = torch.get_rng_state(), [random.getstate(), np.random.get_state(legacy=False)]
    momenta = copy.deepcopy(optimizer.state_dict())
    with untouched(model, optimizer):
        result = tune(model, optimizer)
    check(result)
    assert torch.equal(torch.get_rng_state(), bits)
    assert str([random.getstate(), np.random.get_state(legacy=False)]) == str(states)
    torch.testing.assert_close(optimizer.state_dict(), momenta, rtol=0, atol=0)
    # Neither does what comes after see a difference: the other model was never near tune.
    torch.manual_seed(2)
    loss = eager_step(model, optimizer, *rows())
    torch.manual_seed(2)
    assert torch.equal(loss, eager_step(other, theirs, *rows()))
    assert same_parameters(model, other)


def test_the_plan_is_the_one_that_is_compiled(tmp_path: Path) -> None:
    model = noisy()
    optimizer = adamw(model)
    path = tmp_path / "plan.json"
    result = tune(model, optimizer, save=path)
    assert Plan.load(path) == result.plan
    step = zerofx.compile(model, optimizer, backend="eager", plan=path, example_batch=rows())
    assert step.plan == result.plan
    assert result.best.plan is not None and step.plan.decisions_hash() == result.best.plan.decisions_hash()


def test_a_budget_holds_for_what_is_measured() -> None:
    budget = (peak_of("none") + peak_of("full")) // 2
    result = tune(noisy_model := noisy(), adamw(noisy_model), memory_budget=budget)
    check(result)
    assert result.plan.recomputes and result.plan.memory_budget == budget
    missed = next(one for one in result.candidates if one.name == "recompute nothing")
    assert missed.plan is None and missed.outcome.startswith("does not fit: takes at least")
    assert missed.outcome in str(result)


def test_a_budget_that_nothing_meets_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run_trial", None)
    model = noisy()
    optimizer = adamw(model)
    with (
        untouched(model, optimizer),
        pytest.raises(MemoryBudgetError, match=r"as asked .*does not fit: takes at least"),
    ):
        tune(model, optimizer, memory_budget=1000)


def test_a_model_that_a_step_trains_is_refused() -> None:
    model = tiny()
    optimizer = adamw(model)
    step = zerofx.compile(model, optimizer, backend="eager", example_batch={"ids": ids(), "labels": ids(9)})
    with pytest.raises(UsageError, match="no step trains yet"):
        tune(model, optimizer, {"ids": ids(), "labels": ids(9)})
    step.close()
    tune(model, optimizer, {"ids": ids(), "labels": ids(9)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 1}, "num_steps to be at least 2, found 1"),
        ({"num_candidates": 0}, "num_candidates to be at least 1, found 0"),
        ({"batch": torch.zeros(1)}, "batch to be a tuple or a dict of keywords, found Tensor"),
        ({"stage": 4}, "expected stage to be a whole number, 0 to 3"),
        ({"save": "no_such_folder/plan.json"}, "found that no_such_folder is none"),
        ({"save": 3}, "save to be the path of a file, found int"),
        ({"mesh": "auto"}, "found mesh=.auto.: give the one that zerofx.plan"),
    ],
)
def test_arguments_are_checked(options: Mapping[str, Any], message: str) -> None:
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer), pytest.raises(UsageError, match=message):
        tune(model, optimizer, **options)


def test_variations_change_what_may_be_changed() -> None:
    def names(stage: int = 3, num_ranks: int = 2, **changed: Any) -> list[str]:
        options = check_options(stage=stage, backend="eager", **changed)
        return [variation.name for variation in variations(options, Mesh(shard=num_ranks))]

    leanings = ["as asked", "recompute nothing", "recompute all"]
    assert names(num_ranks=1) == names(stage=2) == leanings
    assert names() == [*leanings, "prefetch 0", "prefetch 2", "prefetch 4", "keep all gathered"]
    assert names(prefetch=2, recompute="none") == ["as asked", "prefetch 0", "prefetch 4", "keep all gathered"]
    assert names(keep_gathered="all")[-1] == "keep none gathered"
    with pytest.warns(ZeroFXWarning, match="offload='host' is ignored without a memory_budget"):
        assert names(num_ranks=1, offload="host") == [*leanings, "offload nothing"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_regions_are_timed() -> None:
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        result = tune(model, optimizer, backend="inductor", num_candidates=2)
    check(result)
    assert result.costs.seconds and all(seconds > 0 for seconds in result.costs.seconds.values())
