"""Evaluations on several ranks: parameters gathered a bucket at a time, and the values of eager mode."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

import zerofx
from gpt import GPT
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES
from tests.lib.runs.evaluating import checked, evaluated, in_eager_mode, own_batches, step_of_case, unlike
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.training import world
from zerofx import Machine, RankMismatchError
from zerofx.scheduler.cost.machine import Link


def _wrong(name: str, options: dict[str, Any]) -> list[str]:
    return evaluated(name, **options)


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"stage {stage}": ("gpt", {"stage": stage}) for stage in range(4)},
    "batch norm": ("batchnorm", {"stage": 3}),
    "tied": ("tied", {"stage": 3}),
    "nothing ahead": ("gpt", {"stage": 3, "prefetch": 0}),
    "kept in training": ("gpt", {"stage": 3, "keep_gathered": "all"}),
    "accumulated": ("gpt", {"stage": 2, "accumulate": 2}),
}


def _quantised() -> list[str]:
    """What is wrong with an evaluation between steps whose gathers are sent in few bits."""
    case, (rank, _) = CASES["gpt"], world()
    (args, kwargs), (others, named) = own_batches(case, rank, 2)
    slow = replace(Machine.named("cpu"), intra_node=Link(bandwidth=1e6, latency=1e-6))
    step = step_of_case(case, 3, wire="int8", machine=slow)
    step(*args, **kwargs)
    wrong = checked(step, case, others, named)
    wrong += [] if any(wire.gather != "exact" for wire in step.plan.wires) else ["training sends all exactly"]
    return wrong + [f"{wire} is sent so" for wire in step.evaluation.plan.wires if wire.gather != "exact"]


@pytest.mark.slow
def test_gathers_are_exact_where_those_of_training_are_not() -> None:
    for rank, wrong in enumerate(run_ranks(_quantised, 2)):
        assert wrong == [], f"rank {rank}"


def _in_slices() -> list[str]:
    """What is wrong with an evaluation of parameters that training has in slices."""
    case, (rank, _) = CASES["gpt"], world()
    (args, kwargs), (others, named) = own_batches(case, rank, 2)
    step = step_of_case(case, 3, tile={"layers.0.mlp.up.weight": 4, "layers.2.mlp.out.weight": 2})
    step(*args, **kwargs)
    wrong = checked(step, case, others, named, tolerance=1e-6)
    found = {sliced.value: sliced.num_tiles for sliced in step.evaluation.plan.slices}
    return wrong + ([] if found == {"layers.0.mlp.up.weight": 4, "layers.2.mlp.out.weight": 2} else [f"{found}"])


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_in_slices(num_ranks: int) -> None:
    for rank, wrong in enumerate(run_ranks(_in_slices, num_ranks)):
        assert wrong == [], f"rank {rank}"


def _without_values(path: str | None) -> list[str]:
    """What is wrong with an evaluation of a model that had no values before its step was prepared."""
    case, (rank, _) = CASES["gpt"], world()
    (args, kwargs), (others, named) = own_batches(case, rank, 2)
    with zerofx.empty_init():
        model = case.model()
    step = zerofx.compile(model, case.optimizer(model), 3, backend="eager", weights=path)
    step.prepare(*args, **kwargs)
    wrong = checked(step, case, others, named)
    if path is not None:
        loaded = case.model()
        load_model(loaded, path)
        wrong += unlike(in_eager_mode(loaded, case, others, named), step.evaluate(*others, **named))
    return wrong


def _drawn_or_loaded(path: str) -> dict[str, list[str]]:
    return {"drawn": _without_values(None), "loaded": _without_values(path)}


def test_models_without_values_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(11)
    save_model(CASES["gpt"].model(), str(tmp_path / "model.safetensors"))
    for rank, wrong in enumerate(run_ranks(_drawn_or_loaded, 2, str(tmp_path / "model.safetensors"))):
        assert wrong == {"drawn": [], "loaded": []}, f"rank {rank}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("what", RUNS)
def test_two_ranks(what: str) -> None:
    for rank, wrong in enumerate(run_ranks(_wrong, 2, *RUNS[what])):
        assert wrong == [], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_replicas(stage: int) -> None:
    options = {"stage": stage, "mesh": {"replicate": 2, "shard": 2}}
    for rank, wrong in enumerate(run_ranks(_wrong, 4, "gpt", options)):
        assert wrong == [], f"rank {rank}"


def _within_budget(offload: Any, drive: str) -> list[str]:
    """What is wrong with evaluations of a model that the budget does not hold whole."""
    os.environ["ZEROFX_NVME_DIR"] = drive
    torch.manual_seed(0)
    model = GPT(vocab=64, dim=64, depth=5, heads=2, block=8)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    budget = int(0.8 * whole)
    torch.manual_seed(1 + world()[0])
    ids = torch.randint(64, (2, 2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    step = zerofx.compile(model, optimizer, 3, backend="eager", memory_budget=budget, offload=offload)
    batch, other = ((part[:, :-1].clone(), part[:, 1:].clone()) for part in ids)
    step(*batch)
    assert step.plan.states
    wrong = checked(step, CASES["gpt"], other, {})
    measured = step.measure_evaluation(*other).peak_bytes["device"]
    wrong += [] if measured <= budget else [f"{measured} bytes of {budget} are taken"]
    step(*batch)
    return wrong


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("offload", ["host", "nvme"])
def test_a_budget_smaller_than_the_model_holds(offload: str, tmp_path: Path) -> None:
    for rank, wrong in enumerate(run_ranks(_within_budget, 2, offload, str(tmp_path))):
        assert wrong == [], f"rank {rank}"


def _shared(name: str, stage: int) -> list[str]:
    """What is wrong with an evaluation that both ranks compute together."""
    case = CASES[name]
    (args, kwargs), (others, named) = own_batches(case, 0, 2)
    step = step_of_case(case, stage, mesh={"model": 2}, machine=SHARING)
    step(*args, **kwargs)
    found = step.evaluate(*others, **named)
    placements = {text for sharding in step.evaluation.plan.shardings for text in sharding.outputs}
    with step.full_parameters() as model:
        wrong = unlike(in_eager_mode(model, case, others, named), found, 2e-5)
    step(*args, **kwargs)
    return wrong + ([] if {"S0", "S1"} <= placements else [f"values are {placements}"])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "stage"), [("gpt", 3), ("llama", 0)])
def test_ranks_that_share_a_computation(name: str, stage: int) -> None:
    for rank, wrong in enumerate(run_ranks(_shared, 2, name, stage)):
        assert wrong == [], f"rank {rank}"


def _apart() -> list[str]:
    """What ranks are told that evaluate other shapes, or where others train."""
    case, (rank, _) = CASES["gpt"], world()
    ((args, kwargs),) = own_batches(case, rank, 1)
    step = step_of_case(case, 3)
    step(*args, **kwargs)
    step.evaluate(*args, **kwargs)
    texts = []
    with pytest.raises(RankMismatchError) as unlike_shapes:
        step.evaluate(*(tensor[: 1 + rank] for tensor in args), **kwargs)
    texts.append(str(unlike_shapes.value))
    with pytest.raises(RankMismatchError) as unlike_calls:
        (step if rank else step.evaluate)(*args, **kwargs)
    texts.append(str(unlike_calls.value))
    step.evaluate(*args, **kwargs)
    return texts


def test_ranks_that_do_not_evaluate_alike_are_told() -> None:
    for shapes, calls in run_ranks(_apart, 2):
        assert "shapes, dtypes and constants of a batch on every rank, found another on rank 1:\n  rank 0:" in shapes
        assert "  rank 0: call step.evaluate(batch)\n  rank 1: call step(batch)\n" in calls


class Levelled(nn.Module):
    """Reads a number that does not matter as long as it is not negative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 1)
        self.level = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y.mean() if self.level >= 0 else y.sum()


