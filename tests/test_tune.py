"""Tuning: what is trained stays as it was, and of the plans that run the fastest that fits is kept."""

from __future__ import annotations

import copy
import os
import random
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.distributed import run_ranks
from tests.users import adamw, eager_step, ids, same_parameters, tiny, untouched
from zerofx import (
    Candidate,
    MemoryBudgetError,
    Plan,
    PlanError,
    TuneResult,
    UsageError,
    ZeroFXError,
    ZeroFXWarning,
    building,
    trial,
    tuning,
)
from zerofx.options import check_options
from zerofx.rehearsal import predict_plan
from zerofx.runtime.measure import Measurement
from zerofx.scheduler.machine import Link, Machine
from zerofx.settings import read_settings
from zerofx.variations import variations

WIDTH = 16


class Noisy(nn.Module):
    """Layers with a buffer that changes, and that draw random numbers; some values are cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Sigmoid(), nn.Dropout(0.5))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def noisy() -> Noisy:
    torch.manual_seed(5)
    return Noisy()


def rows(number: int = 32) -> tuple[Tensor, ...]:
    return (torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(1)),)


def tune(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any = None, **options: Any) -> TuneResult:
    return zerofx.tune(
        model, optimizer, rows() if batch is None else batch, **{"backend": "eager", "num_steps": 2, **options}
    )


def peak_of(recompute: str) -> int:
    model = noisy()
    planned = zerofx.plan(model, adamw(model), rows(), machine="cpu", backend="eager", recompute=recompute)  # type: ignore[arg-type]
    return planned.plan.peak_bytes["device"]


def check(result: TuneResult) -> None:
    """The best is the fastest of those that fit, and every line says what became of it."""
    fitting = [one for one in result.candidates if one.measured and not one.outcome.startswith("does not fit")]
    assert result.best == min(fitting, key=lambda one: one.measured.step_seconds)  # type: ignore[union-attr]
    assert result.best.outcome == "best" and sum(one.outcome == "best" for one in result.candidates) == 1
    assert all(one.outcome for one in result.candidates)
    if result.memory_budget is not None:
        assert result.measured.peak_bytes["device"] <= result.memory_budget


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
    assert step.plan.decisions_hash() == result.best.plan.decisions_hash()  # type: ignore[union-attr]


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


def measuring(monkeypatch: pytest.MonkeyPatch, change: Callable[[Plan, Measurement], Measurement]) -> list[Plan]:
    """Let trials say something else than they have measured; gives the plans that were run."""
    ran: list[Plan] = []

    def changed(training: Any, plan: Plan, *args: Any) -> Any:
        ran.append(plan)
        found, regions = trial.run_trial(training, plan, *args)
        assert found.measured is not None
        return replace(found, measured=change(plan, found.measured)), regions

    monkeypatch.setattr(tuning, "run_trial", changed)
    return ran


def test_a_peak_that_is_measured_over_the_budget_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = peak_of("none")

    def more(plan: Plan, found: Measurement) -> Measurement:
        return found if plan.recomputes else replace(found, peak_bytes={"device": budget + 2048})

    measuring(monkeypatch, more)
    result = tune(noisy_model := noisy(), adamw(noisy_model), memory_budget=budget)
    check(result)
    assert result.plan.recomputes
    assert "does not fit: measured 2.0 KiB too much" in str(result)


def test_what_promises_more_once_costs_are_corrected_is_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # One candidate at first; regions that only it has turn out to be slow, so that the other looks better.
    model = noisy()
    optimizer = adamw(model)
    unlike = tune(model, optimizer, num_candidates=2).candidates
    keys = [set(one.measured.region_seconds) for one in unlike if one.measured]
    own = keys[0] - keys[1]
    assert own

    def slower(plan: Plan, found: Measurement) -> Measurement:
        seconds = {key: spent * (1000 if key in own else 1) for key, spent in found.region_seconds.items()}
        return replace(found, region_seconds=seconds, step_seconds=1.0 if set(seconds) & own else 0.5)

    ran = measuring(monkeypatch, slower)
    result = tune(model, optimizer, num_candidates=1)
    assert [bool(plan.recomputes) for plan in ran] == [False, True]
    assert result.best.name == "recompute all"
    check(result)


class OutOfMemoryStep(zerofx.Step):
    """A step that has too little memory for plans that keep everything."""

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        if not self.plan.recomputes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return super().measure(*args, num_steps=num_steps, **kwargs)


def test_a_candidate_without_memory_is_reported_and_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Step", OutOfMemoryStep)
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        result = tune(model, optimizer)
    check(result)
    assert result.plan.recomputes
    line = "failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert result.candidates[0].outcome == line
    assert re.search(rf"^as asked .* {re.escape(line)}$", str(result), flags=re.MULTILINE)


class FailingStep(zerofx.Step):
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("no luck")


def test_when_all_fail_the_error_says_how_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Step", FailingStep)
    model = noisy()
    with pytest.raises(PlanError, match=r"every candidate failed:(?s:.)*as asked .*RuntimeError: no luck"):
        tune(model, adamw(model))


def test_a_model_that_a_step_trains_is_refused() -> None:
    model = tiny()
    optimizer = adamw(model)
    step = zerofx.compile(model, optimizer, backend="eager", example_batch={"ids": ids(), "labels": ids(9)})
    with pytest.raises(UsageError, match="no step trains yet"):
        tune(model, optimizer, {"ids": ids(), "labels": ids(9)})
    step.close()
    tune(model, optimizer, {"ids": ids(), "labels": ids(9)})


def test_a_loss_function_of_the_model_is_that_of_the_copy() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

        def loss(self, y: Tensor, x: Tensor) -> Tensor:
            return F.mse_loss(y, x) + self.inner.weight.square().sum()

    model = Own()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        check(tune(model, optimizer, loss_fn=model.loss))


def test_what_cannot_be_copied_is_refused() -> None:
    model = noisy()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"copy\.deepcopy can copy.*TypeError: cannot pickle '_thread.lock'"):
        tune(model, adamw(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 1}, "num_steps to be at least 2, found 1"),
        ({"num_candidates": 0}, "num_candidates to be at least 1, found 0"),
        ({"batch": torch.zeros(1)}, "batch to be a tuple or a dict of keywords, found Tensor"),
        ({"stage": 4}, "expected stage 0"),
        ({"save": "no_such_folder/plan.json"}, "found that no_such_folder is none"),
    ],
)
def test_arguments_are_checked(options: Mapping[str, Any], message: str) -> None:
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer), pytest.raises(UsageError, match=message):
        tune(model, optimizer, **options)


def test_variations_change_what_may_be_changed() -> None:
    def names(stage: int = 3, num_ranks: int = 2, **changed: Any) -> list[str]:
        given = {"prefetch": 1, "keep_gathered": (), "recompute": "auto", "offload": "auto", **changed}
        options = check_options(
            stage, None, None, "eager", None, None, given["prefetch"], given["keep_gathered"], 1, None,
            given["recompute"], given["offload"],
        )  # fmt: skip
        return [variation.name for variation in variations(options, num_ranks)]

    leanings = ["as asked", "recompute nothing", "recompute all"]
    assert names(num_ranks=1) == names(stage=2) == leanings
    assert names() == [*leanings, "prefetch 0", "prefetch 2", "prefetch 4", "keep all gathered"]
    assert names(prefetch=2, recompute="none") == ["as asked", "prefetch 0", "prefetch 4", "keep all gathered"]
    assert names(keep_gathered="all")[-1] == "keep none gathered"
    with pytest.warns(ZeroFXWarning, match="offload='host' is ignored without a memory_budget"):
        assert names(num_ranks=1, offload="host") == [*leanings, "offload nothing"]


def tune_on_ranks(folder: str) -> tuple[TuneResult, list[float], bool, dict[str, str]]:
    """The result, this rank's own times, whether nothing was trained, and errors."""
    os.environ["ZEROFX_TIMEOUT"] = "60"
    rank = dist.get_rank()
    model = tiny()
    optimizer = adamw(model)
    batch = {"ids": ids(rank), "labels": ids(9)}
    own: list[float] = []
    run = trial.run_trial

    def noted(*args: Any) -> Any:
        found, regions = run(*args)
        assert found.measured is not None
        own.append(found.measured.step_seconds)
        return found, regions

    with pytest.MonkeyPatch.context() as patch, untouched(model, optimizer):
        patch.setattr(tuning, "run_trial", noted)
        result = tune(model, optimizer, batch, save=Path(folder, "plan.json"))
    before = copy.deepcopy(model.state_dict())
    step = zerofx.compile(model, optimizer, backend="eager", plan=Path(folder, "plan.json"), example_batch=batch)
    assert step.plan == result.plan
    step.close()
    errors = {}
    wrong: dict[str, dict[str, Any]] = {
        "number": {"num_steps": 2 + rank},
        "budget": {"memory_budget": 1000},
        "folder": {"save": Path(folder, "none", "plan.json")},
    }
    for name, options in wrong.items():
        with pytest.raises(ZeroFXError) as caught:
            tune(model, optimizer, batch, **options)
        errors[name] = f"{type(caught.value).__name__}: {caught.value}"
    return result, own, all(torch.equal(before[name], value) for name, value in model.state_dict().items()), errors


