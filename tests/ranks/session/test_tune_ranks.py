"""Tuning on several ranks, and over links that are not what the machine says."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.runs.sharing import SHARING
from tests.lib.runs.tuning import check, noisy, peak_of, rows, tune
from tests.lib.users import adamw, eager_step, ids, tiny, untouched
from zerofx import Candidate, Plan, TuneResult, ZeroFXError
from zerofx.driver.driver import prepare_together, target_of
from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.search.rehearsal import Rehearsal
from zerofx.tuning import trial, tuner
from zerofx.tuning import tuner as tuning


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


@pytest.mark.days(3)
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
    to_host, to_device = (links.get(name, getattr(cpu.host, name)) for name in ("to_host", "to_device"))
    host = replace(cpu.host, to_host=to_host, to_device=to_device)
    between = links.get("between", cpu.intra_node)
    return replace(cpu, intra_node=between, inter_node=between, host=host)


def regions_alone(result: TuneResult, prepared: Any, machine: Machine) -> float:
    """What the best plan is predicted to take if regions are corrected, and links are not."""
    target = replace(target_of(prepared), machine=machine, costs=replace(result.costs, links={}))
    rehearsal = Rehearsal(prepared.captured, prepared.layout, prepared.programs, target)
    return rehearsal.predict(result.plan).step_seconds


def tune_from(machine: Machine, model: nn.Module, batch: Any, **options: Any) -> tuple[TuneResult, float]:
    """The result, and the best plan's seconds with links as the machine has them."""
    seen: list[Any] = []

    def noted(*args: Any, **keywords: Any) -> Any:
        seen.append(prepare_together(*args, **keywords))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "prepare_together", noted)
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


def tune_on_a_mesh(axes: dict[str, int], machine: Machine) -> tuple[TuneResult, list[float], list[float]]:
    """The result, and the losses of training by its plan, and on one process of the same batch."""
    os.environ["ZEROFX_TIMEOUT"] = "60"
    mesh = Mesh(**axes)
    batch = {"ids": ids(0), "labels": ids(9)}  # for all ranks: those along "model" share it
    model, alone = tiny(), tiny()
    result = tune(model, adamw(model), batch, mesh=axes, machine=machine, num_candidates=2)
    optimizer, theirs = adamw(model), adamw(alone)
    step = zerofx.compile(model, optimizer, backend="eager", mesh=axes, machine=machine, plan=result.plan)
    losses = [float(step(**batch)) for _ in range(3)]
    step.close()
    assert result.plan.mesh == mesh
    return result, losses, [float(eager_step(alone, theirs, **batch)) for _ in range(3)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("axes", "num_ranks", "streams"),
    [
        ({"replicate": 2}, 2, {"collective replicate"}),
        ({"shard": 2, "model": 2}, 4, {"collective", "collective model"}),
    ],
)
def test_plans_of_a_mesh_are_tuned_by_the_links_along_its_axes(
    axes: dict[str, int], num_ranks: int, streams: set[str]
) -> None:
    results = run_ranks(tune_on_a_mesh, num_ranks, axes, SHARING)
    result, losses, expected = results[0]
    assert all(other == results[0] for other in results)
    check(result)
    assert streams <= set(result.costs.links) and result.measured.transfers.keys() >= streams
    assert losses == pytest.approx(expected, rel=1e-5)


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
    """Runs out of memory on rank 1, after a step that both have run."""

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


@pytest.mark.days(3)
def test_after_one_rank_failed_amid_a_step_nothing_more_is_run() -> None:
    zero, one = run_ranks(fail_on_one_rank, 2)
    assert zero == one
    assert zero[0].outcome == "best"
    outcomes = [candidate.outcome for candidate in zero]
    assert sum(text.startswith("failed on rank") for text in outcomes) == 1
    assert any(text.startswith("not run: another failed amid a step") for text in outcomes)
