"""A plan that is given to compile: used again, or refused with what differs, before anything is changed."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.users import Tiny, adamw, ids, same_parameters, tiny, untouched
from zerofx import MemoryBudgetError, Plan, PlanError, UsageError, ZeroFXError, ZeroFXWarning
from zerofx.scheduler.plan.decisions import Absence


def batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return {"ids": ids(0, rows), "labels": ids(9, rows)}


def compile_eager(model: nn.Module, **options: Any) -> zerofx.Step:
    return zerofx.compile(model, adamw(model), backend="eager", **{"example_batch": batch(), **options})


def plan_of(**options: Any) -> Plan:
    return compile_eager(tiny(), **options).plan


def refusal(kind: type[ZeroFXError] = PlanError, model: Callable[[], nn.Module] = tiny, **options: Any) -> str:
    """The error of a compile call that leaves model and optimizer alone."""
    made = model()
    optimizer = adamw(made)
    with untouched(made, optimizer), pytest.raises(kind) as caught:
        zerofx.compile(made, optimizer, backend="eager", **{"example_batch": batch(), **options})
    return str(caught.value)


def test_a_plan_is_read_from_a_file_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = compile_eager(tiny(), memory_budget="1GiB", recompute="full")
    first.plan.save(path)
    for given in (path, str(path), Plan.load(path)):
        again = compile_eager(tiny(), plan=given)
        assert again.plan == first.plan and again.source == first.source
    one, other = first(**batch()), again(**batch())
    assert torch.equal(one, other)
    first.close()
    again.close()
    assert same_parameters(first.model, again.model)


def test_every_option_that_differs_is_named() -> None:
    plan = replace(plan_of(stage=2), num_ranks=8, machine="h100-sxm", precision="bf16")
    assert refusal(plan=plan).splitlines() == [
        "expected what the plan was made for, found something else:",
        "  stage: expected 2, found 3",
        "  precision: expected bf16, found that of the model",
        "  ranks: expected 8, found 1",
        "  machine: expected h100-sxm, found cpu",
        "Give the options that the plan was made with, or leave plan out to have one made.",
    ]


def test_a_plan_for_other_axes_is_refused() -> None:
    said = refusal(plan=replace(plan_of(), num_ranks=8, replicate=2))
    assert "  ranks: expected 8, found 1" in said and "  mesh: expected replicate 2 x shard 4, found one axis" in said


def test_a_plan_for_another_machine_is_used_if_that_is_asked_for() -> None:
    model = tiny()
    made = zerofx.plan(model, adamw(model), batch(), backend="eager", machine="mi300x").plan
    assert "machine: expected mi300x, found cpu" in refusal(plan=made)
    assert compile_eager(tiny(), plan=made, machine="mi300x").plan == made


class Wider(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 12)


class Longer(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


class Smoother(Tiny):
    def outputs(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().outputs(ids))


class Scaled(Tiny):
    def outputs(self, ids: torch.Tensor) -> torch.Tensor:
        return super().outputs(ids) * 2.0


def test_what_differs_in_the_model_is_named() -> None:
    plan = plan_of()
    wider = refusal(plan=plan, model=Wider)
    assert "  parameter head.weight: expected float32[11, 4], found float32[12, 4]\n" in wider
    assert re.search(r"bucket head \(group 0, float32\): expected 55 parameters \(55\).*, found 60 parameters", wider)
    longer = refusal(plan=plan, model=Longer)
    assert "  parameter layers.2.0.weight: expected none, found float32[4, 4]\n" in longer
    assert "  aten.tanh.default: expected 2 calls, found 3 calls\n" in longer
    assert "  bucket layers.2 (group 0, float32): expected none, found 20 parameters (20)" in longer
    assert "  aten.tanh.default: expected 2 calls, found 3 calls\n" in refusal(plan=plan, model=Smoother)


def test_an_argument_that_differs_is_told_from_an_operator() -> None:
    class Tripled(Tiny):
        def outputs(self, ids: torch.Tensor) -> torch.Tensor:
            return super().outputs(ids) * 3.0

    plan = compile_eager(Scaled()).plan
    text = refusal(plan=plan, model=Tripled)
    assert "  nodes: expected these operators with their arguments, found the same ones with others" in text
    assert "aten." not in text and "bucket" not in text


def test_another_batch_is_named() -> None:
    text = refusal(plan=plan_of(), example_batch=batch(rows=5))
    assert "  input ids: expected int64[2, 3], found int64[5, 3]\n" in text


def test_a_second_shape_is_refused_and_the_first_runs_on() -> None:
    step = compile_eager(tiny(), plan=plan_of())
    step(**batch())
    with (
        pytest.warns(ZeroFXWarning, match="another shape"),
        pytest.raises(PlanError, match=r"input ids: expected int64\[2, 3\]"),
    ):
        step(**batch(rows=5))
    step(**batch())
    assert step.num_steps == 2


def test_many_differences_are_counted() -> None:
    class Deep(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.layers.extend(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20))

    text = refusal(plan=plan_of(), model=Deep)
    assert re.search(r"\n  \d+ more tensors: expected as in the plan, found others\n", text)
    assert len(text.splitlines()) < 35


def test_a_budget_that_the_plan_does_not_meet_is_refused() -> None:
    plan = plan_of()
    peak = plan.peak_bytes["device"]
    text = refusal(MemoryBudgetError, plan=plan, memory_budget=peak - 1)
    assert f"({peak - 1} bytes)" in text and f"({peak} bytes): allow as much, or leave plan out" in text
    # A plan without predictions is found out once it has been carried out.
    assert f"({peak} bytes)" in refusal(MemoryBudgetError, plan=replace(plan, prediction=None), memory_budget=peak - 1)
    assert compile_eager(tiny(), plan=plan, memory_budget=peak).plan == plan


class Wavy(Tiny):
    """With values that are worth computing again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid(), nn.Tanh()) for _ in range(2)]
        )


