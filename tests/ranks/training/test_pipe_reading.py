"""Tensors of a step in stages are read and written by name, one by one, and as DCP does, on all ranks alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.lib.distributed import run_ranks
from tests.lib.runs.stages import Run, begin_run
from zerofx import Plan, PlanError, RankMismatchError, UsageError

# A parameter of the first stage, which gpt2's second one reads too, and one of the second.
NAMES = {
    "gpt": ("layers.0.attention.qkv.weight", "head.weight"),
    "gpt2": ("transformer.wte.weight", "transformer.ln_f.bias"),
}
RUNS = [Run("gpt", {"pipe": 2}, 3, (("keep_gradients", "*"),)), Run("gpt2", {"pipe": 2}, 2, (("keep_gradients", "*"),))]


def _read(run: Run) -> list[Tensor]:
    """What is read after two steps, and of a third one that trains on from what has been written."""
    step, _, given = begin_run(run)
    for args, kwargs in given[:2]:
        step(*args, **kwargs)
    values = list[Tensor]()
    for name in NAMES[run.model]:
        for state in (None, "grad", "exp_avg", "exp_avg_sq"):
            with step.full(name, state, write_back=state in (None, "exp_avg")) as tensor:
                values.append(tensor.clone())
                if state in (None, "exp_avg"):
                    tensor.mul_(0.5)
    for dtype in (None, torch.bfloat16):
        pairs = [(name, tensor.clone()) for name, tensor in step.weights(dtype=dtype, changed=True)]
        assert not list(step.weights(dtype=dtype, changed=True))
        values += [tensor for _, tensor in sorted(pairs, key=lambda pair: pair[0])]
    args, kwargs = given[2]
    values.append(step(*args, **kwargs).clone())
    of_rank = [tensor.clone() for _, tensor in step.weights(rank=step.side_channel.num_ranks - 1)]
    assert bool(of_rank) == (step.side_channel.rank == step.side_channel.num_ranks - 1)
    for name, state, wrong in (
        ("none", None, "the name of a parameter"),
        (NAMES[run.model][1], "none", "a state that"),
    ):
        with pytest.raises(UsageError, match=f"expected {wrong}"), step.full(name, state):
            pass
    values += step.full_state_dict().values()
    step.close()
    return values


def _read_all(runs: list[Run]) -> list[list[Tensor]]:
    return [_read(run) for run in runs]


@pytest.mark.days(3)
def test_tensors_of_all_stages_are_read_and_written_by_name() -> None:
    alone = _read_all([run.on(None) for run in RUNS])
    for of_rank in run_ranks(_read_all, 2, RUNS):
        for values, expected in zip(of_rank, alone, strict=True):
            assert len(values) == len(expected) and all(map(torch.equal, values, expected))


def _save(run: Run, folder: Path) -> None:
    step, _, given = begin_run(run)
    for args, kwargs in given[:2]:
        step(*args, **kwargs)
    dcp_save({"step": step}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    step.close()


def _go_on(run: Run, folder: Path) -> list[Tensor]:
    """The losses and the parameters of the steps after those that were saved, in a model with other values."""
    step, _, given = begin_run(run)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.fill_(0.25)
    args, kwargs = given[0]
    step(*args, **kwargs)
    dcp_load({"step": step}, checkpoint_id=folder, no_dist=not dist.is_initialized())
    values = [step(*args, **kwargs).clone() for args, kwargs in given[2:4]]
    values += [tensor.clone() for tensor in step.full_state_dict().values()]
    before: dict[str, Any] = copy.deepcopy(step.full_state_dict())
    step.load_state_dict({"model": {name: torch.zeros_like(tensor) for name, tensor in before.items()}})
    assert not any(tensor.any() for tensor in step.full_state_dict().values())
    step.close()
    return values


def _save_and_go_on(run: Run, folder: Path, alone: Path) -> list[list[Tensor]]:
    _save(run, folder)
    return [_go_on(run, folder), _go_on(run, alone)]


@pytest.mark.days(3)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_stages_and_loads_them_anywhere(tmp_path: Path) -> None:
    run = Run("dropout", {"pipe": 2}, 2, steps=4)
    folder, alone = tmp_path / "stages", tmp_path / "alone"
    _save(run.on(None), alone)
    of_ranks = run_ranks(_save_and_go_on, 2, run, folder, alone)
    expected = _go_on(run.on(None), alone)
    for values in (*of_ranks[0], *of_ranks[1], _go_on(run.on(None), folder)):
        assert all(map(torch.equal, values, expected)) and len(values) == len(expected)


def _train_by_plans(run: Run, folder: Path) -> list[list[Tensor]]:
    """Losses without a plan, with the one that this has saved, and with that as an object; others are refused."""
    losses, plans = [], list[Any]([None, folder / "plan.json"])
    for number in range(3):
        step, _, given = begin_run(replace(run, options=(*run.options, ("plan", plans[number]))))
        losses.append([step(*args, **kwargs).clone() for args, kwargs in given])
        step.save_plan(folder / "plan.json")
        assert step.measure(*given[0][0], **given[0][1], num_steps=1).peak_bytes == step.plan.peak_bytes
        plans.append(step.plan)
        step.close()
    assert len({plan.decisions_hash() for plan in plans[2:]}) == 1
    other = Plan.load(folder / f"plan-{2 - dist.get_rank()}-of-2.json")
    with pytest.raises(PlanError, match="part on the axis 'pipe': expected"):
        begin_run(replace(run, options=(*run.options, ("plan", other))))
    with pytest.raises((PlanError, RankMismatchError), match=r"none-\d-of-2.json"):
        begin_run(replace(run, options=(*run.options, ("plan", folder / "none.json"))))
    return losses


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((("memory_budget", 380_000), ("recompute", "auto")), id="cut so that stages hold alike"),
        pytest.param((("order", "zero-bubble"),), id="weight gradients apart"),
        pytest.param((("order", "round-robin"),), id="round robin"),
    ],
)
def test_stages_are_run_by_the_plans_that_they_have_saved(options: tuple[Any, ...], tmp_path: Path) -> None:
    run = Run("gpt", {"pipe": 2}, 4, options, steps=2)
    step, _, given = begin_run(Run(run.model, None, run.accumulate, steps=run.steps))
    expected = [step(*args, **kwargs).clone() for args, kwargs in given]
    step.close()
    for losses in run_ranks(_train_by_plans, 2, run, tmp_path):
        for of_plan in losses:
            assert all(map(torch.equal, of_plan, expected)) and len(of_plan) == 2
