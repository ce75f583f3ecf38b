"""Optimizer states that are stored in bf16: the bits of a plain loop that rounds them after each step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, Case, batches
from tests.lib.optimizers import CASES as OPTIMIZERS
from tests.lib.runs.offloads import check_measured, check_saved_and_loaded, placing, prepare_case
from tests.lib.runs.training import Trained, build, differences, step_of, train_compiled, train_plain
from tests.ranks.tiers.test_delayed import train_delayed
from tests.ranks.tiers.test_states import PLACES
from zerofx import PlanError, Precision, UsageError
from zerofx.choices import StateDtype

pytestmark = pytest.mark.usefixtures("drive", "verified")

LOW = torch.bfloat16


def slowly(*cases: Any) -> list[Any]:
    """Cases of a slow test."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


BF16: dict[str, Any] = {"precision": Precision(state_dtype="bf16")}


def _round(optimizer: torch.optim.Optimizer) -> None:
    for parameter, entry in optimizer.state.items():
        for value in entry.values():
            if isinstance(value, torch.Tensor) and value.dim() == parameter.dim() and value.dtype == parameter.dtype:
                value.copy_(value.to(LOW))


def rounding(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Optimizers whose states are rounded when they are made, and after each step."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        _round(optimizer)
        optimizer.register_step_post_hook(lambda *_: _round(optimizer))
        return optimizer

    return made


def rounded(case: Case) -> Case:
    return replace(case, optimizer=rounding(case.optimizer))


@pytest.mark.parametrize("name", ["mixed dtypes", *slowly("gpt", "param groups", "frozen")])
def test_one_process_trains_as_a_loop_that_rounds_states(name: str) -> None:
    case = CASES[name]
    expected = train_plain(rounded(case), 4)
    for stage in (0, 3):
        assert differences(expected, train_compiled(case, stage, 4, **BF16)) == [], stage
    assert differences(expected, train_compiled(case, 3, 4)) != []


QUICK = ["sgd_momentum", "adagrad_all", "radam", "counting_adam"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*QUICK, *slowly(*(name for name in OPTIMIZERS if name not in QUICK))])
def test_any_optimizer(name: str) -> None:
    case = replace(CASES["stack"], optimizer=lambda model: OPTIMIZERS[name](list(model.parameters())))
    assert differences(train_plain(rounded(case), 7), train_compiled(case, 3, 7, **BF16)) == []


@pytest.mark.parametrize(("tier", "update"), [PLACES[1], *slowly(PLACES[0], *PLACES[2:])])
def test_states_in_other_tiers_have_the_same_bits_and_take_the_bytes_predicted(tier: str, update: str) -> None:
    case = CASES["gpt"]
    prepared = prepare_case(case, 0, 1, state_dtype=LOW)
    plan = placing(prepared, tier, update)
    assert differences(train_plain(rounded(case), 3), train_compiled(case, 0, 3, plan=plan, **BF16)) == []
    step, args = step_of("gpt", plan=plan, **BF16)
    check_measured(step.measure(*args), step.plan, args[0].nbytes)
    full = sum(bucket.full_bytes for bucket in prepared.layout.buckets)
    # Half as much for Adam's two moments, and the masters in full where the host updates.
    assert step.tiers() == {"device": full, tier: full + (full if update == "host" else 0)}
    check_saved_and_loaded(step_of("gpt", plan=plan, **BF16)[0], step_of("gpt", **BF16)[0], args)


def test_bytes_on_the_device_are_those_predicted() -> None:
    step, args = step_of("gpt", 3, precision=Precision("bf16", state_dtype="bf16"))
    found = step.measure(*args, num_steps=2)
    numel = sum(bucket.shard_numel for bucket in step.plan.buckets)
    # 12 bytes for each parameter, not 16: in bf16 the parameter and its gradient, and two states; a master.
    assert found.model_state_bytes == step.plan.model_state_bytes == 12 * numel
    assert found.peak_bytes["device"] == pytest.approx(step.plan.peak_bytes["device"], rel=0.01)
    assert "states stored in bfloat16" in str(step)


def test_delayed_updates() -> None:
    case = CASES["gpt"]
    expected = train_delayed(rounded(case), 5, 1)
    assert differences(expected, train_compiled(case, 0, 5, delayed_update=1, **BF16)) == []


def _on_ranks(
    drive: str, stages: list[int], places_by_stage: list[tuple[int, tuple[str, str]]]
) -> dict[str, list[str]]:
    os.environ["ZEROFX_NVME_DIR"] = drive
    case = CASES["gpt"]
    expected = train_plain(rounded(case), 3)
    runs: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in stages}
    for stage, places in places_by_stage:
        runs[f"stage {stage} {places}"] = {
            "stage": stage, "plan": placing(prepare_case(case, stage, 2, state_dtype=LOW), *places)
        }  # fmt: skip
    return {
        label: wrong
        for label, options in runs.items()
        if (wrong := differences(expected, train_compiled(case, steps=3, **options, **BF16)))
    }


def test_two_ranks(drive: Path) -> None:
    assert run_ranks(_on_ranks, 2, str(drive), [], [(3, PLACES[3])]) == [{}, {}]