def test_ranks_return_the_same_result() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (zero, mine, kept, errors), (one, theirs, also, others) = run_ranks(tune_on_ranks, 2, folder)
        assert Plan.load(Path(folder, "plan.json")) == zero.plan
    assert zero == one and zero.plan.prediction == one.plan.prediction
    assert kept and also
    check(zero)
    assert "prefetch 2" in [candidate.name for candidate in zero.candidates]
    measured = [candidate.measured.step_seconds for candidate in zero.candidates if candidate.measured]
    assert sorted(measured) == sorted(max(pair) for pair in zip(mine, theirs, strict=True)), "of the slowest rank"
    assert re.search("rank 0: num_steps: 2\n  rank 1: num_steps: 3", errors["number"])
    assert errors["budget"] == others["budget"] and "MemoryBudgetError" in errors["budget"]
    assert errors["folder"].startswith("UsageError") and "rank 0 could not" in others["folder"]


def far_off(**links: Link) -> Machine:
    """The CPU's row with links that it does not have."""
    cpu = Machine.named("cpu")
    host = replace(cpu.host, **{name: link for name, link in links.items() if name.startswith("to_")})  # type: ignore[arg-type]
    between = links.get("between", cpu.intra_node)
    return replace(cpu, intra_node=between, inter_node=between, host=host)