def _written_by_rank_0() -> tuple[list[float], int]:
    model = Levelled()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), lr=0.0), backend="eager")
    step(torch.ones(2, 4))
    losses = [float(step.evaluate(torch.ones(2, 4)))]
    first = step.evaluation
    for level in (1, 2, 3):
        if world()[0] == 0:
            model.level = level
        losses.append(float(step.evaluate(torch.ones(2, 4))))
        assert step.evaluation is first
    return losses, step.num_steps


def test_an_evaluation_goes_on_where_one_rank_writes_what_changes_nothing_in_it() -> None:
    for losses, num_steps in run_ranks(_written_by_rank_0, 2):
        assert num_steps == 1 and losses == losses[:1] * 4


class Failing(nn.Module):
    """Checks a value of its batch in evaluation mode, in its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        if not self.training:
            torch._assert((x < 1e6).all(), "too large")
        return x.sum()


def _failing() -> str:
    torch.manual_seed(0)
    model = Failing()
    step = zerofx.compile(model, torch.optim.SGD(model.parameters(), 0.01), 3, backend="eager")
    x = torch.ones(2, 4)
    step(x)
    step.evaluate(x)
    try:
        step.evaluate(x * (1e9 if world()[0] else 1))
        step(x)
    except (RuntimeError, RankMismatchError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing"


def test_a_rank_that_fails_amid_an_evaluation_ends_the_step_on_all() -> None:
    first, second = run_ranks(_failing, 2)
    assert "an evaluation failed on rank 1" in first
    assert "too large" in second
    assert "restart all ranks from a checkpoint" in second