@pytest.mark.slow
def test_two_ranks_at_every_stage(drive: Path) -> None:
    places = [(stage, place) for stage in range(4) for place in PLACES]
    assert run_ranks(_on_ranks, 2, str(drive), [0, 1, 2, 3], places) == [{}, {}]


# ---------------------------------------------------------------------------------------------- saved and loaded


def _dtypes(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    entries = optimizer.state_dict()["state"].values()
    return {value.dtype for entry in entries for name, value in entry.items() if name != "step"}


def test_the_optimizer_says_what_its_states_are_stored_in_and_gets_them_back_as_it_computes() -> None:
    step, args = step_of("gpt", **BF16)
    step(*args)
    assert _dtypes(step.optimizer) == {LOW}
    saved = step.optimizer.state_dict()
    step.close()
    assert _dtypes(step.optimizer) == {torch.float32}
    for parameter, entry in zip(step.model.parameters(), saved["state"].values(), strict=True):
        held = step.optimizer.state[parameter]
        assert torch.equal(held["exp_avg"], entry["exp_avg"].float()) and torch.equal(held["step"], entry["step"])
    step.model(*args).sum().backward()
    step.optimizer.step()


def test_states_of_a_plain_loop_are_loaded_and_rounded() -> None:
    case = CASES["gpt"]
    model = build(case)
    optimizer = case.optimizer(model)
    given = list(batches(case, 0, 5))
    for args, _ in given[:2]:
        optimizer.zero_grad()
        model(*args).backward()
        optimizer.step()
    other = build(case)
    other.load_state_dict(model.state_dict())
    taking_over = case.optimizer(other)
    taking_over.load_state_dict(optimizer.state_dict())
    _round(optimizer)
    optimizer.register_step_post_hook(lambda *_: _round(optimizer))
    step = zerofx.compile(other, taking_over, 3, backend="eager", **BF16)
    losses, expected = [], []
    for number, (args, _) in enumerate(given[2:]):
        if number == 1:  # what is loaded into a step has float32, as torch gives it to any optimizer
            taking_over.load_state_dict(optimizer.state_dict())
        losses.append(step(*args).clone())
        optimizer.zero_grad()
        expected.append(model(*args))
        expected[-1].backward()
        optimizer.step()
    found = Trained(losses, step.full_state_dict())
    assert differences(Trained([loss.detach() for loss in expected], dict(model.state_dict())), found) == []


@pytest.mark.parametrize("before", ["bf16", *slowly(None)])
def test_checkpoints_are_loaded_into_another_dtype(before: StateDtype | None, tmp_path: Path) -> None:
    after: StateDtype | None = None if before else "bf16"
    step, args = step_of("gpt", precision=Precision(state_dtype=before))
    step(*args)
    step(*args)
    step.save_checkpoint(tmp_path)
    saved = step.optimizer.state_dict()["state"]
    step.close()
    for fresh in (True, False):
        other, _ = step_of("gpt", 3, precision=Precision(state_dtype=after))
        if not fresh:
            other(*args)
        other.load_checkpoint(tmp_path)
        assert torch.isfinite(other(*args))
        other.load_checkpoint(tmp_path)
        assert _dtypes(other.optimizer) == {LOW if after else torch.float32}
        for index, entry in other.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                assert torch.equal(value, saved[index][name].to(value.dtype)), name
        other.close()


# ------------------------------------------------------------------------------------------- what is not narrowed


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.phases).abs().square().mean()


def test_states_of_complex_parameters_and_of_low_ones_stay_as_they_are() -> None:
    for model, dtype in ((_Complex(), torch.complex64), (nn.Linear(4, 3, bias=False).bfloat16(), LOW)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        loss = None if isinstance(model, _Complex) else (lambda out, _: out.float().square().mean())
        step = zerofx.compile(model, optimizer, backend="eager", loss_fn=loss, **BF16)
        x = torch.randn(5, 4, dtype=torch.float32 if loss is None else LOW)
        step(x)
        assert _dtypes(optimizer) == {dtype}
        assert all(bucket.state_dtype is None for bucket in step.plan.buckets)
        step.close()


@pytest.mark.parametrize("wrong", ["fp16", "fp32", "bfloat16", LOW, 1])
def test_another_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"expected state_dtype to be 'bf16', or None, found .* stores the optimizer's states"
    ):
        Precision(state_dtype=wrong)


def test_a_plan_for_another_dtype_is_refused() -> None:
    step, args = step_of("gpt", plan=prepare_case(CASES["gpt"], 0, 1, state_dtype=LOW).plan)
    with pytest.raises(PlanError, match=r"with states in bfloat16, found .* computed in float32"):
        step(*args)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_updates_store_them_too() -> None:
    case = CASES["stack"]
    expected = train_plain(rounded(case), 3)
    plans = [None, *(placing(prepare_case(case, 0, 1, state_dtype=LOW), "host", side) for side in ("device", "host"))]
    first, *others = (train_compiled(case, 0, 3, backend="inductor", plan=plan, **BF16) for plan in plans)
    assert differences(expected, first, 1e-2) == []
    for other in others:
        assert differences(first, other) == []
    step, args = step_of("stack", backend="inductor", **BF16)
    step(*args)
    check_measured(step.measure(*args), step.plan, 4096, share=0.01)