def regions_alone(result: TuneResult, prepared: Any, machine: Machine) -> float:
    """What the best plan is predicted to take if regions are corrected, and links are not."""
    return predict_plan(
        prepared.captured, result.plan, prepared.layout, prepared.programs, machine, read_settings(),
        on_cpu=True, fused=False, costs=replace(result.costs, links={}),
    ).step_seconds  # fmt: skip


def tune_from(machine: Machine, model: nn.Module, batch: Any, **options: Any) -> tuple[TuneResult, float]:
    """The result, and the best plan's seconds with links as the machine has them."""
    seen: list[Any] = []

    def noted(*args: Any, **keywords: Any) -> Any:
        seen.append(building.prepare(*args, **keywords))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerofx.tuning.prepare", noted)
        result = tune(model, adamw(model), batch, machine=machine, **options)
    return result, regions_alone(result, seen[0], machine)


def tune_over_a_wrong_link() -> tuple[TuneResult, float]:
    os.environ["ZEROFX_TIMEOUT"] = "60"
    batch = {"ids": ids(dist.get_rank()), "labels": ids(9)}
    return tune_from(far_off(between=Link(1e4, 1.0)), tiny(), batch, num_candidates=1)


def test_collectives_that_took_other_times_correct_the_links_between_ranks() -> None:
    zero, one = run_ranks(tune_over_a_wrong_link, 2)
    assert zero == one
    result, without = zero
    corrected, measured = result.plan.step_seconds, result.measured.step_seconds
    assert abs(corrected - measured) < abs(without - measured)
    assert without > 5.0 and corrected < 1.0
    assert result.costs.links["collective"].seconds(1 << 10) < 1.0
    assert "collective: " in str(result)


def test_copies_that_took_other_times_correct_the_links_to_the_host() -> None:
    slow = Link(1e4, 0.5)
    machine = far_off(to_host=slow, to_device=slow)
    model = noisy()
    most = peak_of("none")
    options: dict[str, Any] = {"memory_budget": most - 6000, "offload": "host", "recompute": "none"}
    result, without = tune_from(machine, model, rows(), num_candidates=1, **options)
    check(result)
    assert result.plan.link_bytes["to_host"] > 0
    assert set(result.costs.links) == {"to_host", "to_device"}
    corrected, measured = result.plan.step_seconds, result.measured.step_seconds
    assert abs(corrected - measured) < abs(without - measured)
    assert without > 1.0 > corrected


class FailingOnOne(zerofx.Step):
    """Runs out of memory on rank 1, behind a step that both have run."""

    def measure(self, *args: Any, num_steps: int = 3, **kwargs: Any) -> Measurement:
        if dist.get_rank() == 1 and len(self.plan.gathers) and FailingOnOne.built > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().measure(*args, num_steps=num_steps, **kwargs)

    built = 0

    def __init__(self, *args: Any) -> None:
        FailingOnOne.built += 1
        super().__init__(*args)


def fail_on_one_rank() -> list[Candidate]:
    os.environ["ZEROFX_TIMEOUT"] = "5"
    model = tiny()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "Step", FailingOnOne)
        return list(tune(model, adamw(model), {"ids": ids(), "labels": ids(9)}).candidates)


def test_after_one_rank_failed_amid_a_step_nothing_more_is_run() -> None:
    zero, one = run_ranks(fail_on_one_rank, 2)
    assert zero == one
    assert zero[0].outcome == "best"
    outcomes = [candidate.outcome for candidate in zero]
    assert sum(text.startswith("failed on rank") for text in outcomes) == 1
    assert any(text.startswith("not run: another failed amid a step") for text in outcomes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_regions_are_timed() -> None:
    model = noisy()
    optimizer = adamw(model)
    with untouched(model, optimizer):
        result = tune(model, optimizer, backend="inductor", num_candidates=2)
    check(result)
    assert result.costs.seconds and all(seconds > 0 for seconds in result.costs.seconds.values())