def test_options_that_contradict_the_plan() -> None:
    plan = compile_eager(Wavy(), recompute="full").plan
    assert plan.recomputes
    assert "expected recompute='auto'" in refusal(UsageError, Wavy, plan=plan, recompute="none")
    offloaded = Absence(
        kind="offloads",
        value="tanh",
        tier="host",
        num_bytes=4,
        free_after=("tanh",),
        reload_before=("tanh",),
        reason="",
    )
    away = plan.replace_absences(recomputes=(), offloads=[offloaded])
    assert "has 1 values, the states of 0 buckets, the parameters of 0 and the gradients of 0 off" in refusal(
        UsageError, Wavy, plan=away, offload="none"
    )
    with pytest.warns(ZeroFXWarning, match="prefetch and keep_gathered have no effect"):
        assert compile_eager(Wavy(), plan=plan, prefetch=3).plan == plan


def test_files_that_hold_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert f"expected a plan in the file {path}, found none" in refusal(plan=path)
    path.write_text("{}")
    assert "expected the JSON of a zerofx plan" in refusal(plan=str(path))
    assert "a Plan, or a path, or None, found 3" in refusal(UsageError, plan=3)


def use_files(folder: str) -> dict[str, str]:
    """This rank's errors, and the hash of the plan in the end; only rank 0 has the files."""
    os.environ["ZEROFX_TIMEOUT"] = "60"
    rank = dist.get_rank()
    paths = {name: Path(folder, f"{name}.json") if rank == 0 else Path(folder, "nowhere") for name in ("good", "one")}
    model = tiny()
    good = compile_eager(model)
    if rank == 0:
        good.plan.save(paths["good"])
        replace(good.plan, num_ranks=1).save(paths["one"])
    found = {"hash": good.plan.decisions_hash()}
    good.close()
    wrong: dict[str, dict[str, Any]] = {
        "missing": {"plan": Path(folder, "missing")},
        "ranks": {"plan": paths["one"]},
        "stage": {"plan": paths["good"], "stage": 1},
        "batch": {"plan": paths["good"], "example_batch": batch(rows=5)},
        "one file": {"plan": paths["good"] if rank == 0 else None},
    }
    for name, options in wrong.items():
        optimizer = adamw(model)
        with untouched(model, optimizer), pytest.raises(ZeroFXError) as caught:
            zerofx.compile(model, optimizer, backend="eager", **{"example_batch": batch(), **options})
        found[name] = f"{type(caught.value).__name__}: {caught.value}"
    assert compile_eager(model, plan=paths["good"]).plan.decisions_hash() == found["hash"]
    return found


def test_ranks_read_one_file_and_fail_alike() -> None:
    with tempfile.TemporaryDirectory() as folder:
        zero, one = run_ranks(use_files, 2, folder)
    assert zero == one
    assert "PlanError: expected a plan in the file" in zero["missing"]
    assert "  ranks: expected 1, found 2\n" in zero["ranks"]
    assert "  stage: expected 3, found 1\n" in zero["stage"]
    assert "  input ids: expected int64[2, 3], found int64[5, 3]\n" in zero["batch"]
    assert re.search("RankMismatchError: .*\n.*plan: from a file\n.*plan: None", zero["one file"])
